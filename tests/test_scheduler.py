import pytest
from fake_runner import request, scheduler_of, serve, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check
from random_workloads import POLICIES, WORKLOADS

from contbatch.errors import InvalidRequestError, PolicyError, SchedulerError
from contbatch.policies import ChunkedPrefill, ContinuousBatching, OneAtATime, Orca, Policy, StaticBatching
from contbatch.request import RequestStatus
from contbatch.scheduler import Scheduler

WAITING, RUNNING, PREEMPTED, *_ = RequestStatus


def statuses(*requests):
    return [r.status for r in requests]


# ---- whatever the workload ---------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(WORKLOADS, POLICIES)
def test_every_workload_ends_with_the_tokens_that_each_request_has_alone(workload, policy):
    scheduler = scheduler_of(policy, **workload.limits)
    requests = workload.requests()
    for r in requests:
        if workload.fits(r):
            scheduler.add(r)
        else:
            with pytest.raises(InvalidRequestError, match="can never run"):
                scheduler.add(r)
    serve(scheduler, max_steps=20 + 8 * workload.num_tokens)
    assert len(scheduler.ended) == sum(map(workload.fits, requests))
    for r in scheduler.ended:
        assert (r.output_token_ids, r.finish_reason) == solo(r)
    assert scheduler.pool.num_available == scheduler.pool.num_pages


# ---- adding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_pages", "page_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "8"])
def test_limits_are_positive_integers(name, bad):
    with pytest.raises(InvalidRequestError, match=rf"{name} must be an integer ≥ 1, got {bad!r}"):
        Scheduler(OneAtATime(), **{"num_pages": 4, name: bad})


def test_a_policy_is_an_instance():
    with pytest.raises(PolicyError, match="OneAtATime"):
        Scheduler(OneAtATime, num_pages=4)


def test_an_impossible_request_is_refused_and_does_not_block_those_behind_it():
    scheduler = scheduler_of(ChunkedPrefill(), num_pages=4, page_size=16)
    with pytest.raises(InvalidRequestError, match=r"'big': 65 prompt \+ 1 output tokens need 5 pages .* has 4"):
        scheduler.add(request("big", 65))
    scheduler.add(request("small"))
    serve(scheduler)
    assert [r.request_id for r in scheduler.ended] == ["small"]


@pytest.mark.parametrize("policy", [ChunkedPrefill(), ContinuousBatching(), Orca(), StaticBatching(2)], ids=repr)
def test_a_request_that_just_fits_runs(policy):
    scheduler = scheduler_of(policy, request("whole pool", 60, 5), num_pages=4, page_size=16)
    with pytest.raises(InvalidRequestError, match="need 5 pages"):
        scheduler.add(request("one more", 60, 6))
    serve(scheduler)


def test_max_model_len_counts_prompt_and_output():
    scheduler = scheduler_of(ChunkedPrefill(), max_model_len=10)
    scheduler.add(request("fits", 6, 4))
    with pytest.raises(InvalidRequestError, match=r"6 prompt \+ 5 output tokens = 11 exceed max_model_len 10"):
        scheduler.add(request("exceeds", 6, 5))


def test_an_id_is_free_again_once_its_request_has_left():
    scheduler = scheduler_of(ChunkedPrefill(), request("a"))
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        scheduler.add(request("a"))
    serve(scheduler)
    scheduler.add(request("a"))


def test_a_request_runs_once():
    fresh, run, live, rejected = request("x"), request("y"), request("z"), request("r")
    rejected.finish_reason = "rejected"
    scheduler, other = scheduler_of(ChunkedPrefill(), run), scheduler_of(ChunkedPrefill())
    serve(scheduler)
    scheduler.add(live)
    for used in (run, live, rejected):
        with pytest.raises(InvalidRequestError, match="new Request"):
            other.add(used)
    other.add(fresh)


# ---- order -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12), st.randoms(use_true_random=False))
def test_the_waiting_stand_by_arrival_then_by_order_of_adding(arrivals, rng):
    requests = [request(i, at=float(at)) for i, (at, _) in enumerate(arrivals)]
    scheduler = scheduler_of(ChunkedPrefill(), *requests)
    gone = [r for r, (_, stays) in zip(requests, arrivals, strict=True) if not stays]
    rng.shuffle(gone)
    for r in gone:
        scheduler.abort(r.request_id)
    stay = [r for r in requests if r not in gone]
    assert list(scheduler.waiting) == sorted(stay, key=lambda r: r.arrival_time)
    assert len(scheduler.waiting) == len(stay)


def test_a_preempted_request_keeps_its_place_among_equals():
    a, b, c = requests = [request(name, 4, 5) for name in "abc"]
    scheduler = scheduler_of(ChunkedPrefill(), *requests, num_pages=2, max_num_seqs=2)
    serve(scheduler, 2)
    assert statuses(a, b, c) == [RUNNING, PREEMPTED, WAITING]
    assert list(scheduler.waiting) == [b, c]
    assert b.num_preemptions == 1


def test_who_does_not_fit_is_not_overtaken():
    running, big, small = requests = [request("running", 4, 4), request("big", 9), request("small")]
    scheduler = scheduler_of(ChunkedPrefill(), *requests, num_pages=3)
    serve(scheduler, 1)
    assert statuses(running, big, small) == [RUNNING, WAITING, WAITING], "1 free page would do for the small one"


