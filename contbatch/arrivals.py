"""When requests arrive, whatever happens to them: open-loop processes. Same key, same times, on every platform."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import numpy as np

from contbatch.checks import (
    is_int,
    is_real,
    python_number,
    require,
    require_positive,
    require_seconds,
    take_python_numbers,
    tuple_of,
)
from contbatch.errors import WorkloadError
from contbatch.portable import Floats, exp, exponentials, gammas, log

_require = partial(require, error=WorkloadError)
MAX_SIZE = 10_000_000
"""Of a burst: as many as a workload may have requests."""


class Arrivals(ABC):
    """An arrival process that begins at 0 seconds."""

    @abstractmethod
    def times(self, n: int, *key: int | str) -> Floats:
        """Draw the first n arrivals, in order, in seconds; the first k of them are the same for every n ≥ k."""


@dataclass(frozen=True, slots=True)
class PoissonArrivals(Arrivals):
    """Independent arrivals, `rate` a second: exponential gaps."""

    rate: float

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_positive(WorkloadError, rate=self.rate)

    def times(self, n: int, *key: int | str) -> Floats:
        """Draw n arrivals."""
        return np.cumsum(exponentials(n, *key) / self.rate)


@dataclass(frozen=True, slots=True)
class GammaArrivals(Arrivals):
    """Gamma gaps whose standard deviation is `cv` times their mean: burstier than Poisson above 1, steadier below."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_positive(WorkloadError, rate=self.rate, cv=self.cv)
        _require(0.05 <= self.cv <= 20, "cv", self.cv, "in [0.05, 20]")

    def times(self, n: int, *key: int | str) -> Floats:
        """Draw n arrivals."""
        square = self.cv * self.cv
        return np.cumsum(gammas(n, 1 / square, *key) * (square / self.rate))


@dataclass(frozen=True, slots=True)
class WeibullArrivals(Arrivals):
    """Weibull gaps scale · E^(1/shape), E exponential: long tails for shapes below 1, which is Poisson.

    `scale_s` is the scale in seconds; the mean gap is scale_s · Γ(1 + 1/shape).
    """

    scale_s: float
    shape: float

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_positive(WorkloadError, scale_s=self.scale_s, shape=self.shape)
        _require(self.shape >= 0.1, "shape", self.shape, "at least 0.1")

    def times(self, n: int, *key: int | str) -> Floats:
        """Draw n arrivals."""
        return np.cumsum(self.scale_s * exp(log(exponentials(n, *key)) / self.shape))


@dataclass(frozen=True, slots=True)
class BurstArrivals(Arrivals):
    """`size` requests at the same time, every `every_s` seconds, the first at 0."""

    size: int
    every_s: float

    def __post_init__(self) -> None:
        take_python_numbers(self)
        _require(is_int(self.size, 1, MAX_SIZE), "size", self.size, f"an integer in [1, {MAX_SIZE}]")
        require_positive(WorkloadError, every_s=self.every_s)

    def times(self, n: int, *key: int | str) -> Floats:  # noqa: ARG002
        """Make n arrivals."""
        return np.floor(np.arange(n, dtype=np.float64) / self.size) * self.every_s


@dataclass(frozen=True, slots=True)
class AllAtOnce(Arrivals):
    """Everybody at `at_s` seconds."""

    at_s: float = 0.0

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_seconds(WorkloadError, at_s=self.at_s)

    def times(self, n: int, *key: int | str) -> Floats:  # noqa: ARG002
        """Make n arrivals."""
        return np.full(n, float(self.at_s))


@dataclass(frozen=True, slots=True)
class DiurnalArrivals(Arrivals):
    """Poisson arrivals whose rate goes round a clock: rates[i] a second during its i-th part of `slot_s` seconds.

    Twenty-four rates and slots of an hour make a day.
    """

    rates: tuple[float, ...]
    slot_s: float = 3600.0

    def __post_init__(self) -> None:
        take_python_numbers(self)
        limit = "finite numbers ≥ 0, one of them > 0"
        rates = tuple_of(self.rates, "rates", limit, WorkloadError)
        object.__setattr__(self, "rates", tuple(map(python_number, rates)))
        rates_ok = all(is_real(rate) and rate >= 0 for rate in self.rates) and any(self.rates)
        _require(rates_ok, "rates", self.rates, limit)
        require_positive(WorkloadError, slot_s=self.slot_s)

    def times(self, n: int, *key: int | str) -> Floats:
        """Draw n arrivals: those of a Poisson process of rate 1, when as many are due."""
        due = np.concatenate([[0.0], np.cumsum(np.array(self.rates, np.float64) * self.slot_s)])
        events = np.cumsum(exponentials(n, *key))
        rounds = np.floor(events / due[-1])
        rest = events - rounds * due[-1]
        slot = np.clip(np.searchsorted(due, rest, side="right") - 1, 0, len(self.rates) - 1)
        rate = np.array(self.rates, np.float64)[slot]
        into = np.divide(rest - due[slot], rate, out=np.zeros(n), where=rate > 0)
        return np.maximum.accumulate((rounds * len(self.rates) + slot) * self.slot_s + np.clip(into, 0, self.slot_s))
