"""Consecutive steps in which the same requests decode."""

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from math import inf
from typing import NamedTuple


class Stretch(NamedTuple):
    """Consecutive steps that are alike, each beginning when the one before it ends; the lists are by step."""

    start: float
    """Seconds, as the next two."""
    elapsed: list[float]
    ends: list[float]
    live_pages: list[int]

    @property
    def starts(self) -> list[float]:
        """When each of them begins."""
        return [self.start, *self.ends[:-1]]


def find_times(
    seconds: Callable[[int], float], context: int, growth: int, now: float, until: float, most: int, resize_s: float
) -> tuple[list[float], list[float]]:
    """Return how long steps from `now` on take that begin before `until`, and when they end; the first ones at least.

    Parameters
    ----------
    seconds : callable
        Seconds of a step by its `decode_context`.
    context, growth : int
        That of the first step, and by how much it is larger in each step than in the one before; growth ≥ 1.
    now, until : float
        Seconds.
    most : int
        Steps.
    resize_s : float
        Seconds that the first step takes more, since it has another number of rows than the last one.
    """
    if now >= until or not most:
        return [], []
    if (first_s := seconds(context)) > 0:  # the next ones mostly take a little longer
        most = int(min(most, (until - now) / first_s + 1))
    elapsed = list(map(seconds, range(context, context + most * growth, growth)))
    elapsed[0] += resize_s
    ends = list(accumulate(elapsed, initial=now))
    if not (min(elapsed) >= 0 and ends[-1] < inf):  # an impossible time is the engine's to refuse
        times = enumerate(zip(elapsed, ends[1:], strict=True))
        most = next((nth for nth, (step_s, end) in times if not (step_s >= 0 and end < inf)), most)
    num = bisect_left(ends, until, 1, most) if most else 0
    return elapsed[:num], ends[1 : num + 1]
