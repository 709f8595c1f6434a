"""Contiguous memory: first fit against a bitmap, and requests that run in runs."""

from itertools import pairwise

import pytest
from fake_runner import request, scheduler_of, serve, solo, table
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from random_workloads import POLICIES, SAMPLED

import contbatch as cb
from contbatch.contiguous import ContiguousPool, FreeRuns
from contbatch.errors import InvalidRequestError, PagePoolError
from contbatch.policies import ChunkedPrefill, GuaranteedNoEvict, Orca, StaticBatching

SIZE = 23


class FirstFit(RuleBasedStateMachine):
    """Runs are taken, extended, moved and given back, against a list of who holds which address."""

    def __init__(self):
        super().__init__()
        self.pool = ContiguousPool(SIZE, 1)
        self.owner = [None] * SIZE
        self.tables = {}

    def fit(self, count):
        """The lowest address from which `count` addresses are free, or None: every address is tried."""
        return next((at for at in range(SIZE - count + 1) if self.owner[at : at + count] == [None] * count), None)

    def hold(self, name, start, count):
        self.owner[start : start + count] = [name] * count

    def held(self):
        return st.sampled_from(sorted(self.tables))

    @rule(count=st.integers(1, SIZE + 1))
    def take(self, count):
        at = self.fit(count)
        assert self.pool.can_take(count) == (at is not None)
        if at is None:
            with pytest.raises(PagePoolError, match=f"{count} neighbouring pages asked for, the longest run has"):
                self.pool.take(count)
            return
        name = max(self.tables, default=0) + 1
        self.tables[name] = self.pool.take(count)
        assert self.tables[name] == list(range(at, at + count))
        self.hold(name, at, count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data):
        name = data.draw(self.held())
        self.pool.give_back(self.tables.pop(name))
        self.owner = [None if owner == name else owner for owner in self.owner]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 4))
    def grow(self, data, count):
        name = data.draw(self.held())
        pages = self.tables[name]
        end = pages[-1] + 1
        free = end + count <= SIZE and self.owner[end : end + count] == [None] * count
        before = list(pages)
        assert self.pool.grow(pages, count) == free
        assert pages == before + [*range(end, end + count)] * free
        if free:
            self.hold(name, end, count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, SIZE))
    def move(self, data, count):
        name = data.draw(self.held())
        before, owner = list(self.tables[name]), list(self.owner)
        self.owner = [None if holder == name else holder for holder in owner]
        at = self.fit(count)
        assert self.pool.move(self.tables[name], count) == (at is not None)
        if at is None:
            self.owner = owner
            assert self.tables[name] == before
        else:
            self.hold(name, at, count)
            assert self.tables[name] == list(range(at, at + count))

    @invariant()
    def free_runs_are_the_gaps(self):
        self.pool.check()
        free = [at for at, owner in enumerate(self.owner) if owner is None]
        runs, last = [], None
        for at in free:
            if last == at - 1:
                runs[-1][1] += 1
            else:
                runs.append([at, 1])
            last = at
        assert [list(run) for run in self.pool.free_runs] == runs
        assert (self.pool.num_free, self.pool.num_available) == (len(free), len(free))
        assert self.pool.num_live == SIZE - len(free)


TestFirstFit = FirstFit.TestCase
TestFirstFit.settings = settings(max_examples=80, stateful_step_count=40)


def test_a_gap_is_too_short_though_enough_is_free():
    pool = ContiguousPool(10, 1)
    a, b, c = (pool.take(3) for _ in range(3))
    pool.give_back(b)
    assert list(pool.free_runs) == [(3, 3), (9, 1)]
    with pytest.raises(PagePoolError, match="4 neighbouring pages asked for, the longest run has 3 of the 4 free"):
        pool.take(4)
    pool.give_back(c)
    assert list(pool.free_runs) == [(3, 7)]
    assert (a, pool.take(4), pool.take(0)) == ([0, 1, 2], [3, 4, 5, 6], [])


def test_what_is_not_free_is_not_taken():
    runs = FreeRuns(4)
    assert runs.take(1, 2)
    assert [runs.take(*bad) for bad in ((0, 2), (1, 1), (2, 2), (3, 2), (4, 1), (-1, 1))] == [False] * 6
    assert list(runs) == [(0, 1), (3, 1)]


@pytest.mark.parametrize("bad", [[0, 0], [3], [-1]])
def test_giving_back_twice_or_foreign_pages_changes_nothing(bad):
    pool = ContiguousPool(3, 4)
    pool.take(2)
    with pytest.raises(PagePoolError, match="more often than taken"):
        pool.give_back(bad)
    pool.check()
    assert list(pool.free_runs) == [(2, 1)]


def test_nothing_is_shared_or_kept():
    pool = ContiguousPool(3, 4)
    pool.take(2)
    pool.share([])
    with pytest.raises(PagePoolError, match="page 1 belongs to a contiguous run, which can't be shared"):
        pool.share([1])
    with pytest.raises(PagePoolError, match=r"page 1 .* not kept"):
        pool.keep(1)


