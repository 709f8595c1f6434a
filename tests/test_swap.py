"""Preempted requests that go to host memory and come back."""

import numpy as np
import pytest
from cached_prefixes import ask
from fake_runner import request, scheduler_of, serve, solo, table
from invariants import check

from contbatch.errors import InvalidRequestError, PagePoolError, RunnerError
from contbatch.policies import ChunkedPrefill, Policy, Priority
from contbatch.request import RequestStatus
from contbatch.runners.page_moves import move_pages
from contbatch.scheduler import Scheduler
from contbatch.step import PageMove
from contbatch.swap_space import SwapSpace

SWAPPED, PREEMPTED, RUNNING, FINISHED = (
    RequestStatus[name] for name in ("SWAPPED", "PREEMPTED", "RUNNING", "FINISHED")
)


def two_in_need(num_host_pages=2, policy=None, **limits):
    """Two requests, each with a page of 4 tokens and a prompt that fills it; the pool has 2 pages, each needs 2."""
    a, b = request("a", 4, 5), request("b", 4, 5)
    limits = {"num_pages": 2, "num_host_pages": num_host_pages, **limits}
    return a, b, scheduler_of(policy or ChunkedPrefill(), a, b, **limits)


def test_what_is_swapped_out_is_not_computed_again():
    a, b, scheduler = two_in_need()
    steps = serve(scheduler)
    assert table(steps) == ["a4 b4", "a1 -b", "a1", "a1", "a1", "b1", "b1", "b1", "b1"]
    [out] = steps[1].pages_moved("out")
    [back] = steps[5].pages_moved("in")
    assert out[1] == back[0], "from the host page that it went to"
    assert [len(s.moves) for s in steps] == [0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert (b.num_preemptions, b.num_swaps, a.num_swaps) == (1, 1, 0)
    assert all(r.output_token_ids == solo(r)[0] for r in (a, b))


def test_without_host_pages_it_is_computed_again():
    _, b, scheduler = two_in_need(num_host_pages=0)
    assert table(serve(scheduler)) == ["a4 b4", "a1 -b", "a1", "a1", "a1", "b5", "b1", "b1", "b1"]
    assert (b.num_preemptions, b.num_swaps) == (1, 0)


def test_a_swapped_request_keeps_what_it_computed_and_no_page():
    _, b, scheduler = two_in_need()
    serve(scheduler, 2)
    assert (b.status, b.num_computed_tokens, b.pages, b.seat) == (SWAPPED, 4, [], None)
    assert len(b.host_pages) == 1
    assert scheduler.swap_space.num_free == 1


def test_a_partial_page_is_swapped_too_and_pages_of_nothing_are_not():
    class Reserving(Priority):
        def reserve(self, request):
            return request.max_kv_tokens

    a, b = request("a", 3, 2, priority=0), request("b", 3, 9, priority=1)
    scheduler = scheduler_of(Reserving(preempt=True), b, num_pages=3, num_host_pages=5)
    serve(scheduler, 2)
    assert (len(b.pages), b.num_computed_tokens) == (3, 4)
    scheduler.add(a)
    [step] = serve(scheduler, 1)
    assert step.preempted == [b]
    assert len(step.moves) == len(b.host_pages) == 1, "2 of its 3 pages have nothing in them"
    serve(scheduler)
    assert b.output_token_ids == solo(b)[0]


@pytest.mark.parametrize("num_host_pages", [0, 1, 2, 3])
def test_who_does_not_fit_in_host_memory_is_computed_again(num_host_pages):
    requests = [request(name, 8, 9) for name in "abc"]
    scheduler = scheduler_of(ChunkedPrefill(), *requests, num_pages=6, num_host_pages=num_host_pages)
    serve(scheduler)
    swaps, preemptions = (sum(getattr(r, name) for r in requests) for name in ("num_swaps", "num_preemptions"))
    assert (swaps > 0) == (num_host_pages >= 2), "the first victim has two pages"
    assert swaps <= preemptions
    assert all(r.output_token_ids == solo(r)[0] for r in requests)
    assert scheduler.swap_space.num_free == num_host_pages


def test_a_policy_may_refuse():
    class Never(ChunkedPrefill):
        def may_swap(self, victim):
            return victim.request_id != "b"

    _, b, scheduler = two_in_need(policy=Never())
    serve(scheduler)
    assert (b.num_preemptions, b.num_swaps) == (1, 0)


def test_a_policy_that_raises_leaves_everything_as_it_was():
    class Broken(ChunkedPrefill):
        def may_swap(self, victim):
            raise ZeroDivisionError

    _, b, scheduler = two_in_need(policy=Broken())
    serve(scheduler, 1)
    with pytest.raises(ZeroDivisionError):
        scheduler.schedule()
    check(scheduler)
    assert (b.status, b.num_preemptions, scheduler.swap_space.num_free) == (RUNNING, 0, 2)


def test_who_was_swapped_out_keeps_its_place_in_the_queue():
    _, b, scheduler = two_in_need(max_num_seqs=2)
    late = request("late", 1, 1)
    scheduler.add(late)
    serve(scheduler, 2)
    assert list(scheduler.waiting) == [b, late]
    serve(scheduler)
    assert [r.request_id for r in scheduler.ended] == ["a", "b", "late"]


# ---- with a prefix cache -------------------------------------------------------------------------------------------


def cached_pair():
    prompt = [1, 2, 3, 4, 5, 6, 0, 1]
    a, b = ask("a", [*prompt, 1], 5), ask("b", [*prompt, 2], 5)
    return a, b


def test_pages_that_are_still_cached_are_shared_and_only_the_others_come_back():
    a, b = cached_pair()
    scheduler = scheduler_of(ChunkedPrefill(), a, num_pages=4, num_host_pages=9, prefix_cache=True)
    serve(scheduler, 1)
    scheduler.add(b)
    steps = serve(scheduler)
    [swapped] = [s for s in steps if s.preempted]
    assert swapped.preempted == [b]
    assert len(swapped.pages_moved("out")) == 3
    [back] = [s for s in steps if s.pages_moved("in")]
    assert len(back.pages_moved("in")) == 1
    assert back.num_cached_tokens == 8
    assert all(r.output_token_ids == solo(r)[0] for r in (a, b))


def test_a_shared_page_is_copied_out_and_stays_with_those_who_hold_it():
    a, b = cached_pair()
    scheduler = scheduler_of(ChunkedPrefill(), a, num_pages=4, num_host_pages=9, prefix_cache=True)
    serve(scheduler, 1)
    scheduler.add(b)
    while not (step := scheduler.schedule()).preempted:
        scheduler.update(step, scheduler.runner.execute(step).tokens)
    assert (a.status, b.status) == (RUNNING, SWAPPED)
    assert all(scheduler.pool.num_holders(page) == 1 for page in a.pages)
    assert len(b.host_pages) == 3


def test_who_finds_more_in_the_cache_than_it_had_computed_takes_that():
    """Swapped out after the first chunk of its prompt, while another computes the same prompt to its end."""
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    a, b = ask("a", prompt, 3), ask("b", prompt, 3)
    a.priority, b.priority = 1, 0
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 4, "num_host_pages": 9, "prefix_cache": True}
    scheduler = scheduler_of(Priority(preempt=True), a, num_pages=9, **limits)
    serve(scheduler, 1)
    scheduler.add(b)
    steps = serve(scheduler)
    assert table(steps)[0] == "b4 -a"
    assert len(steps[0].moves) == 1
    [back] = [s for s in steps if a in s.admitted]
    assert (back.moves, back.num_cached_tokens, back.grants[0].start) == ([], 8, 8)
    assert all(r.output_token_ids == solo(r)[0] for r in (a, b))


