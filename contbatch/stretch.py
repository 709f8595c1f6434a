"""Consecutive steps in which the same requests decode."""

from bisect import bisect_left
from itertools import accumulate, islice
from math import inf
from typing import NamedTuple

from contbatch.cost import SecondsOf


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
    seconds: SecondsOf, context: int, growth: int, now: float, until: float, most: int, resize_s: float
) -> tuple[list[float], list[float]]:
    """Return how long steps from `now` on take that begin before `until`, and when they end; the first ones at least.

    Parameters
    ----------
    seconds : callable
        Seconds of steps by their `decode_context`.
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
    times = iter(seconds(range(context, context + most * growth, growth)))
    if (first_s := next(times)) > 0:  # the next ones mostly take a little longer
        most = int(min(most, (until - now) / first_s + 1))
    elapsed = [first_s + resize_s, *islice(times, most - 1)]
    ends = list(accumulate(elapsed, initial=now))
    if not (min(elapsed) >= 0 and ends[-1] < inf):  # an impossible time is the engine's to refuse
        steps = enumerate(zip(elapsed, ends[1:], strict=True))
        most = next((nth for nth, (step_s, end) in steps if not (step_s >= 0 and end < inf)), most)
    num = bisect_left(ends, until, 1, most) if most else 0
    return elapsed[:num], ends[1 : num + 1]
