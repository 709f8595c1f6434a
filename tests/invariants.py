"""What must hold of a scheduler after every call, whatever the policy."""

from collections import Counter
from itertools import pairwise

from contbatch.policies import Policy
from contbatch.request import RequestStatus
from contbatch.scheduler import Scheduler

WAITING, RUNNING, PREEMPTED, SWAPPED, FORKING, HELD, FINISHED = RequestStatus


def check(scheduler, step=None):
    """Check a scheduler and, if it has just been planned, its step."""
    waiting, running, pool = list(scheduler.waiting), scheduler.running, scheduler.pool
    check_pages(pool, running)
    check_cache(scheduler.prefix_cache, running)
    forking = [r for r in scheduler.requests.values() if r.status is FORKING]
    live = waiting + running + forking
    assert len({id(r) for r in live}) == len(live), "a request is in two places"
    assert {r.request_id: r for r in live} == scheduler.requests
    for before, after in pairwise(waiting):
        order = [(r.rank, r.arrival_time, r.order) for r in (before, after)]
        assert order[0] < order[1], "waiting out of order"
    for r in waiting + forking:
        assert (r.pages, r.seat, r.finish_reason) == ([], None, None), f"{r} holds something"
        if r.status is SWAPPED:
            assert r.num_computed_tokens > 0
            assert len(r.host_pages) == pool.pages_for(r.num_computed_tokens)
        else:
            assert r.status is (FORKING if r in forking else PREEMPTED if r.num_preemptions else WAITING), r
            assert (r.num_computed_tokens, r.host_pages) == (0, []), f"{r} holds something"
        assert r.num_swaps <= r.num_preemptions
    for r in forking:
        assert r.num_output_tokens == 0
        assert r.parent.request_id in scheduler.requests, f"{r} waits for a request that is gone"
        assert r.parent.num_output_tokens == 0, f"{r} waits for a token that its parent has"
    assert all(r.host_pages == [] for r in running)
    scheduler.swap_space.check(page for r in waiting for page in r.host_pages)
    seats = [r.seat for r in running]
    assert len(seats) <= scheduler.max_num_seqs
    assert sorted(seats + scheduler.free_seats) == list(range(scheduler.max_num_seqs)), "a seat lost or taken twice"
    for r in running:
        assert r.status is (HELD if r.is_finished else RUNNING), r
        assert 0 <= r.num_computed_tokens < r.num_tokens, f"{r} has nothing left to compute"
        assert r.num_computed_tokens <= len(r.pages) * pool.page_size, f"{r}: page table too short"
        assert r.num_output_tokens <= r.sampling.max_tokens - (r.status is RUNNING), r
    if step is not None:
        check_step(scheduler, step)


def check_pages(pool, running):
    """Every page is free or cached, or live and in as many page tables as its reference count says."""
    pool.check()
    assert pool.num_free + pool.num_cached + pool.num_live == pool.num_pages
    assert pool.num_free + pool.num_cached == pool.num_available
    tables = Counter(page for r in running for page in r.pages)
    assert {page: n for page in range(pool.num_pages) if (n := pool.num_holders(page))} == tables, (
        "page tables and reference counts differ"
    )
    assert len(tables) == pool.num_live


def check_cache(cache, running):
    """What is kept is what is published, under the right key; a page that may yet be written has one holder."""
    pool, size = cache.pool, cache.pool.page_size
    assert cache._by_page.keys() == pool._kept
    assert {key: entry.page for key, entry in cache._by_key.items()} == {e.key: p for p, e in cache._by_page.items()}
    for r in running:
        assert len(set(r.pages)) == len(r.pages), f"{r} has a page twice"
        written_from = r.num_computed_tokens - r.is_finished  # padding writes its last token again
        for place, page in enumerate(r.pages):
            if (place + 1) * size > written_from:
                assert pool.num_holders(page) == 1, f"{r} may write page {page}, which others hold"
                assert page not in pool._kept, f"{r} may write page {page}, which is published"
            elif entry := cache._by_page.get(page):
                assert list(entry.tokens) == list(r.token_ids(place * size, (place + 1) * size))


def check_step(scheduler, step):
    """A step is within its limits and agrees with the requests it names."""
    assert step.num_tokens == sum(g.num_tokens for g in step.grants) <= scheduler.max_num_batched_tokens
    granted = [g.request for g in step.grants]
    assert len({id(r) for r in granted}) == len(granted) <= scheduler.max_num_seqs
    if type(scheduler.policy).make_way is Policy.make_way or not getattr(scheduler.policy, "preempt", True):
        assert not (step.admitted and step.preempted), "a step admits or preempts, never both"
    assert all(r in granted for r in step.admitted), "admitted, but granted nothing"
    assert all(r.status in (PREEMPTED, SWAPPED) for r in step.preempted)
    check_moves(scheduler, step)
    for r, start, num_tokens, samples, padding in step.grants:
        assert r in scheduler.running
        assert num_tokens >= 1
        assert start + num_tokens <= len(r.pages) * scheduler.pool.page_size, f"{r}: no page for a granted token"
        if padding:
            assert (r.status, start, num_tokens, samples) == (HELD, r.num_computed_tokens - 1, 1, False)
        else:
            assert (r.status, start) == (RUNNING, r.num_computed_tokens)
            assert start + num_tokens <= r.num_tokens
            assert samples == (start + num_tokens == r.num_tokens)
    if scheduler.requests:
        assert step.grants, "an idle step"


def check_moves(scheduler, step):
    """Pages moved in are those of requests just admitted; nobody shares a page that is written by a move."""
    swapped, copied = (step.pages_moved(kind) for kind in ("in", "copy"))
    assert len(step.moves) == len(swapped) + len(copied) + len(step.pages_moved("out"))
    targets = [page for _, page in swapped + copied]
    assert len(set(targets)) == len(targets)
    filled = {page for r in step.moved if r.status is RUNNING for page in r.pages}
    for page in targets:
        assert page in filled or scheduler.pool.num_holders(page) == 0
    assert len(copied) <= len(step.admitted)
    assert {r.request_id for r in step.moved if r.status is SWAPPED} <= {r.request_id for r in step.preempted}
    for r in step.forked:
        assert r.status is FORKING


class CheckedScheduler(Scheduler):
    """Checks itself after every call, and that nobody ends twice."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ended = []
        self.updating = False

    def add(self, request, **known):
        super().add(request, **known)
        check(self)

    def abort(self, request_id):
        super().abort(request_id)
        if not self.updating:
            check(self)

    def schedule(self, now=0.0):
        step = super().schedule(now)
        check(self, step)
        cached = [r.num_computed_tokens for r in step.admitted if r not in step.moved]
        moved = [r.num_computed_tokens for r in step.admitted if r in step.moved]
        assert sum(cached) <= step.num_cached_tokens <= sum(cached) + sum(moved)
        assert all(tokens % self.pool.page_size == 0 for tokens in cached)
        return step

    def update(self, *args, **kwargs):
        self.updating = True
        try:
            left = super().update(*args, **kwargs)
        finally:
            self.updating = False
        check(self)
        return left

    def drain_released(self):
        released = super().drain_released()
        self.ended += released
        assert len({id(r) for r in self.ended}) == len(self.ended), "a request ended twice"
        assert all(r.status is FINISHED and r.is_finished and not r.pages and r.seat is None for r in released)
        assert all(r.host_pages == [] for r in released)
        return released
