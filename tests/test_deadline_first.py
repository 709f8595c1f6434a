"""Earliest deadline first: it meets every set of deadlines that any order of priorities meets."""

from dataclasses import dataclass
from itertools import permutations

import pytest
from fake_runner import engine_of, request, scheduler_of, serve, table, time_of
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch.errors import InvalidRequestError
from contbatch.policies import ChunkedPrefill, DeadlineFirst, Policy
from contbatch.request import Request, RequestStatus


@dataclass
class InOrder(Policy):
    """Fixed priorities, running or waiting."""

    names: tuple

    def plan(self, waiting, running, budget):
        for r in sorted([*running, *waiting], key=lambda r: self.names.index(r.request_id)):
            yield r, r.num_uncomputed_tokens


class PlainEDF(DeadlineFirst):
    """Earliest deadline first, late or not."""

    def _key(self, request):
        return False, *super()._key(request)[1:]


def engine(policy, requests, **limits):
    made = engine_of(policy, **{"num_pages": 200, "max_num_seqs": 20} | limits)
    for r in requests:
        made.add(r)
    return made


def met(policy, specs, **limits):
    """Requests, given as (prompt, arrival, target), whose first token is in time."""
    requests = [request(i, prompt, at=at, ttft_target_s=target) for i, (prompt, at, target) in enumerate(specs)]
    rows = engine(policy, (), **limits).run(requests).requests.set_index("request_id")
    return {r.request_id for r in requests if rows.ttft_s[r.request_id] <= r.ttft_target_s}


# ---- by hand: a step takes 1 s and 0.125 s a token ---------------------------------------------------------------


def test_the_most_urgent_goes_first_running_or_waiting():
    """a would be done with its second step at 3 s; b comes at 1 s and is due at 4 s, before a at 9 s."""
    requests = [request("a", 8, ttft_target_s=9.0), request("b", 4, at=1.0, ttft_target_s=3.0)]
    served = engine(DeadlineFirst(), requests, max_num_batched_tokens=4)
    steps = []
    while served.has_requests:
        served.step()
        steps.append(served.scheduler.runner.steps[-1][0])
    assert [[(name, tokens) for name, _, tokens, *_ in grants] for grants in steps] == [
        [("a", 4)],
        [("b", 4)],
        [("a", 4)],
    ]


def test_without_a_target_requests_go_last_by_arrival():
    requests = [request("a", 2), request("b", 2), request("c", 2, ttft_target_s=99.0)]
    assert table(serve(scheduler_of(DeadlineFirst(), *requests, max_num_seqs=1))) == ["c2", "a2", "b2"]


def test_who_is_late_already_waits_for_those_in_time():
    """x holds the only seat until 3.5 s; a is late by then, b and c are not."""
    requests = [
        request("x", 4, 2, ttft_target_s=0.5),
        request("a", 4, ttft_target_s=2.0),
        request("b", 4, ttft_target_s=9.0),
        request("c", 4),
    ]
    done = engine(DeadlineFirst(), (), max_num_seqs=1).run(requests)
    assert list(done.requests.request_id) == ["x", "b", "c", "a"]


def test_only_a_first_token_can_be_too_late():
    """a has begun to answer and is behind its pace: it still goes before b, which is due later."""
    scheduler = scheduler_of(DeadlineFirst(), request("a", 1, 3, tpot_target_s=1.0))
    serve(scheduler, 1)
    scheduler.schedule(1.0)
    scheduler.add(request("b", 2, ttft_target_s=200.0))
    assert table([scheduler.schedule(100.0)]) == ["a1 b2"]


def test_a_resumed_request_does_not_hide_the_late_behind_it():
    policy, order = DeadlineFirst(), []
    resumed, late, in_time = request("r", output=9, tpot_target_s=1.0), *(request(t, ttft_target_s=t) for t in (9, 99))
    resumed.output_token_ids = [1]
    for r in (resumed, late, in_time):
        policy.rank(r)
    object.__setattr__(policy, "now", 50.0)
    for r, _ in policy.plan((), (), 10):
        r.status = RequestStatus.RUNNING  # admitted
        order.append(r)
    assert order == [resumed, in_time, late]


@pytest.mark.parametrize(
    ("target", "expected"), [(None, ["b4", "b4", "a1"]), (4.1, ["b4", "b4", "a1"]), (3.9, ["a1 b3", "b4", "b1"])]
)
def test_the_pace_of_a_decoding_request_competes_with_a_prompt(target, expected):
    """a has its first token at 1.125 s; b, 8 tokens, comes then and is due at 5.125 s, after two steps of 4."""
    served = engine(DeadlineFirst(), [request("a", 1, 2, tpot_target_s=target)], max_num_batched_tokens=4)
    served.step()
    assert served.now == time_of(1) == 1.125
    served.add(request("b", 8, at=1.125, ttft_target_s=4.0))
    steps = []
    while served.has_requests:
        steps.append(served.scheduler.schedule(served.now))
        served.step()
    assert table(steps) == expected


