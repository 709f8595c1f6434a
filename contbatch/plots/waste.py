"""Where the memory went."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from contbatch.metrics import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WASTE: dict[str, tuple[str, str]] = {
    "stored": ("#0072B2", "tokens"),
    "reserved": ("#56B4E9", "reserved, used later"),
    "internal": ("#D55E00", "internal fragmentation: never used"),
    "external": ("#E69F00", "external fragmentation: free, in pieces too short"),
    "cached": ("#BBBBBB", "cached prefixes"),
    "free": ("#EEEEEE", "free"),
}
"""Colour and label of each share of `Result.waste`."""


def waste(results: Mapping[str, Result], *, title: str = "", ax: "Axes | None" = None) -> "Axes":
    """Draw where the memory of each run went, on average over its steps: a stacked bar a run, as vLLM's figure 2.

    Parameters
    ----------
    results : mapping from name to Result
    title : str
    ax : Axes, optional
        Drawn into; a new figure if None.
    """
    ax = plt.subplots(figsize=(10, 1.6 + 0.45 * len(results)), layout="constrained")[1] if ax is None else ax
    for row, result in enumerate(results.values()):
        left = 0.0
        for kind, share in (100 * result.waste().mean()).items():
            colour = WASTE[str(kind)][0]
            ax.barh(row, share, left=left, height=0.7, facecolor=colour, edgecolor="white")
            if share > 3:
                dark = colour in ("#0072B2", "#D55E00")
                ax.text(
                    left + share / 2, row, f"{share:.1f}", ha="center", va="center", size=8, color="w" if dark else "k"
                )
            left += share
    ax.set(yticks=range(len(results)), xlim=(0, 100), ylim=(len(results) - 0.5, -0.5), title=title)
    ax.set_yticklabels(list(results), parse_math=False)
    ax.set_xlabel("share of all slots, mean over steps [%]", loc="left")
    handles = [Patch(facecolor=colour, label=label) for colour, label in WASTE.values()]
    ax.legend(
        handles=handles, fontsize=8, ncols=3, frameon=False, loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=4
    )
    return ax
