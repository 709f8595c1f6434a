"""When the latest steps ended."""

from bisect import bisect_left
from operator import sub


class StepEnds:
    """End times of consecutive steps, in seconds, and the longest gap between those of the latest so many."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self._peaks: list[tuple[int, float]] = []
        """Place and longest gap of those of the blocks added that no later one exceeds."""

    def __len__(self) -> int:
        return len(self.ends)

    def add(self, start: float, ends: list[float]) -> None:
        """Add a block of steps, the first of which began at `start`, when the last one added ended."""
        peaks, longest = self._peaks, max(map(sub, ends, [start, *ends]))
        while peaks and peaks[-1][1] <= longest:
            peaks.pop()
        peaks.append((len(self.ends), longest))
        self.ends += ends

    def since(self, first: int) -> tuple[list[float], float]:
        """Return the ends from place `first` on, where a block must begin, and the longest gap before one of them."""
        place = bisect_left(self._peaks, (first,))
        return self.ends[first:], self._peaks[place][1]

    def clear(self) -> None:
        """Forget all that was added."""
        self.ends.clear()
        self._peaks.clear()
