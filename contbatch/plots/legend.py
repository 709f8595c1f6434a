"""Legends that cover nothing."""

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
