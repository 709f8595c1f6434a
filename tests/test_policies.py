import inspect

import pytest
from fake_runner import request, scheduler_of, serve, table
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import FIRST_COME_FIRST_SERVED, READY, WORKLOADS

from contbatch.errors import InvalidRequestError
from contbatch.policies import ChunkedPrefill, ContinuousBatching, OneAtATime, Orca, Policy, StaticBatching


def grants(policy, *requests, **limits):
    """Serve requests, given as (prompt length, max_tokens) and named a, b, …; return what each step granted them."""
    named = [request(name, *lengths) for name, lengths in zip("abcdefgh", requests, strict=False)]
    return table(serve(scheduler_of(policy, *named, **limits)))


def test_prompts_go_first_and_may_stall_decodes():
    assert grants(ContinuousBatching(), (4, 4), (10, 2), max_num_batched_tokens=6) == [
        "a4 b2",
        "b6",
        "b2 a1",
        "a1 b1",
        "a1",
    ]


def test_decodes_go_first_and_never_stall():
    assert grants(ChunkedPrefill(), (4, 4), (10, 2), max_num_batched_tokens=6) == ["a4 b2", "a1 b5", "a1 b3", "a1 b1"]


def test_one_at_a_time():
    assert grants(OneAtATime(), (4, 2), (5, 1), (1, 2), max_num_batched_tokens=4) == [
        "a4",
        "a1",
        "b4",
        "b1",
        "c1",
        "c1",
    ]


def test_a_seat_is_refilled_in_the_very_next_step():
    assert grants(ContinuousBatching(), (1, 3), (1, 1), (1, 1), max_num_seqs=2) == ["a1 b1", "c1 a1", "a1"]


def test_a_static_batch_leaves_together():
    assert grants(StaticBatching(2), (1, 3), (1, 1), (1, 1)) == ["a1 b1", "a1", "a1", "c1"]


def test_padding_computes_the_finished_rows_too():
    assert grants(StaticBatching(3, pad=True), (2, 4), (1, 1), (1, 2)) == [
        "a2 b1 c1",
        "a1 b1* c1",
        "a1 b1* c1*",
        "a1 b1* c1*",
    ]


def test_the_last_of_a_static_batch_join_late_when_the_budget_is_too_small_for_all_prompts():
    assert grants(StaticBatching(2), (6, 3), (4, 1), (1, 1), max_num_batched_tokens=4) == [
        "a4",
        "a2 b2",
        "a1 b2",
        "a1",
        "c1",
    ]


def test_a_static_batch_is_smaller_when_seats_or_pages_do_not_suffice():
    assert grants(StaticBatching(3), (1, 2), (1, 1), (1, 1), max_num_seqs=2) == ["a1 b1", "a1", "c1"]
    assert grants(StaticBatching(3), (1, 2), (1, 4), (1, 1), num_pages=2) == ["a1 b1", "a1 b1", "b1", "b1", "c1"]


def test_every_seat_of_a_static_batch_reserves_the_pages_of_the_longest():
    scheduler = scheduler_of(StaticBatching(3), *(request(i, 1, n) for i, n in enumerate((1, 20, 5))))
    scheduler.schedule()
    assert [len(r.pages) for r in scheduler.running] == [5, 5, 5], "1 + 20 - 1 tokens in pages of 4"


def test_orca_reserves_prompt_and_max_tokens_at_admission():
    scheduler = scheduler_of(Orca(), request("a", 2, 11), request("b", 2, 11), num_pages=5)
    scheduler.schedule()
    [a] = scheduler.running
    assert len(a.pages) == 3, "nor does b get on, since 3 + 3 pages do not fit, though 1 + 1 would"


def test_continuous_batching_admits_a_prompt_only_with_pages_for_all_of_it():
    """Two short requests and a chunked prompt used to take each other's pages for ever."""
    requests = [request("a", 1, 9), request("b", 1, 5), request("c", 7, 6)]
    scheduler = scheduler_of(ContinuousBatching(), *requests, num_pages=6, page_size=2, max_num_batched_tokens=2)
    steps = serve(scheduler, max_steps=40)
    assert sum(len(s.preempted) for s in steps) <= 2


@pytest.mark.parametrize("policy", FIRST_COME_FIRST_SERVED, ids=repr)
@settings(max_examples=15)
@given(WORKLOADS, st.data())
def test_nobody_overtakes_who_came_before(policy, workload, data):
    """Ready policies are first come, first served: whoever is admitted leaves nobody waiting before it."""
    requests = [r for r in workload.requests() if workload.fits(r)]
    scheduler = scheduler_of(policy, *data.draw(st.permutations(requests)), **workload.limits)
    while scheduler.has_requests:
        queue = list(scheduler.waiting)
        [step] = serve(scheduler, 1)
        assert step.admitted == queue[: len(step.admitted)]


@pytest.mark.parametrize("flood", [(4, 1), (4, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("policy", FIRST_COME_FIRST_SERVED, ids=repr)
def test_a_flood_of_later_requests_does_not_starve_the_first(policy, flood):
    """A stream of newcomers used to take, step after step, the page that a running request waited for."""

    def steps_until_first_ends(num_later):
        first, later = request("first", 4, 9), [request(i, *flood) for i in range(num_later)]
        scheduler = scheduler_of(policy, first, *later, num_pages=3, max_num_seqs=4)
        while not first.is_finished:
            serve(scheduler, 1)
        return scheduler.num_steps

    assert steps_until_first_ends(100) == steps_until_first_ends(10) <= 12


@pytest.mark.parametrize("policy", sorted({type(p) for p in READY}, key=repr), ids=lambda policy: policy.__name__)
def test_a_policy_is_short_enough_to_be_read_beside_its_paper(policy):
    assert len(inspect.getsource(policy).splitlines()) < 40


def test_a_policy_must_define_plan():
    class Nothing(Policy):
        pass

    with pytest.raises(NotImplementedError, match=r"Nothing must define plan"):
        next(iter(Nothing().plan([], [], 1)))


@pytest.mark.parametrize(
    "bad", [{"batch_size": 0}, {"batch_size": 2.0}, {"batch_size": True}, {"release": "later"}, {"release": None}]
)
def test_bad_static_batching(bad):
    with pytest.raises(InvalidRequestError, match=f"{next(iter(bad))}.*{next(iter(bad.values()))}"):
        StaticBatching(**bad)


def test_policies_are_values_and_every_scheduler_has_its_own_copy():
    policy = StaticBatching(2)
    schedulers = [scheduler_of(policy, request(0, 1, 3)) for _ in range(2)]
    for scheduler in schedulers:
        scheduler.schedule()
    assert schedulers[0].policy == schedulers[1].policy == policy == StaticBatching(2) != StaticBatching(3)
    assert schedulers[0].policy._batch != schedulers[1].policy._batch
    assert policy._batch == []
    assert repr(policy) == "StaticBatching(batch_size=2, release='batch', pad=False)"


def test_a_policy_of_the_users_in_five_lines():
    class ShortestPromptFirst(Policy):
        def plan(self, waiting, running, budget):
            yield from ((r, r.num_uncomputed_tokens) for r in running)
            for r in sorted(waiting, key=lambda r: r.num_prompt_tokens):
                yield r, min(r.num_uncomputed_tokens, 256)

    assert grants(ShortestPromptFirst(), (5, 2), (3, 1), (4, 1), max_num_batched_tokens=7) == ["b3 c4", "a5", "a1"]
