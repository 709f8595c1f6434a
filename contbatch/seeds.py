"""How much a figure hangs on chance: confidence intervals over runs that differ in their seed only."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from contbatch.checks import is_key, is_real, python_number, require, require_type, tuple_of
from contbatch.errors import MissingDependencyError

if TYPE_CHECKING:
    from pandas.api.typing import SeriesGroupBy


def confidence(
    table: pd.DataFrame, by: str | Sequence[str], figures: Sequence[str] = (), *, level: float = 0.95
) -> pd.DataFrame:
    """Return mean and confidence interval of figures over the runs of each group, such as those of a `sweep`.

    Runs of different seeds are independent, so the interval is Student's: mean ± t · s / √n, with the quantile t of
    n - 1 degrees of freedom and the standard deviation s. Undefined values are left out; the bounds are NaN where
    fewer than two are defined. A figure that is a percentile is treated like any other: the interval is that of its
    mean over runs.

    Parameters
    ----------
    table : DataFrame
        A row a run.
    by : str or sequence of str
        Columns in which the runs of a group are equal: all that was varied but the seed.
    figures : sequence of str
        Columns of numbers; all others than `by`, `seed` and those without numbers, if empty.
    level : float
        Probability in (0, 1).

    Returns
    -------
    DataFrame
        A row for each group, in order of appearance: the columns `by`, `runs`, and for each figure `figure`,
        `figure_low` and `figure_high`.

    Raises
    ------
    InvalidRequestError
        A column that is not there, or a level out of range.
    """
    require_type("table", table, pd.DataFrame)
    by = [by] if isinstance(by, str) else list(tuple_of(by, "by", "names of columns"))
    figures = tuple_of(figures, "figures", "names of columns")
    for name in [*by, *figures]:
        require(
            is_key(name) and name in table.columns,
            "a column of the table",
            name,
            f"one of {', '.join(map(str, table.columns))}",
        )
    require(bool(by), "by", by, "one column or more")
    level = python_number(level)
    require(is_real(level) and 0 < level < 1, "level", level, "a probability in (0, 1)")
    numbers = table.select_dtypes("number").columns.difference([*by, "seed"], sort=False)
    groups = table.groupby(by, sort=False, dropna=False)
    found = {"runs": groups.size()}
    for name in figures or numbers:
        mean, half = groups[name].mean(), _half_width(groups[name], level)
        found |= {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
    return pd.DataFrame(found).reset_index()


def _half_width(values: "SeriesGroupBy[Any, Any]", level: float) -> "pd.Series[float]":
    try:
        from scipy.special import stdtrit
    except ImportError as error:
        raise MissingDependencyError("intervals need scipy: pip install 'contbatch[simulation]'") from error
    count = values.count()
    t = stdtrit((count - 1).where(count > 1), (1 + level) / 2)
    half: pd.Series[float] = t * values.std(ddof=1) / count**0.5
    return half
