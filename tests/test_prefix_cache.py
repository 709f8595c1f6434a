"""The prefix cache: what is found, what it costs, and every way in which others' caches have been wrong."""

import pytest
from fake_runner import scheduler_of, serve, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check
from random_workloads import POLICIES, SALTS, WORKLOADS

from contbatch.errors import InvalidRequestError
from contbatch.policies import ChunkedPrefill, ContinuousBatching, OneAtATime, Orca, Policy, StaticBatching
from contbatch.prefix_cache import PrefixCache
from contbatch.request import Request, RequestStatus
from contbatch.sampling_params import SamplingParams
from contbatch.scheduler import Scheduler


def ask(name, prompt, output=1, salt=None, at=0.0):
    sampling = SamplingParams(max_tokens=output)
    return Request(name, list(prompt), sampling, cache_salt=salt, arrival_time=at)


def caching(*requests, policy=None, **limits):
    """A scheduler with a prefix cache, pages of 4 tokens, that checks itself."""
    return scheduler_of(policy or ChunkedPrefill(), *requests, **{"prefix_cache": True, **limits})


def pages(pool):
    return pool.num_free, pool.num_cached, pool.num_live


def run_alone(scheduler, request):
    """Serve one request after all others; return how many of its tokens were cached."""
    serve(scheduler)
    scheduler.add(request)
    serve(scheduler)
    assert (request.output_token_ids, request.finish_reason) == solo(request)
    return request.num_cached_tokens


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


# ---- CASES 11, 13, 15, 16 ----------------------------------------------------------------------------------------


def test_a_recycled_page_is_not_found_under_its_old_content():
    scheduler = caching(ask("a", [1] * 9), num_pages=3)
    assert run_alone(scheduler, ask("b", [2] * 9)) == 0
    assert scheduler.pool.num_evictions == 2, "b has the pages of a"
    assert run_alone(scheduler, ask("a again", [1] * 9)) == 0


def test_the_prefix_used_least_recently_is_evicted_first_and_from_its_end():
    scheduler = caching(ask("a", [1] * 8), num_pages=4)
    run_alone(scheduler, ask("b", [2] * 8))
    run_alone(scheduler, ask("a again", [1] * 9))
    assert run_alone(scheduler, ask("c", [3] * 3)) == 0
    assert scheduler.pool.num_evictions == 1
    assert [len(scheduler.prefix_cache.find(ask(0, [t] * 9))) for t in (1, 2)] == [2, 1]


@pytest.mark.parametrize("prompt", [8, 9])
@pytest.mark.parametrize("budget", [3, 64])
def test_identical_prompts_of_one_step_never_read_pages_not_yet_written(prompt, budget):
    """Each computes its own, then they share. The runner's markers would show a page read before it is written."""
    requests = [ask(name, [1] * prompt, 6) for name in "abc"]
    scheduler = caching(*requests, max_num_batched_tokens=budget)
    [step] = serve(scheduler, 1)
    assert step.num_cached_tokens == 0
    serve(scheduler, 12)
    if budget == 64:
        assert [r.num_cached_tokens for r in requests] == [0, 0, 0]
    serve(scheduler)
    assert all((r.output_token_ids, r.finish_reason) == solo(r) for r in requests)


def test_those_who_computed_the_same_side_by_side_share_it_from_then_on():
    a, b = requests = [ask(name, [1] * 9, 6) for name in "ab"]
    scheduler = caching(*requests)
    serve(scheduler, 1)
    assert a.pages[:2] == b.pages[:2]
    assert a.pages[2] != b.pages[2]
    assert scheduler.pool.num_live == 4
    serve(scheduler)


def test_a_shared_prefix_is_never_evicted_under_a_request_that_decodes_on_it():
    """The other tenants fill the pool and leave; the pages of the one who decodes stay."""
    a = ask("a", range(8), 20)
    scheduler = caching(ask("first", range(8)), num_pages=9)
    serve(scheduler)
    scheduler.add(a)
    serve(scheduler, 2)
    held = list(a.pages[:2])
    for i in range(4):
        scheduler.add(ask(f"tenant {i}", [i] * 13))
        serve(scheduler, 2)
        assert a.pages[:2] == held
    assert scheduler.pool.num_evictions > 0
    serve(scheduler)
    assert (a.output_token_ids, a.num_preemptions) == (solo(a)[0], 0)


def test_who_leaves_drops_one_reference_only():
    a, b = ask("a", range(8), 9), ask("b", [*range(8), 1], 3)
    scheduler = caching(a)
    serve(scheduler, 1)
    scheduler.add(b)
    serve(scheduler, 1)
    counts = scheduler.pool._counts
    assert [counts[page] for page in a.pages[:2]] == [2, 2]
    scheduler.abort("b")
    assert [counts[page] for page in a.pages[:2]] == [1, 1]
    serve(scheduler)


