"""One figure against another, a line for each of several servers."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter

from contbatch.checks import is_one_of, require
from contbatch.plots.colours import COLOURS, MARKERS
from contbatch.plots.columns import require_columns, title_of
from contbatch.plots.legend import name_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def curves(
    table: pd.DataFrame,
    x: str,
    y: str,
    *,
    by: str,
    band: tuple[str, str] | None = None,
    xlabel: str = "",
    ylabel: str = "",
    limit: float | None = None,
    limit_label: str = "",
    log: str = "",
    title: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw a line for each value of column `by`, through its rows as they come.

    For curves of latency against throughput, and the like.

    Parameters
    ----------
    table : DataFrame
        A row a point, such as `Result.summary()` of runs at several rates.
    x, y, by : str
        Columns: of either axis, and of the names of the lines.
    band : (str, str), optional
        Columns of a lower and an upper bound of y, such as those of `confidence`: shaded.
    xlabel, ylabel : str
        Of the axes, with units; the columns' names if empty.
    limit, limit_label : float, optional, and str
        A latency that was promised: a dashed line across at this y, and what stands beside it.
    log : str
        The axes that are logarithmic: "", "x", "y" or "xy".
    title : str
        What was run; if empty, what the table knows of it.
    ax : Axes, optional
        Drawn into; a new figure if None.

    Raises
    ------
    InvalidRequestError
        A column that the table does not have.
    """
    require_columns(table, x, y, by, *(band or ()))
    require(is_one_of(log, ("", "x", "y", "xy")), "log", log, "'', 'x', 'y' or 'xy'")
    ax = plt.subplots(figsize=(10, 4), layout="constrained")[1] if ax is None else ax
    for place, (server, rows) in enumerate(table.groupby(by, sort=False)):
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        if band is not None:
            ax.fill_between(rows[x], rows[band[0]], rows[band[1]], color=colour, alpha=0.15, linewidth=0)
        ax.plot(rows[x], rows[y], label=str(server), color=colour, marker=marker, markersize=5)
    _scale(ax, log)
    ax.set(xlabel=xlabel or x, ylabel=ylabel or y, title=title_of(title, [table]))
    if limit is not None:
        _mark(ax, limit, limit_label)
    name_lines(ax)
    ax.grid(alpha=0.3)
    return ax


def _scale(ax: "Axes", log: str) -> None:
    """Make the axes that `log` names logarithmic, with plain numbers at 1, 2 and 5."""
    ax.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
    for axis in [ax.xaxis] * ("x" in log) + [ax.yaxis] * ("y" in log):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _mark(ax: "Axes", limit: float, label: str) -> None:
    ax.axhline(limit, color="#666666", linestyle="--", linewidth=1)
    beside = ax.get_yaxis_transform()
    ax.text(0.005, limit, label, transform=beside, ha="left", va="bottom", size=8, color="#444444")
