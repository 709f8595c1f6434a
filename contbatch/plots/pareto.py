"""Which settings nothing beats."""

from typing import TYPE_CHECKING, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from contbatch.checks import is_one_of, require
from contbatch.plots.colours import COLOURS
from contbatch.plots.columns import require_columns, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Best = Literal["high", "low"]


def pareto_front(table: pd.DataFrame, x: str, y: str, *, x_best: Best = "high", y_best: Best = "low") -> pd.DataFrame:
    """Return the rows that no other row beats in one figure and equals or beats in the other, in order of `x`.

    Rows without one of the figures are no candidates; of rows that are equal in both, all stay.
    """
    require_columns(table, x, y)
    for name, best in (("x_best", x_best), ("y_best", y_best)):
        require(is_one_of(best, ("high", "low")), name, best, "'high' or 'low'")
    costs = [table[name].astype(float) * (-1 if best == "high" else 1) for name, best in ((x, x_best), (y, y_best))]
    points = pd.DataFrame({"x": costs[0].to_numpy(), "y": costs[1].to_numpy()}).dropna().sort_values(["x", "y"])
    best_before = points.groupby("x").y.min().cummin().shift(fill_value=np.inf)  # of strictly better x
    lowest = points.groupby("x").y.transform("min")
    kept = points[(points.y == lowest) & (points.y < points.x.map(best_before))].index.to_numpy()
    return table.iloc[kept].sort_values(x, kind="stable")


def pareto(
    table: pd.DataFrame,
    x: str,
    y: str,
    *,
    by: str,
    x_best: Best = "high",
    y_best: Best = "low",
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw all settings of a sweep as points, and a line along those that nothing beats, each with its name.

    Parameters
    ----------
    table : DataFrame
        A row a setting, such as what `sweep` returns; rows without one of the figures are left out.
    x, y : str
        Columns, such as "output_tokens_per_s" and "ttft_s_p99".
    by : str
        Column of the names of the settings.
    x_best, y_best : {"high", "low"}
        Which end of either axis is better.
    xlabel, ylabel : str
        Of the axes, with units; the columns' names if empty.
    title : str
        What was run; if empty, what the table knows of it.
    ax : Axes, optional
        Drawn into; a new figure if None.

    Raises
    ------
    InvalidRequestError
        A column that the table does not have.
    """
    require_columns(table, x, y, by)
    front = pareto_front(table, x, y, x_best=x_best, y_best=y_best)
    ax = plt.subplots(figsize=(8, 4.5), layout="constrained")[1] if ax is None else ax
    ax.plot(table[x], table[y], "o", color="#BBBBBB", markeredgecolor="#888888", label="beaten by another")
    ax.plot(front[x], front[y], label="nothing beats these", color=COLOURS[0], marker="D", linewidth=1.2)
    _write_names(ax, front, x, y, by)
    better = f"{'right' if x_best == 'high' else 'left'} and {'up' if y_best == 'high' else 'down'}"
    ax.set(xlabel=xlabel or x, ylabel=ylabel or y, title=title_of(title, [table]))
    ax.legend(fontsize=8, frameon=False, title=f"better: {better}", title_fontsize=8)
    ax.grid(alpha=0.3)
    return ax


def _write_names(ax: "Axes", front: pd.DataFrame, x: str, y: str, by: str) -> None:
    """Write the names of points above them; of points that lie on one another the first, and how many more."""
    ax.margins(0.08, 0.12)
    pixels = ax.transData.transform(front[[x, y]].to_numpy(dtype=float))
    groups: list[list[int]] = []
    for point, place in enumerate(pixels):
        near = [group for group in groups if np.abs(pixels[group[0]] - place).max() < 12]
        near[0].append(point) if near else groups.append([point])
    for first, *others in groups:
        name = f"{front[by].iloc[first]}" + (f" and {len(others)} more" if others else "")
        at = front[x].iloc[first], front[y].iloc[first]
        side = "right" if pixels[first, 0] > ax.bbox.x0 + ax.bbox.width / 2 else "left"
        text = ax.annotate(name, at, xytext=(0, 7), textcoords="offset points", fontsize=8, ha=side)
        text.set_parse_math(False)
