"""Where the memory went."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.patches import Patch

from contbatch.metrics import Result
from contbatch.plots.columns import tables_of, title_of

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


def waste(results: Mapping[str, Result | pd.DataFrame], *, title: str = "", ax: "Axes | None" = None) -> "Axes":
    """Draw where the memory of each run went, on average over its steps: a stacked bar a run, as vLLM's figure 2.

    Parameters
    ----------
    results : mapping from name to Result or DataFrame
        Tables are those of `Result.waste()`.
    title : str
        What was run; if empty, what the runs know of it.
    ax : Axes, optional
        Drawn into; a new figure if None.

    Raises
    ------
    InvalidRequestError
        A table without one of the columns.
    """
    tables = tables_of(results, "waste", *WASTE)
    ax = plt.subplots(figsize=(10, 1.6 + 0.45 * len(results)), layout="constrained")[1] if ax is None else ax
    for row, table in enumerate(tables.values()):
        left = 0.0
        for kind, share in (100 * table[list(WASTE)].mean()).items():
            colour = WASTE[str(kind)][0]
            ax.barh(row, share, left=left, height=0.7, facecolor=colour, edgecolor="white")
            if share > 3:
                dark = colour in ("#0072B2", "#D55E00")
                ax.text(
                    left + share / 2, row, f"{share:.1f}", ha="center", va="center", size=8, color="w" if dark else "k"
                )
            left += share
    ax.set(
        yticks=range(len(results)),
        xlim=(0, 100),
        ylim=(len(results) - 0.5, -0.5),
        title=title_of(title, tables.values()),
    )
    ax.set_yticklabels(list(results), parse_math=False)
    ax.set_xlabel("share of all slots, mean over steps [%]", loc="left")
    handles = [Patch(facecolor=colour, label=label) for colour, label in WASTE.values()]
    ax.legend(
        handles=handles, fontsize=8, ncols=3, frameon=False, loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=4
    )
    return ax