def test_check_sees_runs_that_touch_and_pages_that_are_lost():
    touching, lost, taken, miscounted = (ContiguousPool(4, 1) for _ in range(4))
    touching.free_runs._starts, touching.free_runs._lengths = [0, 2], [2, 2]
    lost.free_runs._lengths = [3]
    taken._live.add(1)
    miscounted.free_runs._num_free = 3
    for pool in (touching, lost, taken, miscounted):
        with pytest.raises(PagePoolError, match="accounting"):
            pool.check()


# ---- requests in runs --------------------------------------------------------------------------------------------


def check_runs(scheduler):
    for r in scheduler.running:
        assert all(after == before + 1 for before, after in pairwise(r.pages)), f"{r} is not in one piece: {r.pages}"


def serve_in_runs(scheduler, **kwargs):
    outputs = []
    while scheduler.has_requests:
        outputs += serve(scheduler, 1, **kwargs)
        check_runs(scheduler)
        assert len(outputs) < 2000
    return outputs


RESERVING = [Orca(), Orca("oracle"), Orca("power_of_two"), Orca("max", max_model_len=24), GuaranteedNoEvict()]


@settings(max_examples=150)
@given(SAMPLED, st.one_of(POLICIES, st.sampled_from(RESERVING)))
def test_everybody_gets_the_tokens_they_would_get_alone(workload, policy):
    limits = {**workload.limits, "layout": "contiguous", "prefix_cache": False}
    scheduler, requests = scheduler_of(policy, **limits), []
    for r in workload.requests():
        try:
            scheduler.add(r)
            requests += r.samples
        except InvalidRequestError:
            continue
    steps = serve_in_runs(scheduler)
    assert [(r.output_token_ids, r.finish_reason) for r in requests] == [solo(r) for r in requests]
    if policy in RESERVING and policy != Orca("oracle") and policy != Orca("power_of_two"):
        assert not any(step.restarted or step.preempted for step in steps)


def test_fragmentation_keeps_a_request_waiting_that_pages_would_admit():
    """12 slots: a, b and c take 4 each; once a and c have gone, d needs 7 of the 8 free."""
    lengths = {"a": (2, 3), "b": (2, 3), "c": (2, 3), "d": (3, 5)}
    waits = {}
    for layout in ("paged", "contiguous"):
        requests = [request(name, *both) for name, both in lengths.items()]
        scheduler = scheduler_of(Orca(), *requests, num_pages=12, page_size=1, layout=layout)
        serve(scheduler, 1)
        for name in "ac":
            scheduler.abort(name)
        [step] = serve(scheduler, 1)
        waits[layout] = step.bound
        assert [r.request_id for r in step.admitted] == ["d"] * (layout == "paged")
        serve(scheduler)
    assert waits == {"paged": set(), "contiguous": {"pages", "fragmentation"}}


def test_who_outgrows_a_run_goes_on_beside_it_or_begins_again_in_a_longer_one():
    """Slots of one token: a expects 1 output token and holds 2; b sits next to it, c leaves the end free."""
    a, b = request("a", 2, 4, expected_output_tokens=1), request("b", 2, 2)
    scheduler = scheduler_of(Orca("oracle"), a, b, num_pages=10, page_size=1, layout="contiguous")
    steps = serve(scheduler, 2)
    assert [r.request_id for r in steps[1].restarted] == ["a"]
    assert (a.pages, a.num_computed_tokens, a.num_preemptions) == ([5, 6, 7, 8, 9], 1, 0)
    assert table(steps + serve(scheduler)) == ["a2 b2", "a1 b1", "a2", "a1", "a1"]
    alone = request("a", 2, 4, expected_output_tokens=1)
    scheduler = scheduler_of(Orca("oracle"), alone, num_pages=10, page_size=1, layout="contiguous")
    assert table(serve(scheduler)) == ["a2", "a1", "a1", "a1"]


def test_static_batching_reserves_the_longest_of_the_batch():
    scheduler = scheduler_of(
        StaticBatching(2), request("a", 2, 2), request("b", 2, 7), num_pages=16, page_size=1, layout="contiguous"
    )
    scheduler.schedule()
    assert [r.pages for r in scheduler.running] == [[*range(8)], [*range(8, 16)]]


def test_bad_layouts():
    with pytest.raises(InvalidRequestError, match="layout must be 'paged' or 'contiguous', got 'heap'"):
        cb.Scheduler(ChunkedPrefill(), num_pages=4, layout="heap")
    with pytest.raises(InvalidRequestError, match="prefix_cache must be False with layout 'contiguous', got True"):
        cb.Scheduler(ChunkedPrefill(), num_pages=4, layout="contiguous", prefix_cache=True)
