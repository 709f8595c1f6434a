"""Consecutive steps in which the same requests decode."""

from collections.abc import Callable
from math import inf
from typing import NamedTuple


class Stretch(NamedTuple):
    """Consecutive steps that are alike; each list is by step."""

    starts: list[float]
    """Seconds, as the next two."""
    elapsed: list[float]
    ends: list[float]
    live_pages: list[int]


def find_stretch(
    seconds: Callable[[int], float],
    context: int,
    growth: int,
    now: float,
    until: float,
    live_pages: list[int],
    resize_s: float = 0.0,
) -> Stretch | None:
    """Return the steps from `now` on that begin before `until`, as far as there are pages for them; None if none.

    Parameters
    ----------
    seconds : callable
        Seconds of a step by its `decode_context`.
    context, growth : int
        That of the first step, and by how much it is larger in each step than in the one before.
    now, until : float
        Seconds.
    live_pages : list of int
        After each step for which there are pages.
    resize_s : float
        Seconds that the first step takes more, since it has another number of rows than the last one.
    """
    elapsed, times = list[float](), [now]
    for nth in range(len(live_pages)):
        if now >= until:
            break
        step_s = seconds(context + nth * growth) + (0.0 if nth else resize_s)
        if not 0 <= step_s < inf:  # an impossible time is the engine's to refuse
            break
        elapsed.append(step_s)
        now += step_s
        times.append(now)
    return Stretch(times[:-1], elapsed, times[1:], live_pages[: len(elapsed)]) if elapsed else None
