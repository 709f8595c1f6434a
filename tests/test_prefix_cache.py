"""The prefix cache: what is found, and what it costs."""

import pytest
from cached_prefixes import ask, caching, pages, run_alone
from fake_runner import serve, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import POLICIES, SALTS, WORKLOADS

from contbatch.errors import InvalidRequestError
from contbatch.policies import ChunkedPrefill, ContinuousBatching, OneAtATime, Orca, Policy, StaticBatching
from contbatch.request import Request, RequestStatus
from contbatch.sampling_params import SamplingParams
from contbatch.scheduler import Scheduler

# ---- what is found -----------------------------------------------------------------------------------------------


def test_who_comes_later_finds_the_full_pages_of_a_common_prefix():
    scheduler = caching(ask("first", range(10)))
    assert run_alone(scheduler, ask("same", range(10))) == 8
    assert run_alone(scheduler, ask("longer", range(14))) == 8
    assert run_alone(scheduler, ask("longer again", range(14))) == 12
    assert run_alone(scheduler, ask("branches off", [*range(4), 9, 9, 9, 9, 9])) == 4
    assert run_alone(scheduler, ask("differs early", [9, *range(1, 10)])) == 0
    assert run_alone(scheduler, ask("same page after another prefix", [9, 9, 9, 9, *range(4, 10)])) == 0


@pytest.mark.parametrize(("prompt", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_prompt_token_is_always_computed(prompt, found):
    scheduler = caching(ask("long", [1] * 20))
    serve(scheduler)
    scheduler.add(again := ask("again", [1] * prompt))
    [step] = serve(scheduler, 1)
    assert (again.num_cached_tokens, step.num_cached_tokens, step.num_tokens) == (found, found, prompt - found)


def test_hits_are_shared_with_the_living_and_need_no_page():
    scheduler = caching(ask("a", range(8), 9), num_pages=5)
    serve(scheduler, 1)
    scheduler.add(b := ask("b", [*range(8), 6], 3))
    serve(scheduler, 1)
    assert scheduler.requests["a"].pages[:2] == b.pages[:2]
    assert pages(scheduler.pool) == (1, 0, 4)
    serve(scheduler)


def test_pages_of_generated_tokens_are_published_too():
    first = ask("first", range(6), 9)
    scheduler = caching(first)
    serve(scheduler)
    talk = [*range(6), *first.output_token_ids]
    assert run_alone(scheduler, ask("next turn", [*talk, 1, 2])) == 12, "14 tokens computed, 3 pages full"


def test_a_preempted_request_finds_its_own_pages():
    a, b = ask("a", [1] * 8, 8), ask("b", [2] * 8, 6)
    scheduler = caching(a, b, num_pages=6)
    steps = serve(scheduler)
    again = [step for step in steps if b in step.admitted]
    assert b.num_preemptions == len(again) - 1 == 1
    assert again[1].num_cached_tokens == 8
    assert [r.num_cached_tokens for r in (a, b)] == [0, 0], "of prompts at first admission only"
    assert scheduler.prefix_cache.hit_rate == 0.0


def test_the_cache_is_off_unless_asked_for():
    scheduler = caching(ask("first", range(10)), prefix_cache=False)
    assert run_alone(scheduler, ask("same", range(10))) == 0
    assert scheduler.pool.num_cached == 0
    with pytest.raises(InvalidRequestError, match="prefix_cache must be True or False, got 1"):
        Scheduler(ChunkedPrefill(), num_pages=4, prefix_cache=1)


def test_a_request_of_mere_length_neither_hits_nor_publishes():
    scheduler = Scheduler(ChunkedPrefill(), num_pages=8, page_size=4, prefix_cache=True)
    for name in ("a", "b"):
        scheduler.add(Request(name, num_prompt_tokens=9, sampling=SamplingParams(max_tokens=2)))
    while scheduler.has_requests:
        step = scheduler.schedule()
        scheduler.update(step, {g.request.request_id: 1 for g in step.grants})
        assert scheduler.prefix_cache.find(ask("c", [1] * 9)) == []
    assert pages(scheduler.pool) == (8, 0, 0)


def test_counters():
    scheduler = caching(ask("first", range(10)))
    assert scheduler.prefix_cache.hit_rate != scheduler.prefix_cache.hit_rate, "NaN before any"
    run_alone(scheduler, ask("same", range(10)))
    cache = scheduler.prefix_cache
    assert (cache.num_prompt_tokens, cache.num_cached_tokens, cache.hit_rate) == (20, 8, 8 / 20)
    assert scheduler.pool.num_evictions == 0


ONE_BY_ONE = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 6), SALTS), min_size=1, max_size=8
)


