"""How many requests had to wait for how long."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from contbatch.metrics import Result
from contbatch.plots.colours import line_style
from contbatch.plots.columns import tables_of, title_of
from contbatch.plots.legend import name_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

LATENCIES = {
    "queue_s": "time in the queue [s]",
    "ttft_s": "time to first token [s]",
    "tpot_s": "time per output token after the first [s]",
    "max_itl_s": "longest gap between two tokens [s]",
    "e2e_s": "time to the last token [s]",
    "normalized_latency_s": "latency per token [s/token]",
}
"""Label of the axis for each latency of `Result.requests`; definitions in docs/metrics.md."""


def latency_cdf(
    runs: Result | pd.DataFrame | Mapping[str, Result | pd.DataFrame],
    column: str = "ttft_s",
    *,
    limit: float | None = None,
    limit_label: str = "",
    log: bool = False,
    title: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the share of requests whose latency is at most x: a line for each run.

    Parameters
    ----------
    runs : Result or DataFrame, or a mapping from name to these
        Tables are those of `Result.requests`. Requests without the latency (see docs/metrics.md) are left out.
    column : str
        Which latency: a key of `LATENCIES`, or another column of numbers.
    limit, limit_label : float, optional, and str
        A latency that was promised: a dashed line up at this x, and what stands beside it.
    log : bool
        Whether the latency's axis is logarithmic.
    title : str
        What was run; if empty, what the runs know of it.
    ax : Axes, optional
        Drawn into; a new figure if None.

    Raises
    ------
    InvalidRequestError
        A table without the column.
    """
    tables = tables_of(runs, "requests", column)
    ax = plt.subplots(figsize=(8, 4), layout="constrained")[1] if ax is None else ax
    for place, (name, table) in enumerate(tables.items()):
        waited, share = _shares(table[column].dropna().to_numpy(dtype=float))
        ax.plot(waited, share, drawstyle="steps-post", label=name, **line_style(place))
    ax.set(xlabel=LATENCIES.get(column, column), ylabel="requests [%]", title=title_of(title, tables.values()))
    ax.set(ylim=(0, 101), yticks=[0, 25, 50, 75, 90, 99])
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
    else:
        ax.set_xlim(left=0)
    if limit is not None:
        ax.axvline(limit, color="#666666", linestyle="--", linewidth=1)
        ax.text(limit, 2, f" {limit_label}", size=8, color="#444444", parse_math=False)
    if isinstance(runs, Mapping):
        name_lines(ax)
    ax.grid(alpha=0.3)
    return ax


def _shares(values: Floats) -> tuple[Floats, Floats]:
    """Return values in order, and how many per cent are at most as large, from 0 at the first on."""
    ordered = np.sort(values)
    share = 100 * np.arange(1, len(ordered) + 1) / max(1, len(ordered))
    return np.r_[ordered[:1], ordered], np.r_[0 * ordered[:1], share]
