"""Tables to pictures: each function takes data and returns matplotlib Axes, printing nothing."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from contbatch.checks import require, require_counts
from contbatch.errors import InvalidRequestError, MissingDependencyError
from contbatch.metrics import Result

try:
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle
except ImportError as error:
    raise MissingDependencyError("plots need matplotlib: pip install 'contbatch[notebooks]'") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by colour-blind readers; held seats are hatched too, so that print shows them.
STYLES: dict[str, dict[str, Any]] = {
    "prefill": {"facecolor": "#E69F00", "edgecolor": "white"},
    "decode": {"facecolor": "#0072B2", "edgecolor": "white"},
    "held": {"facecolor": "white", "edgecolor": "#D55E00", "hatch": "////"},
}
HOLDERS = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#CC79A7"]
"""Colours of the holders of pages, repeated if there are more; each page also names its holder."""
PAGES: dict[str, dict[str, Any]] = {
    "shared": {"facecolor": "#666666", "edgecolor": "white", "hatch": "xx"},
    "cached": {"facecolor": "white", "edgecolor": "#999999", "hatch": ".."},
    "free": {"facecolor": "#EEEEEE", "edgecolor": "white"},
}
WASTE: dict[str, tuple[str, str]] = {
    "stored": ("#0072B2", "tokens"),
    "reserved": ("#56B4E9", "reserved, used later"),
    "internal": ("#D55E00", "internal fragmentation: never used"),
    "external": ("#E69F00", "external fragmentation: free, in pieces too short"),
    "cached": ("#BBBBBB", "cached prefixes"),
    "free": ("#EEEEEE", "free"),
}
"""Colour and label of each share of `Result.waste`."""
MARK: dict[str, Any] = {
    "marker": "X",
    "color": "#D55E00",
    "markeredgecolor": "white",
    "linestyle": "none",
    "markersize": 9,
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
    stops = segments[segments.preempted.astype(bool)]
    ax.plot(stops[end], stops.seat, zorder=3, **MARK)
    ax.set(ylabel="seat", title=title, yticks=range(seats))
    ax.set_xlabel("step" if by == "step" else "time [s]", loc="left")
    ax.margins(x=0)
    ax.set_ylim(seats - 0.5, -0.5)
    ax.set_facecolor("#EEEEEE")  # an empty seat
    if legend:
        handles: list[Any] = [Patch(**STYLES[kind], label=LABELS[kind]) for kind in STYLES]
        handles.append(Patch(facecolor="#EEEEEE", label="empty"))
        _legend_below(ax, handles + [Line2D([], [], label="preempted", **MARK)] * bool(len(stops)))
    return ax


def _legend_below(ax: "Axes", handles: list[Any]) -> None:
    """Put the legend in one line under the axes, beside the label at their left: it covers nothing."""
    ax.legend(
        handles=handles,
        fontsize=8,
        ncols=len(handles),
        frameon=False,
        loc="upper right",
        bbox_to_anchor=(1, 0),
        borderaxespad=2.2,
        handlelength=1.4,
        columnspacing=1.2,
    )


def page_map(
    tables: Mapping[int | str, Sequence[int]],
    num_pages: int,
    *,
    cached: Collection[int] = (),
    stored: Mapping[int | str, int] | None = None,
    page_size: int = 1,
    columns: int = 32,
    title: str = "",
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw every page of a pool in order of its id: whose it is, whether it is shared, cached or free.

    Parameters
    ----------
    tables : mapping from request id to page ids
        Page tables, as of `State.tables` or `Request.pages`.
    num_pages : int
    cached : collection of int
        Pages that nobody holds, but whose content is kept.
    stored : mapping from request id to int, optional
        Tokens that each request has in its pages: what they do not fill is pale.
    page_size : int
        Tokens in a page.
    columns : int
        Pages in a line.
    title : str
    legend : bool
        Explain the colours.
    ax : Axes, optional
        Drawn into; a new figure if None.

    Raises
    ------
    InvalidRequestError
        A page that is not in the pool.
    """
    require_counts(num_pages=num_pages, page_size=page_size, columns=columns)
    lines, width = -(-num_pages // columns), min(columns, num_pages)
    holders = _holders(tables, num_pages, stored, page_size)
    ax = plt.subplots(figsize=(10, 0.9 + 0.35 * lines), layout="constrained")[1] if ax is None else ax
    colours = {name: HOLDERS[place % len(HOLDERS)] for place, name in enumerate(tables)}
    for page, here in enumerate(holders):
        left, top = page % columns, page // columns
        if len(here) == 1:
            [(name, filled)] = here.items()
            ax.add_patch(Rectangle((left, top), 1, 0.9, facecolor=colours[name], alpha=0.3, edgecolor="white"))
            ax.add_patch(Rectangle((left, top), filled, 0.9, facecolor=colours[name], edgecolor="white"))
        else:
            kind = "shared" if here else "cached" if page in cached else "free"
            ax.add_patch(Rectangle((left, top), 1, 0.9, **PAGES[kind]))
        text = ax.text(left + 0.5, top + 0.45, "+".join(map(str, here)), ha="center", va="center", size=7, clip_on=True)
        text.set_parse_math(False)
        if len(here) > 1:  # legible on the hatching
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})
    ax.set(xlim=(0, width), ylim=(lines, -0.1), title=title)
    ax.set_xlabel("page" if lines == 1 else f"page, {columns} in a line", loc="left")
    shown = range(0, width, max(1, width // 16))
    ax.set_xticks([page + 0.5 for page in shown], [str(page) for page in shown])
    ax.set_yticks(
        [line + 0.45 for line in range(lines)], [f"+{line * columns}" if line else "" for line in range(lines)]
    )
    ax.tick_params(length=0)
    if legend:
        handles: list[Any] = [Patch(facecolor=HOLDERS[1], label="held, with tokens")]
        handles.append(Patch(facecolor=HOLDERS[1], alpha=0.3, label="held, empty"))
        _legend_below(ax, handles + [Patch(**style, label=kind) for kind, style in PAGES.items()])
    return ax


def _holders(
    tables: Mapping[int | str, Sequence[int]], num_pages: int, stored: Mapping[int | str, int] | None, page_size: int
) -> list[dict[int | str, float]]:
    """Return, for each page, who holds it and the share of it that has tokens."""
    holders: list[dict[int | str, float]] = [{} for _ in range(num_pages)]
    for name, table in tables.items():
        tokens = page_size * len(table) if stored is None else stored[name]
        for place, page in enumerate(table):
            require(0 <= page < num_pages, f"a page of request {name!r}", page, f"in [0, {num_pages})")
            holders[page][name] = min(1.0, max(0.0, tokens / page_size - place))
    return holders


def waste(results: Mapping[str, Result], *, title: str = "", ax: "Axes | None" = None) -> "Axes":
    """Draw where the memory of each run went, on average over its steps: a stacked bar a run, as vLLM's figure 2.

    Parameters
    ----------
    results : mapping from name to Result
    title : str
    ax : Axes, optional
        Drawn into; a new figure if None.
    """
    ax = plt.subplots(figsize=(10, 1.6 + 0.45 * len(results)), layout="constrained")[1] if ax is None else ax
    for row, result in enumerate(results.values()):
        left = 0.0
        for kind, share in (100 * result.waste().mean()).items():
            colour = WASTE[str(kind)][0]
            ax.barh(row, share, left=left, height=0.7, facecolor=colour, edgecolor="white")
            if share > 3:
                dark = colour in ("#0072B2", "#D55E00")
                ax.text(
                    left + share / 2, row, f"{share:.1f}", ha="center", va="center", size=8, color="w" if dark else "k"
                )
            left += share
    ax.set(yticks=range(len(results)), xlim=(0, 100), ylim=(len(results) - 0.5, -0.5), title=title)
    ax.set_yticklabels(list(results), parse_math=False)
    ax.set_xlabel("share of all slots, mean over steps [%]", loc="left")
    handles = [Patch(facecolor=colour, label=label) for colour, label in WASTE.values()]
    ax.legend(
        handles=handles, fontsize=8, ncols=3, frameon=False, loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=4
    )
    return ax
