"""What a notebook's cell made the last time that it ran."""

import sys
from collections.abc import Callable
from typing import Any

_made: dict[str, tuple[int, list[Callable[[], None]]]] = {}


def closes_on_rerun(close: Callable[[], None]) -> None:
    """Have `close` called as soon as the cell that runs now runs again and makes something else that is to be closed.

    Without it the widgets of a cell that ran ten times stay in memory ten times. Does nothing outside of a notebook,
    and in one whose front end does not say which cell it runs.
    """
    ipython: Any = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython else None
    cell = shell.get_parent().get("metadata", {}).get("cellId") if hasattr(shell, "get_parent") else None
    if cell is None:
        return
    count, closes = _made.get(cell, (shell.execution_count, []))
    if count != shell.execution_count:
        for earlier in closes:
            earlier()
        closes = []
    _made[cell] = shell.execution_count, [*closes, close]
