"""Who sat where, and when."""

from typing import TYPE_CHECKING, Any, Literal

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from contbatch.errors import InvalidRequestError
from contbatch.metrics import Result
from contbatch.plots.columns import table_of, title_of
from contbatch.plots.legend import legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by colour-blind readers; held seats are hatched too, so that print shows them.
STYLES: dict[str, dict[str, Any]] = {
    "prefill": {"facecolor": "#E69F00", "edgecolor": "white"},
    "decode": {"facecolor": "#0072B2", "edgecolor": "white"},
    "held": {"facecolor": "white", "edgecolor": "#D55E00", "hatch": "////"},
}
MARK: dict[str, Any] = {
    "marker": "X",
    "color": "#D55E00",
    "markeredgecolor": "white",
    "linestyle": "none",
    "markersize": 9,
}
NAME: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "color": "white",
    "size": 7,
    "clip_on": True,
    "parse_math": False,
}
LABELS = {"prefill": "prompt", "decode": "answer, token by token", "held": "finished, seat kept: wasted"}


def gantt(
    result: Result | pd.DataFrame,
    *,
    by: Literal["step", "second"] = "second",
    title: str = "",
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw who sat where: a row per seat, a bar per stretch of work, labelled with its request where there is room.

    Parameters
    ----------
    result : Result or DataFrame
        A table is that of `Result.segments`.
    by : {"step", "second"}
        Unit of the horizontal axis: step numbers, or seconds of the engine's clock.
    title : str
        What was run; if empty, what the run knows of it.
    legend : bool
        Explain the colours.
    ax : Axes, optional
        Drawn into; a new figure if None.

    Raises
    ------
    InvalidRequestError
        A table without one of the columns.
    DetailError
        A Result that did not keep who sat where when.
    """
    if by not in ("step", "second"):
        raise InvalidRequestError(f"by must be 'step' or 'second', got {by!r}")
    start, end = ("start_step", "end_step") if by == "step" else ("start_s", "end_s")
    segments = table_of(result, "segments", "request_id", "seat", "kind", "preempted", start, end)
    seats = int(segments.seat.max()) + 1 if len(segments) else 1
    ax = plt.subplots(figsize=(10, 1.2 + 0.3 * seats), layout="constrained")[1] if ax is None else ax
    segments = segments.assign(left=segments[start], width=segments[end] - segments[start])
    for kind, rows in segments.groupby("kind"):
        ax.barh(rows.seat, rows.width, left=rows.left, height=0.8, linewidth=0.5, **STYLES[str(kind)])
    wide = segments[(segments.kind == "decode") & (segments.width > 0.025 * segments[end].max())]
    for name, seat, middle in zip(wide.request_id, wide.seat, wide.left + wide.width / 2, strict=True):
        ax.text(middle, seat, str(name), **NAME)
    stops = segments[segments.preempted.astype(bool)]
    ax.plot(stops[end], stops.seat, zorder=3, **MARK)
    ax.set(ylabel="seat", title=title_of(title, [segments]), yticks=range(seats))
    ax.set_xlabel("step" if by == "step" else "time [s]", loc="left")
    ax.margins(x=0)
    ax.set_ylim(seats - 0.5, -0.5)
    ax.set_facecolor("#EEEEEE")  # an empty seat
    if legend:
        _explain(ax, bool(len(stops)))
    return ax


def _explain(ax: "Axes", preempted: bool) -> None:
    handles: list[Any] = [Patch(**STYLES[kind], label=LABELS[kind]) for kind in STYLES]
    handles.append(Patch(facecolor="#EEEEEE", label="empty"))
    legend_below(ax, handles + [Line2D([], [], label="preempted", **MARK)] * preempted)