# ---- steps that are never updated ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 5], ids=["out", "in"])
@pytest.mark.parametrize("crash", [True, False], ids=["half done", "not begun"])
def test_who_was_moved_by_a_lost_step_is_computed_again(at, crash):
    a, b, scheduler = two_in_need()
    serve(scheduler, at)
    if crash:
        scheduler.runner.crash = {at}
        with pytest.raises(RuntimeError):
            serve(scheduler, 1)
    else:
        assert scheduler.schedule().moves
    scheduler.schedule()
    assert (b.status, b.num_computed_tokens, b.host_pages) == (PREEMPTED if at == 1 else RUNNING, 0, [])
    check(scheduler)
    serve(scheduler)
    assert all(r.output_token_ids == solo(r)[0] for r in (a, b))


def test_pages_that_a_lost_step_should_have_filled_are_not_published():
    """Aborted between plan and computation, a request must not leave pages in the cache that hold nothing yet."""
    a, b = ask("a", [1] * 4, 5), ask("b", [2] * 4, 5)
    scheduler = scheduler_of(ChunkedPrefill(), a, b, num_pages=2, num_host_pages=2, prefix_cache=True)
    serve(scheduler, 5)
    assert b.status is SWAPPED
    cached = scheduler.pool.num_cached
    step = scheduler.schedule()
    assert step.pages_moved("in")
    assert b.status is RUNNING
    scheduler.abort("b")
    assert scheduler.pool.num_cached <= cached
    late = ask("late", [2] * 5, 1)
    scheduler.add(late)
    serve(scheduler)
    assert late.output_token_ids == solo(late)[0]


@pytest.mark.parametrize("steps", [2, 4])
def test_a_swapped_request_can_be_aborted(steps):
    _, b, scheduler = two_in_need()
    serve(scheduler, steps)
    assert b.status is SWAPPED
    scheduler.abort("b")
    assert (b.status, b.finish_reason, b.host_pages) == (FINISHED, "abort", [])
    assert scheduler.swap_space.num_free == 2
    scheduler.abort("b")
    serve(scheduler)
    assert [r.request_id for r in scheduler.ended] == ["b", "a"]


