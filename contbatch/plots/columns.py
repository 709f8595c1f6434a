"""The columns that a picture of a table needs."""

import pandas as pd

from contbatch.checks import require


def require_columns(table: pd.DataFrame, *names: str) -> None:
    """Raise `InvalidRequestError` for the first of `names` that is no column of the table."""
    for name in names:
        require(name in table.columns, "a column of the table", name, f"one of {', '.join(map(str, table.columns))}")