@settings(max_examples=200)
@given(ONE_BY_ONE, st.integers(1, 5))
def test_with_room_for_all_a_hit_is_the_longest_prefix_anybody_has_computed(specs, page_size):
    scheduler, computed = caching(policy=OneAtATime(), num_pages=200, page_size=page_size), []
    for name, (prompt, output, salt) in enumerate(specs):
        expected = 0
        for other_salt, tokens in computed:
            common = 0
            while common < min(len(tokens), len(prompt) - 1) and tokens[common] == prompt[common]:
                common += 1
            if salt == other_salt:
                expected = max(expected, common // page_size * page_size)
        request = ask(name, prompt, output, salt)
        assert run_alone(scheduler, request) == expected
        computed.append((salt, [*prompt, *request.output_token_ids[:-1]]))
    distinct = {
        (salt, tuple(tokens[:stop]))
        for salt, tokens in computed
        for stop in range(page_size, len(tokens) + 1, page_size)
    }
    assert pages(scheduler.pool) == (200 - len(distinct), len(distinct), 0), "each distinct page is kept once"


@settings(max_examples=200)
@given(WORKLOADS, POLICIES)
def test_no_prefix_is_kept_without_its_beginning(workload, policy):
    scheduler = caching(policy=policy, **{**workload.limits, "prefix_cache": True})
    for request in filter(workload.fits, workload.requests()):
        scheduler.add(request)
    cache = scheduler.prefix_cache
    while scheduler.has_requests:
        serve(scheduler, 1)
        for entry in cache._by_page.values():
            assert not hasattr(entry.parent, "page") or cache._by_page[entry.parent.page] is entry.parent


# ---- what it costs: CASES 12 and 14 ------------------------------------------------------------------------------


def test_a_hit_on_cached_pages_is_charged_to_the_pool():
    """1 free page, 2 cached: who hits the 2 and needs 1 may come in; who hits them and needs 2 may not."""
    scheduler = caching(ask("first", range(8)), ask("other", [6], 5), num_pages=4)
    serve(scheduler, 1)
    assert pages(scheduler.pool) == (1, 2, 1)
    scheduler.add(big := ask("big", [*range(8), *range(5)]))
    serve(scheduler, 1)
    assert big.status is RequestStatus.WAITING, "2 cached pages hit + 2 new > 3 available"
    assert pages(scheduler.pool) == (1, 2, 1), "and asking took nothing"
    scheduler.abort("big")
    scheduler.add(fits := ask("fits", [*range(8), 5]))
    [step] = serve(scheduler, 1)
    assert step.admitted == [fits]
    assert (fits.num_cached_tokens, step.num_evictions) == (8, 0)
    serve(scheduler)


def test_a_hit_on_live_pages_is_charged_once():
    scheduler = caching(ask("a", range(8), 5), num_pages=4)
    serve(scheduler, 1)
    scheduler.add(b := ask("b", [*range(8), 6]))
    [step] = serve(scheduler, 1)
    assert step.admitted == [b]
    assert pages(scheduler.pool) == (0, 2, 2) or pages(scheduler.pool)[2] == 3


def test_hit_pages_are_not_evicted_to_make_room_for_their_own_request():
    scheduler = caching(ask("first", range(8)), num_pages=4)
    serve(scheduler)
    assert run_alone(scheduler, ask("long", [*range(8), *range(7)])) == 8
    assert scheduler.pool.num_evictions == 0


def test_hits_are_looked_up_afresh_after_a_failed_admission():
    """A hit counted while a request could not come in is gone when it can: it must not be used."""
    scheduler = caching(ask("first", range(8)), ask("other", [6] * 3, 10), num_pages=4)
    serve(scheduler, 1)
    scheduler.add(big := ask("big", [*range(8), *range(5)]))
    serve(scheduler, 1)
    assert big.status is RequestStatus.WAITING
    assert len(scheduler.prefix_cache.find(big)) == 2
    serve(scheduler)
    assert scheduler.pool.num_evictions >= 1
    assert big.num_cached_tokens < 8
    assert (big.output_token_ids, big.finish_reason) == solo(big)


@pytest.mark.parametrize("policy", [ChunkedPrefill(), ContinuousBatching(), Orca(), OneAtATime(), StaticBatching(3)])
def test_the_budget_holds_after_a_partial_hit_and_hit_tokens_are_free(policy):
    """CASES 6."""
    scheduler = caching(ask("first", range(12)), policy=policy, max_num_batched_tokens=16)
    serve(scheduler)
    for i in range(3):
        scheduler.add(ask(i, [*range(12), *[i] * 9]))
    steps = serve(scheduler)
    assert max(step.num_tokens for step in steps) <= 16
    assert sum(step.num_tokens for step in steps) == 3 * 9
    assert sum(step.num_cached_tokens for step in steps) == 3 * 12


def test_what_a_plan_wants_comes_on_top_of_the_hit():
    class Chunks(Policy):
        def plan(self, waiting, running, budget):
            yield from ((r, min(3, r.num_uncomputed_tokens)) for r in [*running, *waiting])

    scheduler = caching(ask("first", range(9)), policy=Chunks())
    serve(scheduler)
    scheduler.add(ask("same", [*range(9), 0, 0]))
    assert [(s.grants[0].start, s.num_tokens) for s in serve(scheduler)] == [(8, 3)]
