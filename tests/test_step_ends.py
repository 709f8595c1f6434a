"""Ends of steps and the longest gap, beside a search through all of them."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from contbatch.step_ends import StepEnds

BLOCKS = st.lists(st.lists(st.floats(0, 9), min_size=1, max_size=4), min_size=1, max_size=12)


@given(BLOCKS, st.floats(0, 100))
def test_the_longest_gap_since_any_block(blocks, start):
    ends, clock, firsts = StepEnds(), [start], []
    for gaps in blocks:
        block = list(accumulate(gaps, initial=clock[-1]))[1:]
        firsts.append(len(ends))
        ends.add(clock[-1], block)
        clock += block
    assert len(ends) == len(clock) - 1
    for first in firsts:
        since, longest = ends.since(first)
        assert since == clock[first + 1 :]
        assert longest == max(b - a for a, b in pairwise(clock[first:]))
    ends.clear()
    assert len(ends) == 0
