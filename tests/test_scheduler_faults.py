"""Errors, aborts, callbacks and policies gone wrong cost the request concerned, and nothing else."""

import pytest
from fake_runner import request, scheduler_of, serve, solo
from invariants import check

from contbatch.errors import PolicyError, StalledError
from contbatch.policies import ChunkedPrefill, ContinuousBatching, OneAtATime, Policy, StaticBatching
from contbatch.request import RequestStatus

WAITING, RUNNING, PREEMPTED, SWAPPED, FORKING, HELD, FINISHED = RequestStatus


# ---- one request fails alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ChunkedPrefill(), StaticBatching(2), StaticBatching(2, pad=True)], ids=repr)
def test_an_error_ends_one_request(policy):
    a, b = request("a", 6, 3), request("b", 2, 3)
    scheduler = scheduler_of(policy, a, b)
    scheduler.runner.poison["a"] = 1
    serve(scheduler)
    assert (a.finish_reason, a.output_token_ids, str(a.error)) == ("error", solo(a)[0][:1], "a is poisoned")
    assert (b.finish_reason, b.output_token_ids, b.error) == ("length", solo(b)[0], None)


def test_an_error_for_a_chunk_that_samples_nothing_ends_its_request_too():
    scheduler = scheduler_of(ChunkedPrefill(), a := request("a", 6), max_num_batched_tokens=4)
    scheduler.update(scheduler.schedule(), {}, {"a": ValueError("lost")})
    assert (a.finish_reason, scheduler.has_requests) == ("error", False)


# ---- callbacks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [1, 3], ids=["at its last token", "before"])
class TestCallback:
    """What on_token may do to request a, while b goes on."""

    def run(self, output, on_a):
        a, b = request("a", 1, output), request("b", 1, 3)
        scheduler = scheduler_of(ChunkedPrefill(), a, b)
        serve(scheduler, on_token=lambda r: on_a(r, scheduler) if r is a else None)
        assert (b.finish_reason, b.output_token_ids, b.error) == ("length", solo(b)[0], None)
        assert len(scheduler.ended) == 2
        return a

    def test_may_raise(self, output):
        error = KeyError("in the callback")

        def on_a(r, scheduler):
            raise error

        a = self.run(output, on_a)
        assert (a.finish_reason, a.error, a.num_output_tokens) == ("error", error, 1)

    def test_may_end_it(self, output):
        a = self.run(output, lambda r, scheduler: True)
        assert (a.finish_reason, a.num_output_tokens) == ("stop", 1)

    @pytest.mark.parametrize("then", ["return", "stop", "raise"])
    def test_may_abort_it(self, output, then):
        def on_a(r, scheduler):
            scheduler.abort("a")
            if then == "raise":
                raise KeyError("after abort")
            return then == "stop"

        a = self.run(output, on_a)
        assert (a.finish_reason, a.error, a.num_output_tokens) == ("abort", None, 1)

    def test_may_be_interrupted(self, output):
        a = request("a", 1, output)
        scheduler = scheduler_of(ChunkedPrefill(), a)

        def interrupted(r):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            serve(scheduler, on_token=interrupted)
        scheduler.schedule()
        serve(scheduler)
        assert (a.output_token_ids, a.finish_reason) == solo(a)


def test_a_callback_may_abort_others_of_its_step():
    a, b, c = requests = [request(name, 1, 3) for name in "abc"]
    scheduler = scheduler_of(ChunkedPrefill(), *requests)

    def on_token(r):
        if r is b:
            scheduler.abort("a")
            scheduler.abort("c")

    serve(scheduler, on_token=on_token)
    assert [(r.finish_reason, r.num_output_tokens) for r in (a, b, c)] == [("abort", 1), ("length", 3), ("abort", 0)]


# ---- aborts ------------------------------------------------------------------------------------------------------


def waiting(a):
    return scheduler_of(OneAtATime(), request("x", 1, 9), a), 1


def prefilling(a):
    return scheduler_of(ChunkedPrefill(), a, max_num_batched_tokens=3), 1


def decoding(a):
    return scheduler_of(ChunkedPrefill(), request("x", 1, 9), a), 2


def preempted(a):
    return scheduler_of(ChunkedPrefill(), request("x", 8, 5), a, num_pages=4), 2


def held(a):
    a.sampling = a.sampling.replace(max_tokens=1)
    return scheduler_of(StaticBatching(2), request("x", 1, 9), a), 2


STATES = [(waiting, WAITING), (prefilling, RUNNING), (decoding, RUNNING), (preempted, PREEMPTED), (held, HELD)]


