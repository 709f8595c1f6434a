"""A fleet is its replicas, each of which does what it would do alone with the requests that it gets."""

from itertools import pairwise
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import contbatch as cb
from contbatch.errors import InvalidRequestError, RouterError
from contbatch.simulation import simulated_engine

SERVER = cb.Simulated(cost=cb.Linear(step_s=0.01, token_s=1e-4, decode_context_s=1e-6))
SIZES = {"prompt": cb.lengths.Uniform(1, 90), "output": cb.lengths.Uniform(1, 30)}
POISSON = cb.Poisson(rate=30, num_requests=30, **SIZES)
CLIENTS = cb.ClosedLoop(num_clients=7, num_requests=30, think_s=0.05, **SIZES)
CHATS = cb.Conversations(arrivals=cb.arrivals.PoissonArrivals(20), num_conversations=8, turns_each=3, **SIZES)
WORKLOADS = st.builds(
    lambda load, seed: load.replace(seed=seed), st.sampled_from([POISSON, CLIENTS, CHATS]), st.integers(0, 99)
)
POLICIES = st.sampled_from([cb.ChunkedPrefill(), cb.ContinuousBatching(), cb.FairShare(), cb.StaticBatching(4)])
ROUTERS = st.sampled_from([cb.RoundRobin(), cb.LeastTokens(), cb.PowerOfTwo(5), cb.PrefixAffinity(16, 50)])
TIGHT = {"num_pages": 24, "max_num_seqs": 6, "max_num_batched_tokens": 64}


@settings(max_examples=15, deadline=None)
@given(WORKLOADS, POLICIES, ROUTERS, st.booleans())
def test_one_replica_is_a_server(workload, policy, router, prefix_cache):
    limits = {**TIGHT, "prefix_cache": prefix_cache}
    [fleet] = cb.simulate_fleet(workload, 1, router, policy, SERVER, **limits).replicas
    alone = cb.simulate(workload, policy, SERVER, **limits)
    pd.testing.assert_frame_equal(fleet.requests, alone.requests)
    pd.testing.assert_frame_equal(fleet.steps, alone.steps)
    pd.testing.assert_frame_equal(fleet.segments, alone.segments)
    assert (fleet.token_s, fleet.end_s, fleet.max_num_seqs) == (alone.token_s, alone.end_s, alone.max_num_seqs)


@settings(max_examples=15, deadline=None)
@given(WORKLOADS, POLICIES, ROUTERS, st.integers(2, 4))
def test_each_replica_does_what_it_would_do_alone(workload, policy, router, n):
    """Played again by engines that plan every step, with the requests and arrivals that each replica had."""
    fleet = cb.simulate_fleet(workload, n, router, policy, SERVER, **TIGHT)
    turns = workload.turns()
    names = sorted(name for result in fleet.replicas for name in result.requests.request_id)
    assert names == list(range(len(turns))), "each request is somewhere, once"
    for result in fleet.replicas:
        rows = result.requests.sort_values(["arrival_s", "request_id"])
        again = [
            cb.Request(
                row.request_id,
                num_prompt_tokens=row.prompt_tokens,
                sampling=cb.SamplingParams(max_tokens=row.output_tokens, ignore_eos=True),
                arrival_time=row.arrival_s,
            )
            for row in rows.itertuples()
        ]
        alone = simulated_engine(policy, SERVER, skip_with=None, **TIGHT).run(again, in_order=True)
        times = ["request_id", "first_token_s", "finished_s", "queue_s", "preemptions", "max_itl_s"]
        pd.testing.assert_frame_equal(result.requests[times], alone.requests[times])
        if len(again):
            pd.testing.assert_frame_equal(result.steps, alone.steps)


@settings(max_examples=10, deadline=None)
@given(WORKLOADS, st.integers(2, 4))
def test_who_asks_again_asks_after_the_answer(workload, n):
    rows = cb.simulate_fleet(workload, n, None, None, SERVER).together.requests.set_index("request_id")
    turns = workload.turns()
    for number, (before, turn) in enumerate(pairwise(turns), 1):
        if turn.session == before.session:
            assert rows.arrival_s[number] == rows.finished_s[number - 1] + turn.delay_s


class Spy(cb.Router):
    """Goes round and notes what it was shown; copies share the notes."""

    notes: ClassVar[list] = []

    def choose(self, request, loads):
        chosen = len(Spy.notes) % len(loads)
        Spy.notes.append((request, chosen, loads.requests.copy(), loads.tokens.copy()))
        return chosen


