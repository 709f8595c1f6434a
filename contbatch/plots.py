"""Tables to pictures: each function takes a result and returns matplotlib Axes, printing nothing."""

from typing import TYPE_CHECKING, Any, Literal

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from contbatch.errors import InvalidRequestError
from contbatch.metrics import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by colour-blind readers; held seats are hatched too, so that print shows them.
STYLES: dict[str, dict[str, Any]] = {
    "prefill": {"facecolor": "#E69F00", "edgecolor": "white"},
    "decode": {"facecolor": "#0072B2", "edgecolor": "white"},
    "held": {"facecolor": "white", "edgecolor": "#D55E00", "hatch": "////"},
}
LABELS = {"prefill": "prompt", "decode": "answer, token by token", "held": "finished, seat kept: wasted"}


def gantt(
    result: Result,
    *,
    by: Literal["step", "second"] = "second",
    title: str = "",
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw who sat where: a row per seat, a bar per stretch of work, labelled with its request where there is room.

    Parameters
    ----------
    result : Result
    by : {"step", "second"}
        Unit of the horizontal axis: step numbers, or seconds of the engine's clock.
    title : str
        What was run.
    legend : bool
        Explain the colours.
    ax : Axes, optional
        Drawn into; a new figure if None.
    """
    if by not in ("step", "second"):
        raise InvalidRequestError(f"by must be 'step' or 'second', got {by!r}")
    segments = result.segments
    seats = int(segments.seat.max()) + 1 if len(segments) else 1
    ax = plt.subplots(figsize=(10, 1.2 + 0.3 * seats), layout="constrained")[1] if ax is None else ax
    start, end = ("start_step", "end_step") if by == "step" else ("start_s", "end_s")
    segments = segments.assign(left=segments[start], width=segments[end] - segments[start])
    for kind, rows in segments.groupby("kind"):
        ax.barh(rows.seat, rows.width, left=rows.left, height=0.8, linewidth=0.5, **STYLES[str(kind)])
    wide = segments[(segments.kind == "decode") & (segments.width > 0.025 * segments[end].max())]
    style: dict[str, Any] = {
        "ha": "center",
        "va": "center",
        "color": "white",
        "size": 7,
        "clip_on": True,
        "parse_math": False,
    }
    for name, seat, middle in zip(wide.request_id, wide.seat, wide.left + wide.width / 2, strict=True):
        ax.text(middle, seat, str(name), **style)
    ax.set(xlabel="step" if by == "step" else "time [s]", ylabel="seat", title=title, yticks=range(seats))
    ax.margins(x=0)
    ax.set_ylim(seats - 0.5, -0.5)
    ax.set_facecolor("#EEEEEE")  # an empty seat
    if legend:
        handles = [Patch(**STYLES[kind], label=LABELS[kind]) for kind in STYLES]
        ax.legend(handles=[*handles, Patch(facecolor="#EEEEEE", label="empty")], fontsize=8, loc="lower right")
    return ax