def test_the_lowest_ranked_is_preempted_and_a_step_that_preempts_admits_nobody():
    a, b, c, d = requests = [request(name, 4, 5) for name in "abc"] + [request("d")]
    scheduler = scheduler_of(ChunkedPrefill(), *requests[:3], num_pages=3)
    serve(scheduler, 1)
    scheduler.add(d)
    step = scheduler.schedule()
    assert step.preempted == [c]
    assert [g.request for g in step.grants] == [a], "b needs a page too, and none is left below it"
    assert statuses(a, b, c, d) == [RUNNING, RUNNING, PREEMPTED, WAITING]


def test_who_lacks_pages_sits_a_step_out_rather_than_preempt_for_who_just_came():
    class Newcomers(Policy):
        def plan(self, waiting, running, budget):
            yield from ((r, min(r.num_uncomputed_tokens, 4)) for r in waiting)
            yield from ((r, r.num_uncomputed_tokens) for r in running)

    a, b, c = request("a", 12), request("b", 3, 2), request("c", 4)
    scheduler = scheduler_of(Newcomers(), a, b, num_pages=4)
    serve(scheduler, 1)
    scheduler.add(c)
    [step] = serve(scheduler, 1)
    assert [g.request for g in step.grants] == [c, b], "a needs 2 pages more, 1 is left"
    serve(scheduler)
    assert [r.num_preemptions for r in (a, b, c)] == [0, 0, 0]


def test_the_lowest_free_seat_is_taken_first():
    scheduler = scheduler_of(ChunkedPrefill(), *(request(name, 1, 9) for name in "abcd"))
    scheduler.schedule()
    for name in "dac":
        scheduler.abort(name)
    for name in "ef":
        scheduler.add(request(name))
    scheduler.schedule()
    assert {r.request_id: r.seat for r in scheduler.running} == {"b": 1, "e": 0, "f": 2}


def test_two_requests_that_each_need_three_of_four_pages_both_finish():
    for policy in (ChunkedPrefill(), ContinuousBatching()):
        for budget in (4, 64):
            a, b = requests = [request(name, 4, 9) for name in "ab"]
            scheduler = scheduler_of(policy, *requests, num_pages=4, max_num_batched_tokens=budget)
            serve(scheduler, max_steps=40)
            assert a.num_preemptions == 0
            assert b.num_preemptions <= 2


# ---- budget ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "chunks"), [(7, [7]), (8, [8]), (9, [8, 1]), (16, [8, 8]), (17, [8, 8, 1])])
def test_a_prompt_takes_as_many_chunks_as_the_budget_needs_and_no_empty_one(prompt, chunks):
    for policy in (ChunkedPrefill(), ContinuousBatching(), Orca(), OneAtATime(), StaticBatching()):
        scheduler = scheduler_of(policy, request("a", prompt, 2), max_num_batched_tokens=8)
        steps = serve(scheduler)
        assert [s.num_tokens for s in steps] == [*chunks, 1]
        assert [s.grants[0].samples for s in steps] == [False] * (len(chunks) - 1) + [True, True]


# ---- the protocol ------------------------------------------------------------------------------------------------


def test_planning_twice_changes_nothing_and_only_the_latest_step_counts():
    a, b = request("a", 9, 3), request("b", 2, 3)
    scheduler = scheduler_of(ChunkedPrefill(), a, b, max_num_batched_tokens=10)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (first.admitted, second.admitted) == ([a, b], [])
    assert first.grants == second.grants
    assert (first.step, second.step, scheduler.num_steps) == (0, 0, 0)
    with pytest.raises(SchedulerError, match="planned anew"):
        scheduler.update(first, {"a": 1})
    scheduler.update(second, {"a": 1})
    with pytest.raises(SchedulerError, match="updated before"):
        scheduler.update(second, {"a": 1})
    assert (a.output_token_ids, scheduler.num_steps) == ([1], 1)


def test_a_missing_token_is_an_error_that_changes_nothing():
    a, b = request("a", 1, 2), request("b", 1, 2)
    scheduler = scheduler_of(ChunkedPrefill(), a, b)
    step = scheduler.schedule()
    with pytest.raises(SchedulerError, match="'b'"):
        scheduler.update(step, {"a": 1})
    assert a.output_token_ids == []
    scheduler.update(step, {"a": 1, "b": 2})
    assert (a.output_token_ids, b.output_token_ids) == ([1], [2])


class SometimesWrong(Policy):
    wrong = False

    def plan(self, waiting, running, budget):
        for r in [*running, *waiting]:
            yield r, 1
            if self.wrong:
                raise ZeroDivisionError


def test_a_failed_plan_leaves_no_older_step_to_update():
    scheduler = scheduler_of(SometimesWrong(), request("a", 1, 3))
    step = scheduler.schedule()
    scheduler.policy.wrong = True
    with pytest.raises(ZeroDivisionError):
        scheduler.schedule()
    check(scheduler)
    with pytest.raises(SchedulerError):
        scheduler.update(step, {"a": 1})
