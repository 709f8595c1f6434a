"""What each client got, and how evenly, against sums by hand."""

import math
from fractions import Fraction

import pytest
from fake_runner import engine_of, request, time_of
from hypothesis import given
from hypothesis import strategies as st

import contbatch as cb
from contbatch.errors import DetailError, InvalidRequestError


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=9))
def test_jains_index_is_its_definition(shares):
    exact = Fraction(sum(shares) ** 2, len(shares) * sum(x * x for x in shares)) if any(shares) else 1
    assert cb.jain(shares) == pytest.approx(float(exact))
    assert cb.jain([1e-300 * x for x in shares]) == pytest.approx(float(exact)), "units don't matter"


def test_jains_index_of_the_extremes():
    assert cb.jain([3, 3, 3]) == cb.jain([0, 0]) == cb.jain([7]) == 1
    assert cb.jain([5, 0, 0, 0]) == 0.25
    assert cb.jain(x for x in (1, 1, 0, 0)) == 0.5


@pytest.mark.parametrize("shares", [[], [1, -1], [math.nan], [math.inf, 1]])
def test_what_is_no_share_is_refused(shares):
    with pytest.raises(InvalidRequestError, match="share"):
        cb.jain(shares)


def of(client, name, prompt, output, **targets):
    sampling = cb.SamplingParams(max_tokens=output, ignore_eos=True)
    return cb.Request(name, [1] * prompt, sampling, client_id=client, **targets)


def test_each_client_by_hand():
    """Two seats: "a" and "b" at once, then "c"; "x" is too long for the pool."""
    requests = [of("ann", "a", 3, 2), of("bob", "b", 1, 4), of("ann", "c", 2, 1), of("bob", "x", 999, 1)]
    result = engine_of(cb.ContinuousBatching(), max_num_seqs=2, num_pages=16).run(requests)
    ends = [time_of(4), time_of(4, 2), time_of(4, 2, 3), time_of(4, 2, 3, 1)]
    table = cb.by_client(result).loc[["ann", "bob"]]
    assert table.requests.tolist() == [2, 2]
    assert table.finished.tolist() == [2, 1]
    assert table.service.tolist() == [3 + 2 + 2 * (2 + 1), 1 + 2 * 4]
    assert table.tokens_per_s.tolist() == [3 / (ends[1] + ends[2]), 4 / ends[3]]
    assert table.ttft_s_mean.tolist() == [(ends[0] + ends[2]) / 2, ends[0]]
    assert table.attainment.tolist() == [1, 0.5]
    assert cb.by_client(result, e2e_s=ends[1]).attainment.to_dict() == {"ann": 0.5, "bob": 0}
    early = cb.by_client(result, until_s=ends[1], prompt_weight=10, output_weight=1)
    assert early.service.to_dict() == {"ann": 30 + 2, "bob": 10 + 2}
    assert cb.by_client(result, until_s=ends[3]).service.to_dict() == table.service.to_dict()


def test_requests_of_nobody_are_one_client():
    table = cb.by_client(engine_of().run([request("a", 1, 1), request("b", 1, 2)]))
    assert table.requests.tolist() == [2]


def test_the_prompt_of_several_samples_is_served_once():
    several = cb.Request("a", [1] * 5, cb.SamplingParams(max_tokens=2, n=3), client_id="ann")
    assert cb.by_client(engine_of().run([several])).service["ann"] == 5 + 2 * 6


def test_fair_share_is_fairer_than_first_come_first_served():
    """A flood of one client before the few requests of the other."""
    flood = [of("flood", i, 4, 8) for i in range(20)]
    few = [of("few", 100 + i, 4, 8) for i in range(6)]

    def fairness(policy):
        result = engine_of(policy, max_num_seqs=2, num_pages=64).run([*flood, *few])
        return cb.jain(cb.by_client(result, until_s=result.end_s / 3).service)

    flood_first = fairness(cb.ContinuousBatching())
    flood, few = [of("flood", i, 4, 8) for i in range(20)], [of("few", 100 + i, 4, 8) for i in range(6)]
    assert flood_first < 0.6
    assert fairness(cb.FairShare()) > 0.95


def test_bad_values_are_refused():
    result = cb.simulate(cb.Poisson(rate=4, num_requests=3), detail=False)
    with pytest.raises(DetailError):
        cb.by_client(result, until_s=1.0)
    with pytest.raises(InvalidRequestError, match="output_weight"):
        cb.by_client(result, output_weight=0)
    with pytest.raises(InvalidRequestError, match="until_s"):
        cb.by_client(result, until_s=-1)
