"""Factors and a step that an input of linear layers goes into 8 bits with, chosen by what that costs their output."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from contbatch.checks import require
from contbatch.observed import FOLDS, Floats, Observed

LARGEST = 127
"""Code of the largest value."""
STRENGTHS = 0.0, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0
"""Exponents of SmoothQuant to choose from: 0 moves as little as the weights want, 1 makes all channels alike."""
REACHES = 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5
"""How far codes reach, 1 being the least by which no value observed is cut off."""
SAMPLE = 512
"""Tokens on which a fit is tried, about."""
ROWS = 512
"""Rows of the weights that it is tried with; more take longer and choose alike."""
TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class Fit:
    """How well an input goes into 8 bits."""

    factor: Floats
    """(width,) what each channel is divided by."""
    step: float
    """Distance between two codes."""
    error: float
    """‖output with codes - output‖² / ‖output or sum‖², mean of the tokens: one huge token can't hide the others."""


def fit(seen: Observed, weights: Floats, group: int = 1, head_size: int = 1) -> Fit:
    """Find the factors and the step for an input that is multiplied with `weights`.

    Parameters
    ----------
    seen : Observed
    weights : ndarray of float32, (rows, width)
    group, head_size : int
        Heads that must share their factors, and channels of a head: query heads of a group share a value head.

    Raises
    ------
    InvalidRequestError
        Nothing was observed, or values that aren't finite.
    """
    finite = bool(np.isfinite(seen.largest).all() and len(np.unique(seen.fold)) > 1)
    require(finite, "observed values", seen.sample.shape, "finite, of tokens in two parts at least")
    tried = weights[:: -(-len(weights) // ROWS)]
    largest_weights = np.abs(weights).max(axis=0) + np.float32(1e-6)
    trial = _Trial.of(seen, tried, len(tried) / len(weights))

    def tops(largest: Floats, strength: float, by_weights: bool, reach: float) -> Floats:
        """Make the largest value of each channel that has a code."""
        largest = largest + np.float32(1e-6)
        found = largest**strength
        if by_weights:
            found /= largest_weights ** (1 - strength)
        found *= reach * (largest / found).max()
        by_head = found.reshape(-1, group, head_size)
        shared = np.broadcast_to(by_head.max(axis=1, keepdims=True), by_head.shape)
        return shared.reshape(-1).astype(np.float32)

    largest, others = seen.largest.max(axis=0), seen.largest_of_others()
    errors: dict[tuple[float, bool, float], float] = {}

    def error(choice: tuple[float, bool, float]) -> float:
        if choice not in errors:
            errors[choice] = trial.error(tops(largest, *choice), [tops(one, *choice) for one in others])
        return errors[choice]

    best = STRENGTHS[0], True, 1.0
    for _ in range(2):  # the one, then the other: all pairs would take longer and find little more
        best = min(((strength, by, best[2]) for strength in STRENGTHS for by in (True, False)), key=error)
        best = min(((*best[:2], reach) for reach in REACHES), key=error)
    found = tops(largest, *best)
    size = np.float32(np.exp(np.log(found).mean()))
    return Fit(found / size, float(size) / LARGEST if largest.any() else 1.0, error(best))


@dataclass(frozen=True, slots=True)
class _Trial:
    """What an error is computed from.

    Errors of rounding are taken as independent of one another, so what they come to in an output are sums of squares,
    without a product of matrices.
    """

    parts: list[tuple[Floats, Floats]]
    """Rows of each part of the texts, and what a squared error of each of them counts."""
    squares: Floats
    """Of each column of the weights, their sum."""
    sizes: Floats
    """Magnitudes of the weights."""
    power: Floats
    """Mean square of each channel."""

    @classmethod
    def of(cls, seen: Observed, weights: Floats, share: float) -> Self:
        """Take some rows of the weights, which are such a share of all."""
        sizes = np.square(seen.sample @ weights.T).sum(axis=1) if seen.sizes is None else seen.sizes * np.float32(share)
        # A token without output, as where all weights are 0, has nothing to lose.
        counts = np.divide(1 / len(sizes), sizes, out=np.zeros_like(sizes), where=sizes > TINY)
        parts = [(seen.sample[seen.fold == i], counts[seen.fold == i]) for i in range(FOLDS)]
        return cls(parts, np.square(weights).sum(axis=0), np.abs(weights), counts @ np.square(seen.sample))

    def error(self, tops: Floats, of_others: list[Floats]) -> float:
        """Return `Fit.error` where codes reach to `tops`, and for rows of a part to what its others make of it."""
        squared = np.zeros_like(self.power)
        for (rows, counts), top in zip(self.parts, of_others, strict=True):
            steps = top / np.float32(LARGEST)
            rounded = np.rint(rows / steps)
            rounded = np.clip(rounded, -LARGEST - 1, LARGEST, out=rounded)
            rounded *= steps
            rounded -= rows
            squared += counts @ np.square(rounded, out=rounded)
        of_weights = np.square((self.sizes * tops).max(axis=1)).sum(dtype=np.float64) / (12 * LARGEST**2)
        return float(squared @ self.squares + of_weights * (self.power / np.square(tops)).sum())
