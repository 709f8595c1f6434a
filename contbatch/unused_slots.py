"""Slots of pages that are held and never filled, by step: known when their holders leave."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class UnusedSlots:
    """Counts slots held in vain, on pages of `page_size` tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._steps, self._changes = array("q"), array("q")
        """Steps, and how many more there are in each than in the step before; a step may be there several times."""

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
                self._steps.extend((start, end))
                self._changes.extend((unused, -unused))
            end = start

    def of(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many there are in each of these steps."""
        changed, by = np.array(self._steps, np.int64), np.array(self._changes, np.int64)
        order = np.argsort(changed)
        slots = np.concatenate([[0], np.cumsum(by[order])])
        return slots[np.searchsorted(changed[order], steps, side="right")]
