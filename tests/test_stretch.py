"""Times of a stretch, worked out at once, beside steps taken one after the other."""

from functools import partial
from itertools import pairwise
from math import inf, nan

from hypothesis import example, given
from hypothesis import strategies as st

from contbatch.stretch import find_times

SECONDS = st.one_of(st.floats(0, 3), st.sampled_from([0.0, 1.0, -1.0, inf, nan]))


def one_by_one(steps, now, until, resize_s):
    elapsed, ends = [], []
    for nth, seconds in enumerate(steps):
        step_s = seconds + (0.0 if nth else resize_s)
        if now >= until or not 0 <= step_s < inf:
            break
        now += step_s
        elapsed.append(step_s)
        ends.append(now)
    return elapsed, ends


UNTIL = st.one_of(st.floats(0, 30), st.just(inf))


@given(st.lists(SECONDS, max_size=12), st.floats(0, 9), UNTIL, st.integers(1, 5), SECONDS)
@example([1.0, 1.0, 1.0], 0.0, 2.0, 1, 0.0)
@example([nan, 1.0], 0.0, inf, 1, 0.0)
@example([], 0.0, inf, 1, 0.0)
def test_the_same_steps_to_the_last_bit_or_the_first_of_them(steps, now, until, growth, resize_s):
    resize_s = abs(resize_s) if 0 <= resize_s < inf else 0.5
    by_context = {7 + growth * nth: seconds for nth, seconds in enumerate(steps)}
    elapsed, ends = find_times(partial(map, by_context.__getitem__), 7, growth, now, until, len(steps), resize_s)
    expected, clock = one_by_one(steps, now, until, resize_s)
    assert elapsed == expected[: len(elapsed)]
    assert ends == clock[: len(ends)]
    assert len(elapsed) == len(ends)
    assert bool(ends) == bool(clock)
    if all(a <= b for a, b in pairwise(steps)):  # costs that only rise: all of them, but for rounding
        assert len(ends) >= len(clock) - 1
