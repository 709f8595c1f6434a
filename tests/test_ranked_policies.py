"""Policies that rank the waiting: shortest job first, priority; and the hooks behind them."""

import statistics
from itertools import pairwise
from math import log

import pytest
from fake_runner import request, scheduler_of, serve, table
from hypothesis import given, settings
from random_workloads import WORKLOADS
from test_policies import grants

from contbatch.errors import InvalidRequestError, PolicyError
from contbatch.policies import ChunkedPrefill, Policy, Priority, ShortestJobFirst
from contbatch.request import Request, RequestStatus

# ---- shortest job first ------------------------------------------------------------------------------------------


def test_the_shortest_prompt_goes_first_but_interrupts_nobody():
    scheduler = scheduler_of(ShortestJobFirst(), request("a", 5, 3), max_num_batched_tokens=6)
    serve(scheduler, 1)
    for r in (request("b", 4), request("c", 2), request("d", 3)):
        scheduler.add(r)
    assert table(serve(scheduler)) == ["a1 c2 d3", "a1 b4"]


def test_the_shortest_output_goes_first():
    lengths = [(1, 3), (9, 1), (1, 2)]
    assert grants(ShortestJobFirst("output"), *lengths, max_num_seqs=1) == ["b9", "c1", "c1", "a1", "a1", "a1"]


def test_an_oracle_goes_by_what_is_expected_not_by_what_is_allowed():
    a, b = request("a", 1, 9, expected_output_tokens=2), request("b", 1, 3)
    a.stop_ids = frozenset(range(7))  # its first token ends it
    scheduler = scheduler_of(ShortestJobFirst("output"), b, a, max_num_seqs=1)
    assert table(serve(scheduler)) == ["a1", "b1", "b1", "b1"]


def test_ties_go_by_arrival_and_a_preempted_request_has_less_to_come():
    policy = ShortestJobFirst("output")
    early, late = request("early", 1, 5, at=1.0), request("late", 1, 5, at=2.0)
    scheduler = scheduler_of(policy, late, early)
    assert list(scheduler.waiting) == [early, late]
    late.output_token_ids = [1, 1]
    assert policy.rank(late) == 3 < policy.rank(early) == 5


SPREAD = [(7 * i % 5 + 1, 11 * i % 17 + 1) for i in range(40)]


def mean_latency(policy):
    """Mean step in which a request of a fixed workload ends, all having arrived at once."""
    requests = [request(i, *lengths) for i, lengths in enumerate(SPREAD)]
    scheduler = scheduler_of(policy, *requests, max_num_seqs=4)
    ends = {}
    while scheduler.has_requests:
        serve(scheduler, 1)
        ends |= {r: scheduler.num_steps for r in requests if r.is_finished and r not in ends}
    return statistics.mean(ends.values())


def test_knowing_the_output_lowers_the_mean_latency_and_errors_cost_some_of_it():
    fcfs, oracle = mean_latency(ChunkedPrefill()), mean_latency(ShortestJobFirst("output"))
    noisy = [mean_latency(ShortestJobFirst("prediction", error)) for error in (0.0, 0.5, 2.0)]
    assert noisy[0] == oracle
    assert oracle < noisy[1] < noisy[2] < fcfs
    assert oracle < 0.75 * fcfs


@settings(max_examples=40)
@given(WORKLOADS)
def test_a_prediction_without_error_is_the_oracle(workload):
    tables = []
    for policy in (ShortestJobFirst("output"), ShortestJobFirst("prediction", error=0.0, seed=7)):
        scheduler = scheduler_of(policy, *filter(workload.fits, workload.requests()), **workload.limits)
        tables.append(table(serve(scheduler)))
    assert tables[0] == tables[1]


def test_predictions_are_lognormal_and_repeat():
    def errors(seed):
        policy = ShortestJobFirst("prediction", error=0.5, seed=seed)
        return [log(policy.rank(request(i, output=8)) / 8) for i in range(2000)]

    first, again, other = errors(0), errors(0), errors(1)
    assert first == again != other
    assert abs(statistics.mean(first)) < 0.05
    assert statistics.stdev(first) == pytest.approx(0.5, rel=0.05)
    assert abs(statistics.correlation(first, other)) < 0.1
    assert abs(statistics.correlation(first[1:], first[:-1])) < 0.1


@pytest.mark.parametrize("bad", [{"by": "size"}, {"error": -1.0}, {"error": float("nan")}, {"seed": 0.5}])
def test_bad_shortest_job_first(bad):
    with pytest.raises(InvalidRequestError, match=f"{next(iter(bad))} must be"):
        ShortestJobFirst(**bad)


