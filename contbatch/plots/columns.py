"""What a picture is drawn of: a table with the columns that it needs, and what is known of the run that it tells of."""

from collections.abc import Iterable, Mapping
from textwrap import fill
from typing import Any

import pandas as pd

from contbatch.checks import require, require_type
from contbatch.metrics import Result


def require_columns(table: pd.DataFrame, *names: str) -> None:
    """Raise `InvalidRequestError` for the first of `names` that is no column of the table."""
    require_type("what is drawn", table, pd.DataFrame)
    for name in names:
        require(name in table.columns, "a column of the table", name, f"one of {', '.join(map(str, table.columns))}")


def table_of(given: Any, part: str, *columns: str) -> pd.DataFrame:
    """Return the part of a result that is drawn ("waste" too), or the table itself; `InvalidRequestError` as above.

    `DetailError` if the run did not keep that part.
    """
    if isinstance(given, Result):
        if part != "requests":
            given.require_detail(f"a picture of its {part}")
        given = given.waste().set_axis(given.steps.start_s) if part == "waste" else getattr(given, part)
    require(isinstance(given, pd.DataFrame), "what is drawn", given, f"a Result, or its table `{part}`")
    table: pd.DataFrame = given
    require_columns(table, *columns)
    return table


def tables_of(
    given: "Result | pd.DataFrame | Mapping[str, Result | pd.DataFrame]", part: str, *columns: str
) -> dict[str, pd.DataFrame]:
    """Do the same for runs by name; one run alone has the name ""."""
    runs = given if isinstance(given, Mapping) else {"": given}
    return {name: table_of(run, part, *columns) for name, run in runs.items()}


def title_of(title: str, tables: Iterable[pd.DataFrame]) -> str:
    """Return `title`, or if it is empty what was run, where the tables know and agree (`DataFrame.attrs["run"]`)."""
    known = {str(table.attrs.get("run", "")) for table in tables}
    return title or (fill(known.pop(), 70) if len(known) == 1 else "")
