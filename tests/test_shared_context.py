"""What requests read together, against a count over all pages that a step reads."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import contbatch as cb
from contbatch.arrivals import AllAtOnce
from contbatch.lengths import Uniform
from contbatch.pages import PagePool
from contbatch.shared_context import find_shared_context
from contbatch.step import Grant


def counted(step, size):
    """Positions that are read again: each full page is a reader's own but for the others who read it."""
    single, several = Counter(), set()
    for request, start, num_tokens, _, _ in step.grants:
        read = request.pages[: -(-(start + num_tokens) // size)]
        if num_tokens == 1:
            single.update(read)
        else:
            several.update(read)
    return size * sum(readers - (page not in several) for page, readers in single.items())


@given(
    prompts=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=7),
    size=st.integers(1, 5),
    budget=st.integers(2, 20),
    policy=st.sampled_from([cb.ContinuousBatching(), cb.ChunkedPrefill(), cb.StaticBatching(4, pad=True)]),
    cached=st.booleans(),
    num_samples=st.integers(1, 3),
)
def test_positions_read_again_are_those_of_all_readers_but_one(prompts, size, budget, policy, cached, num_samples):
    scheduler = cb.Scheduler(
        policy,
        num_pages=60,
        page_size=size,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        prefix_cache=cached,
    )
    for i, (document, common, own) in enumerate(prompts):
        sampling = cb.SamplingParams(max_tokens=own, n=num_samples)
        scheduler.add(cb.Request(i, [document] * common + [2 + i] * own, sampling))
    while scheduler.has_requests:
        step = scheduler.schedule()
        assert step.shared_context == counted(step, size)
        sampling = [grant.request for grant in step.grants if grant.samples] + step.forked
        scheduler.update(step, {request.request_id: 1 for request in sampling})
        scheduler.pool.check()


class Reader:
    def __init__(self, pages):
        self.pages = pages


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [((1, 1, 1), 5 * 16), ((1, 1, 9), 5 * 16), ((9, 9, 9), 0), ((1,), 0), ((9, 1), 3 * 16)],
)
def test_by_hand(tokens, positions):
    """Of three requests two share three pages, of which the third shares two; everybody has a page of their own."""
    pool = PagePool(10, 16)
    common = pool.take(3)
    pool.share(common)
    pool.share(common[:2])
    tables = [[*common, *pool.take(1)], [*common, *pool.take(1)], [*common[:2], *pool.take(1)]]
    grants = [Grant(Reader(pages), 60, n, True, False) for pages, n in zip(tables, tokens, strict=False)]
    assert find_shared_context(grants, pool) == positions
    assert pool.num_shared == 5


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("policy", [cb.ContinuousBatching(), cb.StaticBatching(4), cb.ChunkedPrefill()])
def test_simulated_steps_are_priced_by_what_their_rows_say(policy, fast_forward):
    cost = cb.Linear(step_s=1, decode_context_s=2, cold_context_s=0.5)
    fields = {"prompt": Uniform(1, 20), "output": Uniform(1, 30), "prefix": cb.SharedPrefix(40, 2)}
    load = cb.OpenLoop(arrivals=AllAtOnce(), num_requests=12, **fields)
    backend = cb.Simulated(cost=cost, kv_tokens=4096)
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "prefix_cache": True, "fast_forward": fast_forward}
    steps = cb.simulate(load, policy, backend, **limits).steps
    assert (steps.shared_context > 0).any()
    assert (steps.shared_context < steps.decode_context)[steps.decode_context > 0].all()
    cold = steps.decode_context - steps.shared_context
    assert list(1 + 2 * steps.decode_context + 0.5 * cold) == list(steps.elapsed_s)