@settings(max_examples=10, deadline=None)
@given(WORKLOADS, POLICIES)
def test_a_router_knows_what_has_happened_and_nothing_else(workload, policy):
    Spy.notes = []
    rows = cb.simulate_fleet(workload, 3, Spy(), policy, SERVER, **TIGHT).together.requests.set_index("request_id")
    for place, (request, _, requests, tokens) in enumerate(Spy.notes):
        expected = np.zeros((2, 3), int)
        for sent, replica, *_ in Spy.notes[:place]:
            if rows.finished_s[sent.request_id] > request.arrival_time:
                expected[:, replica] += 1, sent.num_prompt_tokens + sent.sampling.max_tokens
        assert (requests.tolist(), tokens.tolist()) == (expected[0].tolist(), expected[1].tolist())
    assert [note[0].arrival_time for note in Spy.notes] == sorted(note[0].arrival_time for note in Spy.notes)


def test_requests_that_can_never_run_have_a_row_and_stop_nobody():
    load = POISSON.replace(prompt=cb.lengths.Uniform(1, 800))
    fleet = cb.simulate_fleet(load, 2, cb.RoundRobin(), None, SERVER, **TIGHT)
    rejected = fleet.together.requests.finish_reason == "rejected"
    assert 0 < rejected.sum() < len(rejected) == 30
    assert fleet.summary().failed == rejected.sum()


def test_a_run_changes_neither_router_nor_policy():
    router = cb.PrefixAffinity()
    first, second = (cb.simulate_fleet(CHATS, 3, router, None, SERVER, prefix_cache=True) for _ in range(2))
    pd.testing.assert_frame_equal(first.together.requests, second.together.requests)


def test_figures_of_the_fleet_are_sums_over_replicas():
    fleet = cb.simulate_fleet(POISSON, 3, cb.RoundRobin(), None, SERVER)
    together, balance, summary = fleet.together, fleet.balance(), fleet.summary()
    assert balance.requests.tolist() == together.requests.groupby("replica").size().tolist() == [10, 10, 10]
    computed = [(r.steps.tokens - r.steps.padding_tokens).sum() for r in fleet.replicas]
    assert balance.computed_tokens.tolist() == computed
    assert summary.imbalance == max(computed) / (sum(computed) / 3)
    assert summary.jain == pytest.approx(cb.jain(computed))
    assert summary.output_tokens == sum(r.summary().output_tokens for r in fleet.replicas)
    assert summary.duration_s == max(r.end_s for r in fleet.replicas) - together.requests.arrival_s.min()
    busy = [r.steps.elapsed_s.sum() / summary.duration_s for r in fleet.replicas]
    assert balance.busy.tolist() == pytest.approx(busy), "sums in another order"
    gaps = pd.concat([r.itl_s() for r in fleet.replicas])
    assert summary.itl_s_p99 == pytest.approx(np.percentile(gaps, 99))
    assert together.requests.finished_s.is_monotonic_increasing


def test_without_detail_the_requests_are_the_same():
    limits = {"policy": cb.ChunkedPrefill(), "backend": SERVER, **TIGHT}
    full, small = (cb.simulate_fleet(POISSON, 3, detail=detail, **limits) for detail in (True, False))
    pd.testing.assert_frame_equal(full.together.requests, small.together.requests)
    assert small.balance().computed_tokens.tolist() == full.balance().computed_tokens.tolist()
    assert small.balance().busy.tolist() == pytest.approx(full.balance().busy.tolist())


def test_more_replicas_than_requests():
    fleet = cb.simulate_fleet(POISSON.replace(num_requests=2), 5, None, None, SERVER)
    assert fleet.summary().requests == 2
    assert fleet.balance().requests.tolist() == [1, 1, 0, 0, 0] or fleet.balance().requests.sum() == 2


class Wrong(cb.Router):
    def __init__(self, chosen):
        self.chosen = chosen

    def choose(self, request, loads):
        return self.chosen


@pytest.mark.parametrize("chosen", [-1, 3, None, 1.0, True])
def test_a_choice_that_is_no_replica_is_refused(chosen):
    with pytest.raises(RouterError, match=rf"in \[0, 3\), got {chosen}"):
        cb.simulate_fleet(POISSON, 3, Wrong(chosen), None, SERVER)


def test_bad_values_are_refused():
    with pytest.raises(InvalidRequestError, match="num_replicas"):
        cb.simulate_fleet(POISSON, 0)
    with pytest.raises(RouterError, match="instance of Router"):
        cb.simulate_fleet(POISSON, 2, cb.LeastTokens)
    with pytest.raises(InvalidRequestError, match=r"a limit of replicas must be one of .*max_num_seqs.* got 'seats'"):
        cb.simulate_fleet(POISSON, 2, seats=4)
    for own in ({"seats": 4}, {"decode": {"seats": 4}}, {"prefill": {"log": cb.DecisionLog()}}):
        with pytest.raises(InvalidRequestError, match=r"a limit of replicas must be .* got '(seats|log)'"):
            cb.simulate_disaggregated(POISSON, num_prefill=1, num_decode=1, **own)