@pytest.mark.parametrize(("state", "status"), STATES, ids=[state.__name__ for state, _ in STATES])
@pytest.mark.parametrize("while_a_step_runs", [False, True])
def test_a_client_goes_in_any_state_and_its_pages_are_freed_once(state, status, while_a_step_runs):
    scheduler, steps = state(a := request("a", 8, 5))
    serve(scheduler, steps)
    assert a.status is status
    if while_a_step_runs:
        step = scheduler.schedule()
        result = scheduler.runner.execute(step)
    others = sum(len(r.pages) for r in scheduler.running if r is not a)
    scheduler.abort("a")
    assert (a.finish_reason, a.status) == ("abort", FINISHED)
    assert scheduler.pool.num_live == others
    scheduler.abort("a")
    if while_a_step_runs:
        scheduler.update(step, result.tokens)
    serve(scheduler)
    scheduler.drain_released()
    assert scheduler.ended.count(a) == 1
    assert scheduler.pool.num_live == 0


def test_aborting_the_longest_of_a_static_batch_lets_the_others_leave_at_once():
    a, b = request("a", 1, 9), request("b")
    scheduler = scheduler_of(StaticBatching(2), a, b)
    serve(scheduler, 2)
    assert b.status is HELD
    scheduler.abort("a")
    assert (b.status, b.finish_reason, scheduler.has_requests) == (FINISHED, "length", False)


def test_unknown_ids_are_ignored():
    scheduler_of(OneAtATime()).abort("nobody")


# ---- policies gone wrong -----------------------------------------------------------------------------------------


class Plans(Policy):
    """Plans whatever the function it is given returns."""

    def __init__(self, function):
        self.function = function

    def plan(self, waiting, running, budget):
        return self.function([*running, *waiting])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rs: None, "must yield .* returned None"),
        (lambda rs: [rs[0]], r"must yield \(request, number of tokens\), got Request"),
        (lambda rs: [("a", 1)], "must yield"),
        (lambda rs: [(request("a"), 1)], "not a live request"),
        (lambda rs: [(rs[0], 1), (rs[0], 1)], "'a' twice"),
        (lambda rs: [(rs[0], 0)], "wants 0 tokens for request 'a', possible are 1 to 3"),
        (lambda rs: [(rs[0], 4)], "wants 4 tokens"),
        (lambda rs: [(rs[0], 1.0)], "wants 1.0 tokens"),
        (lambda rs: [(rs[0], None)], "wants None tokens"),
    ],
)
def test_a_bad_plan_is_named_and_leaves_the_scheduler_whole(function, message):
    scheduler = scheduler_of(Plans(function), request("a", 3, 2), request("b", 3, 2))
    with pytest.raises(PolicyError, match=f"Plans.plan.*{message}"):
        scheduler.schedule()
    check(scheduler)
    scheduler.policy = ContinuousBatching()
    serve(scheduler)
    assert {r.finish_reason for r in scheduler.ended} == {"length"}


def test_a_policy_that_plans_nothing_is_an_error_not_an_idle_loop():
    scheduler = scheduler_of(Plans(lambda rs: []), request("a"), num_pages=3)
    with pytest.raises(StalledError, match=r"nothing of use: <Scheduler .*: 0 running, 1 waiting, 3 of 3 pages free>"):
        scheduler.schedule()


@pytest.mark.parametrize("pads", [False, True])
def test_a_policy_that_never_lets_go_is_an_error_not_an_idle_loop(pads):
    class Clingy(ChunkedPrefill):
        def plan(self, waiting, running, budget):
            yield from super().plan(waiting, running, budget)
            yield from ((r, 1) for r in running if r.is_finished and pads)

        def may_leave(self, running):
            return False

    scheduler = scheduler_of(Clingy(), request("a"), request("b"), max_num_seqs=1)
    with pytest.raises(StalledError, match=r"nothing of use: .* 1 running, 1 waiting"):
        serve(scheduler)


@pytest.mark.parametrize("policy", [ChunkedPrefill, ContinuousBatching])
def test_a_policy_that_keeps_the_seats_of_the_finished_does_not_compute_them(policy):
    class Keeps(policy):
        def may_leave(self, running):
            return all(r.is_finished for r in running)

    steps = serve(scheduler_of(Keeps(), request("a", 1, 1), request("b", 1, 3)))
    assert [len(s.grants) for s in steps] == [2, 1, 1]


def test_plans_may_be_lists_and_exceed_the_budget():
    scheduler = scheduler_of(Plans(lambda rs: [(r, r.num_uncomputed_tokens) for r in rs]), max_num_batched_tokens=5)
    for name in "abc":
        scheduler.add(request(name, 4, 2))
    steps = serve(scheduler)
    assert [[g.num_tokens for g in s.grants] for s in steps] == [[4, 1], [1, 3, 1], [1, 3], [1]]
