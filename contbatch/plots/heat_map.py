"""A figure over two fields of a sweep."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from contbatch.checks import require
from contbatch.plots.columns import require_columns, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def heat_map(
    table: pd.DataFrame,
    x: str,
    y: str,
    value: str,
    *,
    number: str = ".3g",
    label: str = "",
    title: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw a field of colours with the number in each: columns by `x`, rows by `y`, both in order.

    Parameters
    ----------
    table : DataFrame
        A row a point, such as what `sweep` returns; at most one for each pair of `x` and `y`. Pairs without a row, or
        without a value, stay blank.
    x, y, value : str
        Columns.
    number : str
        Format of the numbers.
    label : str
        Of the colours, with the unit; the column's name if empty.
    title : str
        What was run; if empty, what the table knows of it.
    ax : Axes, optional
        Drawn into; a new figure if None.

    Raises
    ------
    InvalidRequestError
        A column that the table does not have, or two rows for one pair.
    """
    require_columns(table, x, y, value)
    twice = table[table.duplicated([x, y])]
    require(twice.empty, f"rows for one pair of {x} and {y}", twice[[x, y]].head(1).to_dict("records"), "one at most")
    field = table.pivot(index=y, columns=x, values=value).sort_index(ascending=False)
    ax = plt.subplots(figsize=(7, 4), layout="constrained")[1] if ax is None else ax
    values = field.to_numpy(dtype=float)
    image = ax.imshow(values, cmap="cividis", aspect="auto")  # cividis: made for colour-blind readers
    ax.figure.colorbar(image, ax=ax, label=label or value)
    ax.set_xticks(range(field.shape[1]), [f"{name}" for name in field.columns])
    ax.set_yticks(range(field.shape[0]), [f"{name}" for name in field.index])
    ax.set(xlabel=x, ylabel=y, title=title_of(title, [table]))
    _write(ax, values, number)
    return ax


def _write(ax: "Axes", values: np.ndarray, number: str) -> None:
    """Write each number on its colour: dark on the light half, light on the dark one."""
    known = values[np.isfinite(values)]
    middle = (known.min() + known.max()) / 2 if known.size else 0.0
    for (row, column), figure in np.ndenumerate(values):
        if np.isfinite(figure):
            colour = "black" if figure > middle else "white"
            ax.text(column, row, format(figure, number), ha="center", va="center", color=colour, fontsize=9)
