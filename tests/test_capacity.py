"""The bisection finds the rate at which a promise breaks, and hands over the runs on both sides of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import contbatch as cb
from contbatch.errors import WorkloadError


@given(st.floats(0.011, 90), st.sampled_from([0.5, 0.05, 0.001]))
def test_the_rate_found_is_the_highest_kept_within_the_tolerance(truth, tolerance):
    tried = []

    def run(rate):
        tried.append(rate)
        return rate

    found = cb.find_capacity(run, lambda rate: rate <= truth, low=0.01, high=100, tolerance=tolerance)
    assert found.rate == found.result == max(rate for rate in tried if rate <= truth)
    assert found.beyond == min(rate for rate in tried if rate > truth)
    assert found.rate <= truth <= found.rate * (1 + tolerance)
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize(("low", "high", "name"), [(2, 8, "low"), (0.1, 0.5, "high"), (8, 2, "low"), (0, 2, "low")])
def test_ends_that_do_not_enclose_the_break_are_refused(low, high, name):
    with pytest.raises(WorkloadError, match=f"^{name} must be"):
        cb.find_capacity(lambda rate: rate, lambda rate: rate <= 1, low=low, high=high)


def test_a_server_of_one_request_a_second():
    """One at a time, a second each: at 0.5 a second nobody waits long, at 2 the queue grows without end."""
    server = cb.Simulated(cost=cb.Linear(step_s=1.0))

    def run(rate):
        load = cb.OpenLoop(arrivals=cb.arrivals.BurstArrivals(1, 1 / rate), num_requests=50, prompt=4, output=1)
        return cb.simulate(load, cb.OneAtATime(), server)

    found = cb.find_capacity(run, lambda result: result.summary().e2e_s_p99 < 1.5, low=0.5, high=2, tolerance=0.01)
    assert 1 / 1.03 < found.rate < 1.03
    assert found.result.summary().e2e_s_p99 < 1.5 <= found.beyond.summary().e2e_s_p99