# ---- priority ----------------------------------------------------------------------------------------------------


def two_seats(policy):
    """a and b of small importance sit; c, the most important, comes after a step."""
    scheduler = scheduler_of(policy, request("a", 1, 4, priority=2), request("b", 1, 3, priority=1), max_num_seqs=2)
    steps = serve(scheduler, 1)
    scheduler.add(request("c", 1, 2, priority=0))
    return table(steps + serve(scheduler))


def test_the_important_wait_for_a_seat():
    assert two_seats(Priority()) == ["b1 a1", "b1 a1", "b1 a1", "c1 a1", "c1"]


def test_the_important_take_a_seat():
    assert two_seats(Priority(preempt=True)) == ["b1 a1", "c1 b1 -a", "c1 b1", "a2", "a1", "a1"]


def test_the_important_take_no_more_pages_than_they_need():
    running = [request(name, 4, 3, priority=p) for name, p in (("a", 1), ("b", 3), ("c", 2))]
    scheduler = scheduler_of(Priority(preempt=True), *running, num_pages=6)
    serve(scheduler, 2)
    scheduler.add(request("d", 8, priority=0))
    [step] = serve(scheduler, 1)
    assert table([step]) == ["d8 a1 c1 -b"]


def test_nobody_is_thrown_out_in_vain():
    scheduler = scheduler_of(Priority(preempt=True), request("a", 12, 9), request("b", 4, 4, priority=5), num_pages=5)
    serve(scheduler, 1)
    scheduler.add(request("c", 8, priority=1))
    [step] = serve(scheduler, 1)
    assert table([step]) == ["a1"], "the page of b would not do for c"


def test_equals_do_not_take_from_each_other():
    scheduler = scheduler_of(Priority(preempt=True), request("a", 1, 3), max_num_seqs=1)
    serve(scheduler, 1)
    scheduler.add(request("b", 1, 1))
    assert table(serve(scheduler)) == ["a1", "a1", "b1"]
    scheduler = scheduler_of(Priority(preempt=True), request("late", 1, 3, at=1.0), max_num_seqs=1)
    serve(scheduler, 1)
    scheduler.add(request("early", 1, 1, at=0.0))
    assert table(serve(scheduler, 1)) == ["late1"]


def test_who_gave_way_is_not_admitted_again_in_the_same_step():
    """Pages of 4 tokens: b's one is not enough for the three of c, a's three are too many, and two are left over."""

    class NewestFirst(ChunkedPrefill):
        preempt = True

        def plan(self, waiting, running, budget):
            for r in [*waiting, *reversed(running)]:
                yield r, r.num_uncomputed_tokens

        def make_way(self, newcomer, running):
            return running

    scheduler = scheduler_of(NewestFirst(), request("a", 12, 2), request("b", 4, 2), num_pages=5)
    serve(scheduler, 1)
    scheduler.add(request("c", 9))
    assert table(serve(scheduler, 1)) == ["c9 -b -a"]


def test_who_was_served_before_the_newcomer_does_not_give_way():
    class Generous(ChunkedPrefill):
        def make_way(self, newcomer, running):
            return running

    assert grants(Generous(), (1, 2), (1, 1), max_num_seqs=1) == ["a1", "a1", "b1"]


def test_when_pages_run_out_the_least_important_goes():
    requests = [request(name, 4, 5, priority=p) for name, p in (("a", 1), ("b", 2), ("c", 0))]
    scheduler = scheduler_of(Priority(), *requests, num_pages=3)
    assert table(serve(scheduler, 2)) == ["c4 a4 b4", "c1 -b"]


def key(r):
    return r.priority, r.arrival_time, r.order


@pytest.mark.parametrize("preempt", [False, True])
@settings(max_examples=100)
@given(workload=WORKLOADS)
def test_no_inversion(preempt, workload):
    """Who is less important is not computed first, not admitted before, and not preempted for."""
    requests = list(filter(workload.fits, workload.requests()))
    scheduler = scheduler_of(Priority(preempt=preempt), *requests, **workload.limits)
    while scheduler.has_requests:
        [step] = serve(scheduler, 1)
        granted = [g.request for g in step.grants]
        assert all(key(a) < key(b) for a, b in pairwise(granted))
        left_waiting = [r for r in scheduler.waiting if r not in step.preempted]
        assert all(key(a) < key(w) for a in step.admitted for w in left_waiting)
        assert all(key(granted[0]) < key(out) for out in step.preempted)


