"""Pages without ids: counted as those with ids are, and nothing of a simulation but the ids is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import READY

import contbatch as cb
from contbatch.counted_pages import CountedPool
from contbatch.errors import PagePoolError
from contbatch.fast_forward import FastForward
from contbatch.lengths import Uniform
from contbatch.pages import PagePool
from contbatch.simulation import simulated_engine

COUNTS = ("num_free", "num_available", "num_live", "num_cached", "num_evictions", "cached_pages")
GPU = cb.Simulated(cost=cb.Linear(step_s=0.4, token_s=0.03, decode_context_s=7e-4, swapped_token_s=0.1), kv_tokens=400)


@given(
    st.integers(1, 9), st.lists(st.tuples(st.sampled_from(["take", "grow", "give back", "promise"]), st.integers(0, 9)))
)
def test_it_counts_as_a_pool_with_ids_does(num_pages, deeds):
    pools, tables = (PagePool(num_pages, 4), CountedPool(num_pages, 4)), ([], [])
    for deed, number in deeds:
        done = [_do(pool, table, deed, number) for pool, table in zip(pools, tables, strict=True)]
        assert done[0] == done[1]
        assert len({tuple(getattr(pool, name) for name in COUNTS) for pool in pools}) == 1
        assert [pool.can_take(number) for pool in pools] == [pools[0].num_available >= number] * 2
        pools[1].check()


def _do(pool, table, deed, number):
    """Do something to a pool and the page tables of its requests; return what came of it."""
    if deed == "take":
        try:
            table.append(pool.take(number))
        except PagePoolError:
            return "too many"
        return len(table[-1])
    if deed == "grow" and table:
        return pool.grow(table[number % len(table)], number), len(table[number % len(table)])
    if deed == "give back" and table:
        pages = table.pop(number % len(table))
        assert pool.count_exclusive(iter(pages)) == len(pages)
        pool.give_back(iter(pages))
    if deed == "promise":
        pool.num_promised = min(number, pool.num_free + pool.num_promised)
    return None


def test_what_needs_ids_is_refused_and_changes_nothing():
    pool = CountedPool(3, 4)
    pages = pool.take(2)
    with pytest.raises(PagePoolError, match="2 pages asked for, 1 of 3 free"):
        pool.take(2)
    with pytest.raises(PagePoolError, match="3 pages given back, 2 of 3 taken"):
        pool.give_back([*pages, *pages[:1]])
    for call in (pool.keep, pool.num_holders, lambda page: pool.share([page])):
        with pytest.raises(PagePoolError, match="has no id"):
            call(pages[0])
    assert (pool.num_free, pool.num_live) == (1, 2)
    pool.num_promised = 2
    with pytest.raises(PagePoolError, match="accounting"):
        pool.check()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(READY), st.integers(0, 99), st.integers(9, 40), st.sampled_from([0, 6]), st.integers(8, 60))
def test_a_simulation_comes_out_as_with_ids(policy, seed, num_pages, num_host_pages, budget):
    load = cb.Poisson(rate=0.7, num_requests=12, prompt=Uniform(1, 40), output=Uniform(1, 30), seed=seed)
    limits = {"num_pages": num_pages, "page_size": 8, "max_num_seqs": 5, "max_num_batched_tokens": budget}
    limits["num_host_pages"] = num_host_pages
    counted = cb.simulate(load, policy, GPU, **limits)
    stepwise = cb.simulate(load, policy, GPU, fast_forward=False, **limits)
    for name in ("requests", "steps", "segments"):
        assert getattr(counted, name).equals(getattr(stepwise, name)), name
    assert counted.token_s == stepwise.token_s


@pytest.mark.parametrize(
    ("options", "is_counted"),
    [
        ({}, True),
        ({"log": cb.DecisionLog()}, False),
        ({"prefix_cache": True}, False),
        ({"layout": "contiguous"}, False),
        ({"skip_with": None}, False),
        ({"single_samples": False}, False),
    ],
)
def test_pages_have_ids_where_somebody_sees_them(options, is_counted):
    scheduler = simulated_engine(backend=GPU, **{"skip_with": FastForward, "single_samples": True} | options).scheduler
    assert isinstance(scheduler.pool, CountedPool) == is_counted
    assert scheduler.prefix_cache.pool is scheduler.pool
