"""What the memory holds, over time."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.patches import Patch

from contbatch.metrics import Result
from contbatch.plots.columns import table_of, title_of
from contbatch.plots.legend import legend_below
from contbatch.plots.waste import WASTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = {"start_s": "time [s]", "step": "step"}
"""Label of the horizontal axis by the name of the table's index."""


def memory(run: Result | pd.DataFrame, *, title: str = "", ax: "Axes | None" = None) -> "Axes":
    """Draw the state of all K/V slots step by step: tokens at the bottom, what is held or free in vain above.

    Parameters
    ----------
    run : Result or DataFrame
        A table is that of `Result.waste()`, drawn over its index: steps, or seconds after
        `result.waste().set_axis(result.steps.start_s)`, which is what a Result is drawn over.
    title : str
        What was run; if empty, what the run knows of it.
    ax : Axes, optional
        Drawn into; a new figure if None.

    Raises
    ------
    InvalidRequestError
        A table without one of the columns.
    DetailError
        A Result that did not keep who held how much when.
    """
    table = table_of(run, "waste", *WASTE)
    ax = plt.subplots(figsize=(10, 3.4), layout="constrained")[1] if ax is None else ax
    tops = 100 * np.cumsum(table[list(WASTE)].to_numpy(dtype=float), axis=1)
    floor = np.zeros(len(table))
    for (colour, _), top in zip(WASTE.values(), tops.T, strict=True):
        ax.fill_between(table.index, floor, top, step="post", color=colour, linewidth=0)
        floor = top
    ax.plot(table.index, tops[:, 0], drawstyle="steps-post", color="#003355", linewidth=0.8)
    ax.set(ylabel="share of all slots [%]", ylim=(0, 100), title=title_of(title, [table]))
    ax.set_xlabel(AXES.get(str(table.index.name), str(table.index.name or "row")), loc="left")
    ax.margins(x=0)
    seen = [kind for kind in WASTE if (table[kind] > 0).any()]
    legend_below(ax, [Patch(facecolor=WASTE[kind][0], label=WASTE[kind][1]) for kind in seen])
    return ax
