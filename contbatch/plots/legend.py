"""Legends that cover nothing, and names that are no formulas."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def legend_below(ax: "Axes", handles: list[Any]) -> None:
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


def name_lines(ax: "Axes") -> None:
    """Put a legend of the lines where there is room; a dollar in a name begins no formula."""
    for text in ax.legend(fontsize=8, frameon=False).get_texts():
        text.set_parse_math(False)
