"""When the latest steps ended."""

from bisect import bisect_left
from operator import sub


class StepEnds:
    """End times of consecutive steps, in seconds, and the longest gap between those of the latest so many."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self._places: list[int] = []
        self._longest: list[float] = []
        """By block: where it begins, and its longest gap."""

    def __len__(self) -> int:
        return len(self.ends)

    def add(self, start: float, ends: list[float]) -> None:
        """Add a block of steps, the first of which began at `start`, when the last one added ended."""
        self._places.append(len(self.ends))
        self._longest.append(max(map(sub, ends, [start, *ends])))
        self.ends += ends

    def since(self, first: int) -> tuple[list[float], float]:
        """Return the ends from place `first` on, where a block must begin, and the longest gap before one of them."""
        return self.ends[first:], max(self._longest[bisect_left(self._places, first) :])

    def clear(self) -> None:
        """Forget all that was added."""
        for values in (self.ends, self._places, self._longest):
            values.clear()
