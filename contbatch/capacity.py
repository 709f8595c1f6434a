"""The most requests a second at which a server keeps a promise."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt

from contbatch.checks import require, require_positive
from contbatch.errors import WorkloadError
from contbatch.metrics import Result

_require = partial(require, error=WorkloadError)


@dataclass(frozen=True)
class Capacity:
    """Between which rates a promise breaks."""

    rate: float
    """The highest rate tried at which it was kept, requests per second."""
    result: Result
    """The run at that rate."""
    beyond: Result
    """The run at the lowest rate tried at which it was broken: which limit was binding there is why."""


def find_capacity(
    run: Callable[[float], Result],
    keeps: Callable[[Result], bool],
    *,
    low: float,
    high: float,
    tolerance: float = 0.05,
) -> Capacity:
    """Find by bisection the highest rate at which a promise is kept, taken to be kept below and broken above it.

    Parameters
    ----------
    run : callable
        Serves a workload at a rate of so many requests per second.
    keeps : callable
        Whether a run kept the promise, such as a 99th percentile below a limit.
    low, high : float
        Rates at which it is kept, and broken.
    tolerance : float
        The rate found is below the true one by at most this share of it.

    Raises
    ------
    WorkloadError
        The promise is broken at `low`, or kept at `high`.
    """
    for name, function in (("run", run), ("keeps", keeps)):
        _require(callable(function), name, function, "callable")
    low, high, tolerance = require_positive(WorkloadError, low=low, high=high, tolerance=tolerance)
    _require(low < high, "low", low, f"below high = {high!r}")
    best, beyond = run(low), run(high)
    _require(keeps(best), "low", low, "a rate at which the promise is kept")
    _require(not keeps(beyond), "high", high, "a rate at which the promise is broken")
    while high > low * (1 + tolerance):
        middle = sqrt(low * high)
        result = run(middle)
        if keeps(result):
            low, best = middle, result
        else:
            high, beyond = middle, result
    return Capacity(low, best, beyond)
