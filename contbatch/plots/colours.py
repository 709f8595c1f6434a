"""Colours that colour-blind readers tell apart: Okabe and Ito's, repeated if there are more lines than colours."""

from typing import Any

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
MARKERS = "osD^vP"
"""Differ too, so that print shows the lines apart."""
DASHES: list[Any] = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3))]


def line_style(place: int) -> dict[str, Any]:
    """Return colour and dashes of the line in that place."""
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)]}
