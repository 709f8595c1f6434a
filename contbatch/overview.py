"""Runs side by side, in a picture that takes no longer than they do."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from contbatch.metrics import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 21
"""Of each line: a percentile every 5 %, as many moments of the run."""


def overview(results: Mapping[str, Result]) -> "Figure":
    """Draw latencies, the queue and the pages of several runs, a line for each, and return the figure.

    From left to right: the share of the requests that were answered within so many seconds of asking; the requests that
    wait, and the share of the pages that are held, each a mean over a twentieth of the run.
    """
    from matplotlib.figure import Figure

    from contbatch.plots import curves

    figure = Figure(figsize=(9, 2.8))  # unknown to pyplot, so nobody has to close it
    axes = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.065, right=0.99, bottom=0.18, top=0.97, wspace=0.33)
    waits = pd.concat([_latencies(result).assign(run=name) for name, result in results.items()])
    times = pd.concat([_course(result).assign(run=name) for name, result in results.items()])
    curves(
        waits,
        "wait",
        "share",
        by="run",
        xlabel="from asking to the whole answer [s]",
        ylabel="requests [%]",
        ax=axes[0],
    )
    curves(times, "second", "waiting", by="run", xlabel="time [s]", ylabel="requests waiting", ax=axes[1])
    curves(times, "second", "held", by="run", xlabel="time [s]", ylabel="pages held [%]", ax=axes[2])
    axes[1].set_ylim(0, max(1, 1.05 * times.waiting.max()))
    axes[2].set_ylim(0, 105)
    for ax in axes:
        ax.locator_params(nbins=5)
    for ax in axes[1:]:
        ax.get_legend().remove()
    return figure


def _latencies(result: Result) -> pd.DataFrame:
    shares = np.linspace(0, 100, POINTS)
    waits = result.finished.e2e_s.to_numpy()
    return pd.DataFrame({"wait": np.percentile(waits, shares) if len(waits) else np.nan, "share": shares})


def _course(result: Result) -> pd.DataFrame:
    """Return means over equal stretches of time; a step counts for as long as it took, an empty house not at all."""
    steps, ends = result.steps, np.linspace(0, result.end_s, POINTS + 1)[1:]
    took = (steps.elapsed_s + steps.host_s).to_numpy()
    bins = np.searchsorted(ends, steps.start_s.to_numpy(), side="right").clip(max=POINTS - 1)
    total = np.bincount(bins, took, POINTS).clip(min=1e-12)
    held = 100 * steps.live_pages / result.num_pages
    means = {
        name: np.bincount(bins, took * rows, POINTS) / total
        for name, rows in (("waiting", steps.waiting), ("held", held))
    }
    return pd.DataFrame({"second": ends, **means})