def test_free_cached_and_live_make_the_whole_in_every_step_of_a_request_in_chunks():
    scheduler = caching(a := ask("a", range(10), 4), max_num_batched_tokens=4, num_pages=6)
    states = []
    while scheduler.has_requests:
        scheduler.schedule()
        serve(scheduler, 1)
        states.append(pages(scheduler.pool))
        assert sum(states[-1]) == 6
    assert states == [(5, 0, 1), (4, 0, 2), (3, 0, 3), (3, 0, 3), (3, 0, 3), (3, 3, 0)]
    scheduler.abort("a")
    assert (pages(scheduler.pool), a.pages) == ((3, 3, 0), [])


# ---- CASES 17 and 18: collisions, and kinds of key ---------------------------------------------------------------


@pytest.mark.parametrize("hash_page", [lambda key: 0, lambda key: hash(key) % 3], ids=["constant", "three values"])
@settings(max_examples=60)
@given(WORKLOADS, POLICIES)
def test_a_collision_is_a_miss(hash_page, workload, policy):
    scheduler = caching(policy=policy, **{**workload.limits, "prefix_cache": True})
    scheduler.prefix_cache = PrefixCache(scheduler.pool, hash_page=hash_page)
    for request in filter(workload.fits, workload.requests()):
        scheduler.add(request)
    serve(scheduler, max_steps=20 + 8 * workload.num_tokens)
    assert all((r.output_token_ids, r.finish_reason) == solo(r) for r in scheduler.ended)


def test_other_tokens_other_prefix_and_other_salt_of_equal_hash_are_misses():
    scheduler = caching(page_size=2)
    scheduler.prefix_cache = PrefixCache(scheduler.pool, hash_page=lambda key: 0)
    assert run_alone(scheduler, ask("a", [1, 1])) == 0
    assert run_alone(scheduler, ask("a again", [1, 1, 5])) == 2, "a constant hash still finds what it was given last"
    for name, prompt, salt in (
        ("tokens", [2, 2, 5], None),
        ("prefix", [3, 3, 1, 1, 5], None),
        ("salt", [1, 1, 5], "x"),
    ):
        assert len(scheduler.prefix_cache.find(ask(name, prompt, salt=salt))) == 0, name


KINDS = st.one_of(st.none(), st.sampled_from(["", "None", "0", "salt", "a", "('salt', None)"]), st.text(max_size=2))


@given(KINDS, KINDS)
def test_only_equal_salts_share(one, other):
    scheduler = caching(ask("first", range(9), salt=one))
    assert run_alone(scheduler, ask("second", range(9), salt=other)) == (8 if one == other else 0)


@pytest.mark.parametrize("bad", [1, b"a", ["a"], True])
def test_a_salt_is_a_string(bad):
    with pytest.raises(InvalidRequestError, match="cache_salt of request 'a' must be a string or None"):
        ask("a", [1], salt=bad)


# ---- what others of this project do to it ------------------------------------------------------------------------


def test_a_padded_row_never_writes_a_page_that_others_read():
    """The last token of "short" fills a page and is computed again while "late", which begins alike, joins."""
    short, long, late = ask("short", range(8)), ask("long", [6], 6), ask("late", range(9))
    scheduler = caching(long, short, late, policy=StaticBatching(3, pad=True), max_num_batched_tokens=9)
    serve(scheduler)
    assert (late.output_token_ids, late.finish_reason) == solo(late)


def test_pages_of_a_request_that_failed_are_not_trusted():
    scheduler = caching(ask("bad", range(9), 3))
    scheduler.runner.poison["bad"] = 1
    assert run_alone(scheduler, ask("good", range(9))) == 0
    assert run_alone(scheduler, ask("better", range(9))) == 8


def test_a_failing_request_takes_no_page_from_those_who_share_with_it():
    good, bad = ask("good", range(9), 6), ask("bad", range(9), 6)
    scheduler = caching(good)
    serve(scheduler, 1)
    scheduler.add(bad)
    scheduler.runner.poison["bad"] = 2
    serve(scheduler)
    assert (good.output_token_ids, bad.finish_reason) == (solo(good)[0], "error")
    assert run_alone(scheduler, ask("next", range(9))) == 8, "the good one vouched for them when it left"


def test_an_abandoned_plan_publishes_nothing():
    scheduler = caching(ask("a", range(9), 3))
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.prefix_cache.find(ask("b", range(9))) == []
    scheduler.runner.crash = {0}
    with pytest.raises(RuntimeError, match="crashed"):
        serve(scheduler, 1)
    assert scheduler.prefix_cache.find(ask("b", range(9))) == []
    check(scheduler)
    serve(scheduler)


def test_the_runner_sees_a_wrong_hit():
    """The oracle itself: a page of equal tokens after another prefix, or of another salt, is an error."""
    for first, second in (([1, 1, 2, 2, 0], [3, 3, 2, 2, 0]), ([1, 1, 2, 2, 0], [1, 1, 2, 3, 0])):
        scheduler = caching(ask("a", first, 3), page_size=2)
        serve(scheduler, 1)
        b, a = ask("b", second, 2), scheduler.requests["a"]
        scheduler.prefix_cache.find = lambda request, a=a: a.pages[:2] if request.request_id == "b" else []
        scheduler.add(b)
        step = Scheduler.schedule(scheduler)
        with pytest.raises(AssertionError, match="finds"):
            scheduler.runner.execute(step)
