"""Whose a page is."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from contbatch.checks import require, require_counts
from contbatch.plots.legend import legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOLDERS = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#CC79A7"]
"""Colours of the holders of pages, repeated if there are more; each page also names its holder."""
PAGES: dict[str, dict[str, Any]] = {
    "shared": {"facecolor": "#666666", "edgecolor": "white", "hatch": "xx"},
    "cached": {"facecolor": "white", "edgecolor": "#999999", "hatch": ".."},
    "free": {"facecolor": "#EEEEEE", "edgecolor": "white"},
}


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
    page_size, columns : int
        Tokens in a page, and pages in a line.
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
        _draw(ax, page % columns, page // columns, here, colours, empty="cached" if page in cached else "free")
    ax.set(xlim=(0, width), ylim=(lines, -0.1), title=title)
    _number(ax, lines, width, columns)
    if legend:
        handles: list[Any] = [Patch(facecolor=HOLDERS[1], label="held, with tokens")]
        handles.append(Patch(facecolor=HOLDERS[1], alpha=0.3, label="held, empty"))
        legend_below(ax, handles + [Patch(**style, label=kind) for kind, style in PAGES.items()])
    return ax


def _number(ax: "Axes", lines: int, width: int, columns: int) -> None:
    """Say along the axes which pages they are."""
    ax.set_xlabel("page" if lines == 1 else f"page, {columns} in a line", loc="left")
    shown = range(0, width, max(1, width // 16))
    ax.set_xticks([page + 0.5 for page in shown], [str(page) for page in shown])
    ax.set_yticks(
        [line + 0.45 for line in range(lines)], [f"+{line * columns}" if line else "" for line in range(lines)]
    )
    ax.tick_params(length=0)


def _draw(
    ax: "Axes", left: int, top: int, here: Mapping[int | str, float], colours: Mapping[int | str, str], empty: str
) -> None:
    """Draw a page with those who hold it and the share of it that has tokens; `empty` is its kind if nobody does."""
    if len(here) == 1:
        [(name, filled)] = here.items()
        ax.add_patch(Rectangle((left, top), 1, 0.9, facecolor=colours[name], alpha=0.3, edgecolor="white"))
        ax.add_patch(Rectangle((left, top), filled, 0.9, facecolor=colours[name], edgecolor="white"))
    else:
        ax.add_patch(Rectangle((left, top), 1, 0.9, **PAGES["shared" if here else empty]))
    text = ax.text(left + 0.5, top + 0.45, "+".join(map(str, here)), ha="center", va="center", size=7, clip_on=True)
    text.set_parse_math(False)
    if len(here) > 1:  # legible on the hatching
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})


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
