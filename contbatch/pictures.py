"""Figures as bytes."""

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def png(figure: "Figure") -> bytes:
    """Return a figure as PNG; it is closed."""
    return _bytes(figure, "png")


def svg(figure: "Figure") -> bytes:
    """Return a figure as SVG, its text as text, which is drawn in half the time; it is closed."""
    return _bytes(figure, "svg")


def _bytes(figure: "Figure", kind: str) -> bytes:
    import matplotlib.pyplot as plt

    buffer = BytesIO()
    with plt.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind)
    plt.close(figure)  # else a notebook shows what pyplot made a second time, below the cell
    return buffer.getvalue()
