import pytest
from fake_runner import FakeRunner, drive
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import CheckedScheduler
from random_workloads import READY, WORKLOADS

from contbatch.errors import InvalidRequestError
from contbatch.policies import ChunkedPrefill, ContinuousBatching, OneAtATime, Orca, Policy, StaticBatching
from contbatch.request import Request, RequestStatus, SamplingParams

PAGES, SIZE = 64, 4


def serve(policy, *requests, **limits):
    """Serve requests, given as (prompt length, max_tokens) and named a, b, …; return what each step granted them."""
    scheduler = CheckedScheduler(policy, **{"num_pages": PAGES, "page_size": SIZE, **limits})
    for name, (prompt, output) in zip("abcdefgh", requests, strict=False):
        scheduler.add(Request(name, [1] * prompt, SamplingParams(max_tokens=output)))
    steps = drive(scheduler, FakeRunner(scheduler.pool.num_pages, SIZE))
    return [" ".join(f"{g.request.request_id}{g.num_tokens}{'*' * g.padding}" for g in s.grants) for s in steps]


def test_prompts_go_first_and_may_stall_decodes():
    assert serve(ContinuousBatching(), (4, 4), (10, 2), max_num_batched_tokens=6) == ["a4 b2", "b6", "b2 a1", "a1 b1", "a1"]


def test_decodes_go_first_and_never_stall():
    assert serve(ChunkedPrefill(), (4, 4), (10, 2), max_num_batched_tokens=6) == ["a4 b2", "a1 b5", "a1 b3", "a1 b1"]


def test_one_at_a_time():
    assert serve(OneAtATime(), (4, 2), (5, 1), (1, 2), max_num_batched_tokens=4) == ["a4", "a1", "b4", "b1", "c1", "c1"]


def test_a_seat_is_refilled_in_the_very_next_step():
    assert serve(ContinuousBatching(), (1, 3), (1, 1), (1, 1), max_num_seqs=2) == ["a1 b1", "c1 a1", "a1"]


def test_a_static_batch_leaves_together():
    assert serve(StaticBatching(2), (1, 3), (1, 1), (1, 1)) == ["a1 b1", "a1", "a1", "c1"]


def test_padding_computes_the_finished_rows_too():
    assert serve(StaticBatching(3, pad=True), (2, 4), (1, 1), (1, 2)) == ["a2 b1 c1", "a1 b1* c1", "a1 b1* c1*", "a1 b1* c1*"]


def test_the_last_of_a_static_batch_join_late_when_the_budget_is_too_small_for_all_prompts():
    assert serve(StaticBatching(2), (6, 3), (4, 1), (1, 1), max_num_batched_tokens=4) == ["a4", "a2 b2", "a1 b2", "a1", "c1"]


def test_a_static_batch_is_smaller_when_seats_or_pages_do_not_suffice():
    assert serve(StaticBatching(3), (1, 2), (1, 1), (1, 1), max_num_seqs=2) == ["a1 b1", "a1", "c1"]
    assert serve(StaticBatching(3), (1, 2), (1, 4), (1, 1), num_pages=2) == ["a1 b1", "a1 b1", "b1", "b1", "c1"]


def test_every_seat_of_a_static_batch_reserves_the_pages_of_the_longest():
    scheduler = CheckedScheduler(StaticBatching(3), num_pages=PAGES, page_size=SIZE)
    requests = [Request(i, [1], SamplingParams(max_tokens=n)) for i, n in enumerate((1, 20, 5))]
    for r in requests:
        scheduler.add(r)
    scheduler.schedule()
    assert [len(r.pages) for r in requests] == [5, 5, 5], "1 + 20 - 1 tokens in pages of 4"


def test_orca_reserves_prompt_and_max_tokens_at_admission():
    scheduler = CheckedScheduler(Orca(), num_pages=5, page_size=SIZE)
    first, second = (Request(i, [1, 2], SamplingParams(max_tokens=11)) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    assert len(first.pages) == 3
    assert second.status is RequestStatus.WAITING, "3 + 3 pages do not fit, though 1 + 1 would"


def test_continuous_batching_admits_a_prompt_only_with_pages_for_all_of_it():
    """Two short requests and a chunked prompt used to take each other's pages for ever."""
    scheduler = CheckedScheduler(ContinuousBatching(), num_pages=6, page_size=2, max_num_batched_tokens=2)
    for i, (prompt, output) in enumerate([(1, 9), (1, 5), (7, 6)]):
        scheduler.add(Request(i, [0] * prompt, SamplingParams(max_tokens=output)))
    steps = drive(scheduler, FakeRunner(6, 2), max_steps=40)
    assert sum(len(s.preempted) for s in steps) <= 2


@pytest.mark.parametrize("policy", READY, ids=repr)
@settings(max_examples=15)
@given(WORKLOADS, st.data())
def test_nobody_overtakes_who_came_before(policy, workload, data):
    """Ready policies are first come, first served: whoever is admitted leaves nobody waiting before it."""
    scheduler = CheckedScheduler(policy, **workload.limits)
    requests = [r for r in workload.requests() if workload.fits(r)]
    for r in data.draw(st.permutations(requests)):
        scheduler.add(r)
    runner = FakeRunner(workload.limits["num_pages"], workload.limits["page_size"])
    while scheduler.has_requests:
        queue = list(scheduler.waiting)
        step = scheduler.schedule()
        assert step.admitted == queue[: len(step.admitted)]
        scheduler.update(step, runner.execute(step).tokens)


@pytest.mark.parametrize("flood", [(4, 1), (4, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("policy", READY, ids=repr)
def test_a_flood_of_later_requests_does_not_starve_the_first(policy, flood):
    """A stream of newcomers used to take, step after step, the page that a running request waited for."""

    def steps_until_first_ends(num_later):
        scheduler = CheckedScheduler(policy, num_pages=3, page_size=SIZE, max_num_seqs=4)
        first = Request("first", [1] * 4, SamplingParams(max_tokens=9))
        later = [Request(i, [2] * flood[0], SamplingParams(max_tokens=flood[1])) for i in range(num_later)]
        for r in [first, *later]:
            scheduler.add(r)
        runner = FakeRunner(3, SIZE)
        while not first.is_finished:
            step = scheduler.schedule()
            scheduler.update(step, runner.execute(step).tokens)
        return scheduler.num_steps

    assert steps_until_first_ends(100) == steps_until_first_ends(10) <= 12


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
    schedulers = [CheckedScheduler(policy, num_pages=8, page_size=SIZE) for _ in range(2)]
    for scheduler in schedulers:
        scheduler.add(Request(0, [1], SamplingParams(max_tokens=3)))
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

    assert serve(ShortestPromptFirst(), (5, 2), (3, 1), (4, 1), max_num_batched_tokens=7) == ["b3 c4", "a5", "a1"]
