"""What a notebook's cell shows: figures, widgets, and what becomes of them when it runs again."""

import sys
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_made: dict[str, tuple[int, list[Callable[[], None]]]] = {}


def widget_view(model_id: str) -> dict[str, Any]:
    """Return the output by which a front end shows the widget of this id, if it can."""
    return {"application/vnd.jupyter.widget-view+json": {"version_major": 2, "version_minor": 0, "model_id": model_id}}


def png(figure: "Figure") -> bytes:
    """Return a figure as PNG; it is closed."""
    return _bytes(figure, "png")


def svg(figure: "Figure") -> bytes:
    """Return a figure as SVG, its text as text, which is drawn in half the time; it is closed."""
    return _bytes(figure, "svg")


def _bytes(figure: "Figure", kind: str) -> bytes:
    import matplotlib.pyplot as plt

    buffer = BytesIO()
    with plt.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind)
    plt.close(figure)  # else a notebook shows what pyplot made a second time, below the cell
    return buffer.getvalue()


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