def test_the_pace_counts_from_the_first_token_when_it_came():
    policy = DeadlineFirst()
    scheduler = scheduler_of(policy, a := request("a", 1, 9, ttft_target_s=50.0, tpot_target_s=2.0))
    deadlines = []
    for now in (10.0, 11.0, 12.0):
        step = scheduler.schedule(now)
        deadlines.append(scheduler.policy._deadlines.of(a, now))
        scheduler.update(step, {"a": 1})
    assert deadlines == [50.0, 11.0 + 2.0, 11.0 + 4.0]


def test_what_is_known_of_a_request_is_forgotten_when_it_ends():
    scheduler = scheduler_of(DeadlineFirst(), request("a", 1, 3), request("b", 1, 5))
    serve(scheduler)
    scheduler.add(request("c"))
    serve(scheduler)
    assert not scheduler.policy._deadlines._first_s


# ---- optimality --------------------------------------------------------------------------------------------------

SPECS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0.0, 0.0, 1.0, 2.5, 5.0]), st.floats(1.0, 12.0)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=80)
@given(SPECS, st.integers(2, 6))
def test_edf_meets_all_deadlines_that_any_order_meets(specs, budget):
    everybody = set(range(len(specs)))
    limits = {"max_num_batched_tokens": budget}
    feasible = any(met(InOrder(names), specs, **limits) == everybody for names in permutations(everybody))
    if feasible:
        assert met(DeadlineFirst(), specs, **limits) == everybody


def test_first_come_first_served_misses_what_edf_meets():
    specs = [(8, 0.0, 9.0), (4, 0.0, 2.0), (4, 0.0, 4.0)]
    assert met(DeadlineFirst(), specs, max_num_batched_tokens=4) == {0, 1, 2}
    assert met(ChunkedPrefill(), specs, max_num_batched_tokens=4) == {0}


def test_under_overload_leaving_the_late_behind_saves_the_others():
    """A request a second, all due 4 s after they arrive, for a server that needs 1.5 s each: 22 fit into 33 s."""
    specs = [(4, float(i), 4.0) for i in range(30)]
    policies = PlainEDF(), DeadlineFirst(), DeadlineFirst(least_ttft_s=1.5)
    assert [len(met(policy, specs, max_num_batched_tokens=4)) for policy in policies] == [6, 6, 22]


# ---- the clock ---------------------------------------------------------------------------------------------------


def test_a_policy_sees_the_time_at_which_its_step_starts():
    seen = []

    class Watching(ChunkedPrefill):
        def plan(self, waiting, running, budget):
            seen.append(self.now)
            return super().plan(waiting, running, budget)

    served = engine(Watching(), [request("a", 3, 3, at=5.0)])
    while served.has_requests:
        served.step()
    assert seen == [5.0, 5.0 + time_of(3), 5.0 + time_of(3, 1)]
    scheduler = scheduler_of(Watching(), request("b"))
    scheduler.schedule()
    assert seen[-1] == 0.0


@pytest.mark.parametrize(
    "bad",
    [
        {"ttft_target_s": 0},
        {"tpot_target_s": float("nan")},
        {"ttft_target_s": True},
        {"priority": None},
        {"priority": float("inf")},
        {"client_id": []},
        {"expected_output_tokens": 0},
        {"expected_output_tokens": 5},
        {"expected_output_tokens": 2.0},
    ],
    ids=str,
)
def test_bad_fields_of_a_request(bad):
    [(name, value)] = bad.items()
    with pytest.raises(InvalidRequestError) as raised:
        request("a", 1, 4, **bad)
    assert f"{name} of request 'a' must be" in str(raised.value)
    assert f"got {value!r}" in str(raised.value)


def test_fields_of_a_request_have_defaults():
    r = Request("a", [1])
    assert (r.priority, r.client_id, r.ttft_target_s, r.tpot_target_s) == (0, None, None, None)
    assert r.expected_output_tokens == r.sampling.max_tokens


def test_who_waits_again_while_its_first_wait_is_not_forgotten_is_offered_once():
    """x takes the rest of the budget, then comes y, who goes first but does not fit; then z takes the pages of x."""
    z = request("z", 3, 6, ttft_target_s=1.0, tpot_target_s=1.0)
    x, y = request("x", 5, 3, ttft_target_s=50.0), request("y", 9, ttft_target_s=2.0)
    scheduler = scheduler_of(DeadlineFirst(), z, x, num_pages=3, max_num_batched_tokens=6)
    steps = serve(scheduler, 1)
    scheduler.add(y)
    steps += serve(scheduler)
    assert table(steps) == ["z3 x3", "z1 x2", "z1 -x", "z1", "z1", "z1", "y6", "y3", "x6", "x1"]
