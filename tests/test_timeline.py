"""Columns over time against integrals taken step by step."""

import numpy as np
import pytest
from fake_runner import engine_of, request, time_of
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import POLICIES, WORKLOADS

import contbatch as cb
from contbatch.errors import DetailError, InvalidRequestError


@settings(max_examples=60)
@given(WORKLOADS, POLICIES, st.sampled_from([0.3, 1.0, 7.0, 1e4]))
def test_rows_are_means_over_their_time(workload, policy, every_s):
    result = engine_of(policy, **workload.limits).run(list(filter(workload.fits, workload.requests())))
    table = cb.over_time(result, every_s)
    if result.steps.empty:
        assert table.empty
        return
    ends = [*table.index[1:], result.end_s]
    width = np.array(ends) - table.index
    steps = list(result.steps.itertuples())
    for name in ("waiting", "seats", "held_seats", "live_pages"):
        for begin, end, value in zip(table.index, ends, table[name], strict=True):
            inside = [max(0, min(end, s.start_s + s.elapsed_s) - max(begin, s.start_s)) for s in steps]
            total = sum(getattr(s, name) * seconds for s, seconds in zip(steps, inside, strict=True))
            assert value == pytest.approx(total / (end - begin))
    assert (table.output_tokens_per_s * width).sum() == pytest.approx(result.steps.sampled_tokens.sum())
    assert (table.arrivals_per_s * width).sum() == pytest.approx(len(result.requests))
    assert (table.finished_per_s * width).sum() == pytest.approx(len(result.finished))
    assert (table.busy * width).sum() == pytest.approx(result.steps.elapsed_s.sum())


def test_an_idle_engine_counts_as_empty():
    first, second = time_of(1, 1), time_of(1)
    result = engine_of(num_pages=4).run([request("a", 1, 2), request("b", 1, 1, at=10 * first)])
    table = cb.over_time(result, first)
    assert table.seats.tolist()[:2] == [1, 0]
    assert table.busy.tolist()[1:-1] == [0] * 9
    assert table.busy.iloc[-1] == 1
    assert result.end_s - table.index[-1] == pytest.approx(second)
    assert table.page_use.iloc[0] == 0.25


def test_bad_values_are_refused():
    load = cb.Poisson(rate=4, num_requests=3)
    with pytest.raises(InvalidRequestError, match="every_s"):
        cb.over_time(cb.simulate(load), 0)
    with pytest.raises(DetailError):
        cb.over_time(cb.simulate(load, detail=False), 1)
