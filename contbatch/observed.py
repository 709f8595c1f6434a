"""What was seen of a value while texts were read: enough to choose its 8 bits by, without keeping all of it."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


FOLDS = 4
"""Parts that the texts are in."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What is chosen by all parts of the texts but one is tried on that one, for each in turn.

    Channels reach further in a text that was not seen than in those that were, and where each has a factor of its own
    a choice that is tried on what it was made from looks ten times as good as it is.
    """

    largest: Floats
    """(FOLDS, width) largest magnitude of each channel, in each part."""
    sample: Floats
    """(num_rows, width) rows."""
    fold: NDArray[np.integer]
    """(num_rows,) the part that each is of."""
    sizes: Floats | None = None
    """(num_rows,) ‖sum‖² that the layer's output becomes a part of; None: what counts is the output itself."""

    @classmethod
    def of(cls, rows: Floats, sizes: Floats | None = None) -> Self:
        """Take these rows, (num_tokens, width), and sizes, (num_tokens,), as of one part after the other, in turn."""
        fold = np.arange(len(rows)) % FOLDS
        return cls(np.stack([_largest(rows[fold == i]) for i in range(FOLDS)]), rows, fold, sizes)

    def largest_of_others(self) -> Floats:
        """Return the largest magnitudes in all parts but one, (FOLDS, width)."""
        return np.stack([np.delete(self.largest, i, axis=0).max(axis=0) for i in range(FOLDS)])


class Observer:
    """Gathers what is observed of a value, some rows at a time; every `stride`-th is kept."""

    def __init__(self, stride: int) -> None:
        self._stride, self._seen = stride, 0
        self._largest: Floats | None = None
        self._sample: list[Floats] = []
        self._fold: list[NDArray[np.integer]] = []
        self._sizes: list[Floats] = []

    def add(self, rows: Floats, fold: NDArray[np.integer], sums: Floats | None = None) -> None:
        """Take rows (n, width), which part each is of, (n,), and the sums that the layer's outputs went into."""
        found = np.stack([_largest(rows[fold == i]) for i in range(FOLDS)])
        self._largest = found if self._largest is None else np.maximum(found, self._largest)
        kept = slice(-self._seen % self._stride, None, self._stride)
        self._seen += len(rows)
        self._sample.append(rows[kept].copy())
        self._fold.append(fold[kept])
        if sums is not None:
            self._sizes.append(np.square(sums[kept]).sum(axis=1))

    def observed(self) -> Observed:
        """Return what was gathered; there must be some."""
        sizes = np.concatenate(self._sizes) if self._sizes else None
        assert self._largest is not None
        return Observed(self._largest, np.concatenate(self._sample), np.concatenate(self._fold), sizes)


def _largest(rows: Floats) -> Floats:
    found: Floats = np.abs(rows).max(axis=0, initial=0)
    return found
