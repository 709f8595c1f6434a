"""Every way in which the prefix caches of others have been wrong: stale, unwritten, shared and colliding pages."""

import pytest
from cached_prefixes import ask, caching, pages, run_alone
from fake_runner import serve, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check
from random_workloads import POLICIES, WORKLOADS

from contbatch.errors import InvalidRequestError
from contbatch.policies import StaticBatching
from contbatch.prefix_cache import PrefixCache
from contbatch.scheduler import Scheduler

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
    holders = scheduler.pool.num_holders
    assert [holders(page) for page in a.pages[:2]] == [2, 2]
    scheduler.abort("b")
    assert [holders(page) for page in a.pages[:2]] == [1, 1]
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