def test_many_moves_of_one_step_are_done_in_order():
    """In one step a request comes back to the page of one that goes out, whose host page was another's before."""

    class Swing(Policy):
        def plan(self, waiting, running, budget):
            for r in [*waiting, *running]:
                yield r, 1

        def make_way(self, newcomer, running):
            return running

    a, b = request("a", 4, 5), request("b", 4, 5)
    scheduler = scheduler_of(Swing(), a, b, num_pages=2, num_host_pages=2, max_num_seqs=1)
    steps = serve(scheduler)
    both = [s for s in steps if s.pages_moved("in") and s.pages_moved("out")]
    assert any({d for d, _ in s.pages_moved("out")} & {d for _, d in s.pages_moved("in")} for s in both)
    assert all(r.output_token_ids == solo(r)[0] for r in (a, b))
    assert a.num_swaps > 1


# ---- the parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 1.0, True, None, "4"])
def test_host_pages_are_counted(bad):
    with pytest.raises(InvalidRequestError, match=f"num_host_pages must be an integer in .*, got {bad!r}"):
        Scheduler(ChunkedPrefill(), num_pages=4, num_host_pages=bad)


def test_swap_space_gives_all_or_nothing():
    space = SwapSpace(3)
    pages = space.take(2)
    assert space.take(2) == []
    space.check(pages)
    with pytest.raises(PagePoolError, match=r"1 free \+ 0 held of 3"):
        space.check([])
    with pytest.raises(PagePoolError):
        space.check([*pages, pages[0]])
    space.give_back(pages)
    assert (pages, space.num_free) == ([], 3)


def test_page_moves_on_arrays():
    rng = np.random.default_rng(0)
    device, host = [rng.random((4, 2, 3)) for _ in range(2)], [rng.random((2, 2, 3)) for _ in range(2)]
    before = [array.copy() for array in device]
    moves = [PageMove("out", 1, 0), PageMove("copy", 2, 1), PageMove("copy", 1, 3), PageMove("in", 0, 2)]
    move_pages(moves, device, host)
    for array, old, away in zip(device, before, host, strict=True):
        np.testing.assert_array_equal(array, old[[0, 2, 1, 2]])
        np.testing.assert_array_equal(away[0], old[1])


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (PageMove("out", 4, 0), r"device page 4 is not in \[0, 4\)"),
        (PageMove("out", 0, 2), r"host page 2 is not in \[0, 2\)"),
        (PageMove("in", 2, 0), r"host page 2"),
        (PageMove("in", 0, -1), r"device page -1"),
        (PageMove("copy", 0, 4), r"device page 4"),
    ],
)
def test_a_move_beyond_the_pages_is_refused_and_nothing_is_moved(move, message):
    device, host = [np.arange(4)], [np.arange(2)]
    with pytest.raises(RunnerError, match=message):
        move_pages([PageMove("copy", 0, 1), move], device, host)
    np.testing.assert_array_equal(device[0], np.arange(4))


class Scripted(Policy):
    """Plans what a list says, by name and tokens, then everything; x makes way."""

    def __init__(self, *script):
        self.script = list(script)

    def plan(self, waiting, running, budget):
        everybody = {r.request_id: r for r in (*running, *waiting)}
        chosen = self.script.pop(0) if self.script else dict.fromkeys(everybody, 99)
        return ((everybody[name], min(n, everybody[name].num_uncomputed_tokens)) for name, n in chosen.items())

    def make_way(self, newcomer, running):
        return [r for r in running if r.request_id == "x"]


def test_pages_that_are_on_the_host_and_in_the_cache_are_not_counted_twice_before_others_make_way():
    """w has 4 tokens on the host; y holds the same page. w needs one page for 4 more, and x has just one."""
    w, y, x = (ask("w", [1] * 4 + [2] * 7, 2), ask("y", [1] * 4 + [3] * 3, 6), ask("x", [4] * 4, 2))
    script = {"w": 4}, {"y": 3, "x": 4}, {"y": 1}, {"y": 1}, {"y": 1, "x": 1}, {"w": 4}
    scheduler = scheduler_of(Scripted(*script), w, y, x, num_pages=4, prefix_cache=True, num_host_pages=1)
    steps = serve(scheduler, 5)
    assert (w.status, w.num_computed_tokens) == (SWAPPED, 4)
    steps += serve(scheduler, 1)
    assert table(steps) == ["w4", "y3 x4", "y1", "y1", "y1 -w", "w4 -x"]
    serve(scheduler)
    assert [r.output_token_ids for r in (w, y, x)] == [solo(r)[0] for r in (w, y, x)]