@settings(max_examples=100)
@given(workload=WORKLOADS)
def test_with_preemption_nobody_more_important_waits_for_a_seat(workload):
    limits = workload.limits | {"num_pages": 200, "max_num_batched_tokens": 200}
    scheduler = scheduler_of(Priority(preempt=True), *workload.requests()[:2], **limits)
    later = workload.requests()[2:]
    while scheduler.has_requests or later:
        if later:
            scheduler.add(later.pop())
        scheduler.schedule()
        most_important = min((r.priority for r in scheduler.waiting), default=9)
        assert all(r.priority <= most_important for r in scheduler.running)
        serve(scheduler, 1)


# ---- the hooks ---------------------------------------------------------------------------------------------------


def test_a_ranked_policy_of_the_users_in_three_lines():
    class LongestPromptFirst(ChunkedPrefill):
        def rank(self, request):
            return -request.num_prompt_tokens

    assert grants(LongestPromptFirst(), (2, 1), (3, 1), (1, 1), max_num_seqs=1) == ["b3", "a2", "c1"]


def test_the_rank_is_asked_when_a_request_starts_to_wait_and_at_no_other_time():
    asked = []

    class Counting(ChunkedPrefill):
        def rank(self, request):
            asked.append((request.request_id, request.num_preemptions))
            return 0

    scheduler = scheduler_of(Counting(), request("a", 4, 5), request("b", 4, 5), num_pages=2)
    serve(scheduler)
    assert asked == [("a", 0), ("b", 0), ("b", 0)], "b is asked again before its preemption counts"


class Broken(Policy):
    """Answers one hook as told, and plans first come, first served."""

    def __init__(self, **answers):
        self.__dict__.update({name: lambda *_, answer=answer: answer for name, answer in answers.items()})

    def plan(self, waiting, running, budget):
        for r in [*running, *waiting]:
            yield r, r.num_uncomputed_tokens


@pytest.mark.parametrize("rank", [None, "first", float("nan"), (1, 2)])
def test_a_rank_is_a_number(rank):
    scheduler = scheduler_of(Broken(rank=rank))
    with pytest.raises(PolicyError, match=r"Broken.rank of request 'a' must be a number, got"):
        scheduler.add(request("a"))
    assert not scheduler.has_requests


@pytest.mark.parametrize("reserve", [None, -1, 1.5, True])
def test_a_reservation_is_a_number_of_tokens(reserve):
    with pytest.raises(PolicyError, match=r"Broken.reserve of request 'a' must be an integer ≥ 0, got"):
        scheduler_of(Broken(reserve=reserve), request("a"))


@pytest.mark.parametrize("victim", [None, "b", Request("b", [1])])
def test_a_victim_is_one_of_the_candidates(victim):
    scheduler = scheduler_of(Broken(choose_victim=victim), request("a", 4, 5), request("b", 4, 5), num_pages=2)
    serve(scheduler, 1)
    with pytest.raises(PolicyError, match=r"Broken.choose_victim returns must be one of the requests 'b', got"):
        scheduler.schedule()
    scheduler.policy = ChunkedPrefill()
    serve(scheduler)


def test_only_the_running_make_way():
    scheduler = scheduler_of(Broken(make_way=[Request("x", [1])]), request("a", 1, 3), request("b"), max_num_seqs=1)
    with pytest.raises(PolicyError, match=r"Broken.make_way named Request\('x', .* which does not run here"):
        scheduler.schedule()


def test_a_rank_that_fails_when_a_request_is_preempted_changes_nothing():
    class Moody(ChunkedPrefill):
        def rank(self, request):
            return 0 if request.status is RequestStatus.WAITING else None

    scheduler = scheduler_of(Moody(), request("a", 4, 5), request("b", 4, 5), num_pages=2)
    serve(scheduler, 1)
    with pytest.raises(PolicyError, match=r"Moody.rank of request 'b'"):
        scheduler.schedule()
    assert [r.status for r in scheduler.running] == [RequestStatus.RUNNING] * 2
    scheduler.policy = ChunkedPrefill()
    serve(scheduler)


def test_policies_show_what_is_not_the_default():
    shown = [ChunkedPrefill(), ShortestJobFirst("output", victim="fewest_tokens"), Priority(preempt=True), Broken()]
    assert list(map(repr, shown)) == [
        "ChunkedPrefill()",
        "ShortestJobFirst(victim='fewest_tokens', by='output')",
        "Priority(preempt=True)",
        "Broken()",
    ]
