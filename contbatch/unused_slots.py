"""Slots of pages that are held and never filled, by step: known when their holders leave."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class UnusedSlots:
    """Counts slots held in vain, on pages of `page_size` tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._changes: Counter[int] = Counter()
        """By step, how many more than in the step before."""

    def add(self, holds: Sequence[tuple[int, int]], stored: int, end: int) -> None:
        """Add those of a request that gives up its pages before step `end`.

        Parameters
        ----------
        holds : sequence of (step, pages)
            How many pages it has held since when.
        stored : int
            Most tokens whose K/V it has had in them.
        """
        for start, pages in reversed(holds):
            if (unused := pages * self.page_size - stored) > 0:
                self._changes[start] += unused
                self._changes[end] -= unused
            end = start

    def of(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many there are in each of these steps."""
        changed, by = (np.fromiter(values, np.int64) for values in (self._changes, self._changes.values()))
        order = np.argsort(changed)
        slots = np.concatenate([[0], np.cumsum(by[order])])
        return slots[np.searchsorted(changed[order], steps, side="right")]
