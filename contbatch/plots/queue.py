"""Who sits and who waits, over time."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import MaxNLocator

from contbatch.metrics import Result
from contbatch.plots.colours import COLOURS
from contbatch.plots.columns import table_of, title_of
from contbatch.plots.legend import name_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def queue(run: Result | pd.DataFrame, *, title: str = "", ax: "Axes | None" = None) -> "Axes":
    """Draw how many requests wait for a seat, how many have one, and how many of those are finished, step by step.

    Parameters
    ----------
    run : Result or DataFrame
        A table is that of `Result.steps`.
    title : str
        What was run; if empty, what the run knows of it.
    ax : Axes, optional
        Drawn into; a new figure if None.

    Raises
    ------
    InvalidRequestError
        A table without one of the columns.
    DetailError
        A Result that did not keep a row for each step.
    """
    steps = table_of(run, "steps", "start_s", "waiting", "seats", "held_seats")
    ax = plt.subplots(figsize=(10, 3), layout="constrained")[1] if ax is None else ax
    orange, blue = COLOURS[1], COLOURS[0]
    ax.fill_between(steps.start_s, steps.waiting, step="post", color=orange, alpha=0.25, linewidth=0)
    ax.plot(steps.start_s, steps.waiting, drawstyle="steps-post", color=orange, linewidth=1, label="waiting for a seat")
    ax.plot(steps.start_s, steps.seats, drawstyle="steps-post", color=blue, linewidth=1.5, label="seats taken")
    if steps.held_seats.any():
        held = "of them by finished requests"
        ax.plot(steps.start_s, steps.held_seats, drawstyle="steps-post", color="#444444", linestyle=":", label=held)
    ax.set(xlabel="time [s]", ylabel="requests", title=title_of(title, [steps]))
    ax.set_ylim(bottom=0)
    ax.margins(x=0)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    name_lines(ax)
    ax.grid(alpha=0.3)
    return ax
