"""Distributions of prompt and output lengths, in tokens. Same key, same lengths, on every platform."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from contbatch.checks import is_int, is_real, python_number, require, require_positive, take_python_numbers, tuple_of
from contbatch.errors import WorkloadError
from contbatch.portable import exp, exponentials, log, normals, uniforms

Tokens = NDArray[np.int64]
MAX_LENGTH = 10_000_000
"""No request is longer, so that a slip of the pen can't fill the memory."""
_require = partial(require, error=WorkloadError)


class Lengths(ABC):
    """A distribution of lengths ≥ 1."""

    @abstractmethod
    def draw(self, n: int, *key: int | str) -> Tokens:
        """Draw n lengths; the first k of them are the same for every n ≥ k."""


def _require_length(name: str, value: object, low: int = 1) -> None:
    _require(is_int(value, low, MAX_LENGTH), name, value, f"an integer in [{low}, {MAX_LENGTH}]")


def _integers(values: NDArray[np.float64]) -> Tokens:
    """Cut off the fractions."""
    result: Tokens = values.astype(np.int64)
    return result


def _whole(values: NDArray[np.float64], low: int, high: int) -> Tokens:
    """Round, halves up, and set what lies beyond the bounds to them."""
    return _integers(np.clip(values, low, high) + 0.5)


@dataclass(frozen=True, slots=True)
class Fixed(Lengths):
    """Always the same."""

    tokens: int

    def __post_init__(self) -> None:
        take_python_numbers(self)
        _require_length("tokens", self.tokens)

    def draw(self, n: int, *key: int | str) -> Tokens:  # noqa: ARG002
        """Repeat the length."""
        return np.full(n, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Uniform(Lengths):
    """Each integer in [low, high] alike: Orca's trace has U(32, 512) in, U(1, 128) out."""

    low: int
    high: int

    def __post_init__(self) -> None:
        take_python_numbers(self)
        _require_length("low", self.low)
        _require_length("high", self.high, self.low)

    def draw(self, n: int, *key: int | str) -> Tokens:
        """Draw n integers."""
        return self.low + _integers(uniforms(n, *key) * (self.high - self.low + 1))


@dataclass(frozen=True, slots=True)
class LogNormal(Lengths):
    """The logarithm is normal around that of the median; set to the bounds beyond them."""

    median: float
    sigma: float
    high: int
    low: int = 1

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_positive(WorkloadError, median=self.median, sigma=self.sigma)
        _require_length("low", self.low)
        _require_length("high", self.high, self.low)

    def draw(self, n: int, *key: int | str) -> Tokens:
        """Draw n lengths."""
        return _whole(self.median * exp(self.sigma * normals(n, *key)), self.low, self.high)


@dataclass(frozen=True, slots=True)
class Zipf(Lengths):
    """Length low + i has a probability in proportion to (i + 1)^-exponent, up to high."""

    exponent: float
    high: int
    low: int = 1

    def __post_init__(self) -> None:
        take_python_numbers(self)
        _require(is_real(self.exponent) and self.exponent >= 0, "exponent", self.exponent, "a finite number ≥ 0")
        _require_length("low", self.low)
        _require_length("high", self.high, self.low)

    def draw(self, n: int, *key: int | str) -> Tokens:
        """Draw n lengths."""
        return self.low + zipf_ranks(n, self.high - self.low + 1, self.exponent, *key)


def zipf_ranks(n: int, count: int, exponent: float, *key: int | str) -> Tokens:
    """Draw n of the ranks 0 .. count - 1, rank i in proportion to (i + 1)^-exponent."""
    cumulative = np.cumsum(exp(-exponent * log(np.arange(1.0, count + 1))))
    drawn = np.searchsorted(cumulative, uniforms(n, *key) * cumulative[-1], side="right")
    return _integers(np.minimum(drawn, count - 1))


@dataclass(frozen=True, slots=True)
class Geometric(Lengths):
    """Every token is the last with probability 1 / mean, up to high."""

    mean: float
    high: int

    def __post_init__(self) -> None:
        take_python_numbers(self)
        _require(is_real(self.mean) and self.mean > 1, "mean", self.mean, "a finite number > 1")
        _require_length("high", self.high)

    def draw(self, n: int, *key: int | str) -> Tokens:
        """Draw n lengths."""
        rate = -float(log(np.array([1 - 1 / self.mean]))[0])
        _require(rate > 0, "mean", self.mean, "small enough to tell 1 - 1 / mean from 1")
        return _integers(np.minimum(1 + exponentials(n, *key) / rate, self.high))


@dataclass(frozen=True, slots=True)
class CappedExponential(Lengths):
    """Exponential, rounded, at least 1 and at most high: Anyscale's outputs (mean 128, capped at 32 to 1536)."""

    mean: float
    high: int

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_positive(WorkloadError, mean=self.mean)
        _require_length("high", self.high)

    def draw(self, n: int, *key: int | str) -> Tokens:
        """Draw n lengths."""
        return _whole(self.mean * exponentials(n, *key), 1, self.high)


@dataclass(frozen=True, slots=True)
class Quantiles(Lengths):
    """What is known of a real distribution: its quantiles, with straight lines between them.

    Parameters
    ----------
    levels : tuple of float
        Rising from 0 to 1.
    tokens : tuple of int
        The length at each level, never falling.
    """

    levels: tuple[float, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("levels", "tokens"):
            numbers = tuple_of(getattr(self, name), name, "a list of numbers", WorkloadError)
            object.__setattr__(self, name, tuple(map(python_number, numbers)))
        levels, tokens = self.levels, self.tokens
        rising = len(levels) >= 2 and all(map(is_real, levels)) and list(levels) == sorted(set(levels))
        _require(rising and (levels[0], levels[-1]) == (0, 1), "levels", levels, "rising from 0 to 1")
        _require(len(tokens) == len(levels), "tokens", tokens, f"{len(levels)} lengths, one for each level")
        for value in tokens:
            _require_length("a length of tokens", value)
        _require(list(tokens) == sorted(tokens), "tokens", tokens, "never falling")

    def draw(self, n: int, *key: int | str) -> Tokens:
        """Draw n lengths."""
        u = uniforms(n, *key)
        levels, tokens = np.array(self.levels, np.float64), np.array(self.tokens, np.float64)
        i = np.minimum(np.searchsorted(levels, u, side="right") - 1, len(levels) - 2)
        share = (u - levels[i]) / (levels[i + 1] - levels[i])
        return _integers(tokens[i] + share * (tokens[i + 1] - tokens[i]) + 0.5)


def as_lengths(value: object, name: str) -> Lengths:
    """Take a distribution, or a number of tokens for `Fixed`."""
    if is_int(number := python_number(value)):
        return Fixed(number)
    _require(isinstance(value, Lengths), name, value, "a distribution of contbatch.lengths or a number of tokens")
    return value  # type: ignore[return-value]
