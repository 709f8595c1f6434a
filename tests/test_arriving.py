"""Requests on their way, beside a sorted list."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch.arriving import Arriving
from contbatch.errors import InvalidRequestError
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams

DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 20), st.none()),
        st.tuples(st.just("pop"), st.none(), st.none()),
    ),
    max_size=30,
)


@given(DEEDS)
def test_the_next_is_the_first_of_those_that_are_left(deeds):
    arriving, left = Arriving(), []
    for number, (deed, value, listed) in enumerate(deeds):
        if deed == "add":
            request = Request(number, [1], arrival_time=float(value))
            arriving.add(request, listed)
            left.append((value, not listed, number, request))
        elif left and deed == "remove":
            arriving.remove(left.pop(value % len(left))[-1])
        elif left:
            first = min(left, key=lambda each: each[:3])
            left.remove(first)
            assert arriving.pop() == (first[-1], True)
        assert arriving.next_s == min((at for at, *_ in left), default=inf)
        assert bool(arriving) == bool(left)
        assert all(arriving.by_id.get(request.request_id) is request for *_, request in left)


def test_the_ids_of_all_samples_are_in_use_until_it_is_removed():
    arriving = Arriving()
    request = Request("a", [1], SamplingParams(n=2), arrival_time=1.0)
    arriving.add(request)
    for name in ("a", "a#1"):
        with pytest.raises(InvalidRequestError, match=f"request id '{name}' is already in use"):
            arriving.add(Request(name, [1]))
    arriving.remove(request)
    assert (arriving.by_id.get("a#1"), arriving.next_s) == (None, inf)
    arriving.add(Request("a#1", [1], arrival_time=2.0))
    assert arriving.next_s == 2.0
