"""What was seen of a value while texts were read: enough to choose its 8 bits by, without keeping all of it."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Observed:
    """The texts are in two halves: what is chosen by the one is tried on the other.

    Channels reach further in a text that was not seen than in those that were, and where each has a factor of its own
    a choice that is tried on what it was made from looks ten times as good as it is.
    """

    largest: Floats
    """(2, width) largest magnitude of each channel, in either half."""
    sample: Floats
    """(num_rows, width) rows of the second half."""
    sizes: Floats | None = None
    """(num_rows,) ‖sum‖² that the layer's output becomes a part of; None: what counts is the output itself."""

    @classmethod
    def of(cls, rows: Floats, sizes: Floats | None = None) -> Self:
        """Take every other one of these rows, (num_tokens, width), and sizes, (num_tokens,), as the second half."""
        halves = [np.abs(rows[i::2]).max(axis=0, initial=0) for i in range(2)]
        return cls(np.stack(halves), rows[1::2], None if sizes is None else sizes[1::2])


class Observer:
    """Gathers what is observed of a value, some rows at a time; every `stride`-th of the second half is kept."""

    def __init__(self, stride: int) -> None:
        self._stride, self._seen = stride, 0
        self._largest: list[Floats] = []
        self._sample: list[Floats] = []
        self._sizes: list[Floats] = []

    def add(self, rows: Floats, half: NDArray[np.integer], sums: Floats | None = None) -> None:
        """Take rows (n, width), which half each is in, (n,), and the sums that the layer's outputs went into."""
        found = np.stack([np.abs(rows[half == i]).max(axis=0, initial=0) for i in range(2)])
        self._largest = [np.maximum(found, *self._largest) if self._largest else found]
        second = np.flatnonzero(half)
        kept = second[(self._seen + np.arange(len(second))) % self._stride == 0]
        self._seen += len(second)
        self._sample.append(rows[kept])
        if sums is not None:
            self._sizes.append(np.square(sums[kept]).sum(axis=1))

    def observed(self) -> Observed:
        """Return what was gathered."""
        sizes = np.concatenate(self._sizes) if self._sizes else None
        return Observed(self._largest[0], np.concatenate(self._sample), sizes)
