"""Several answers to a prompt: computed once, shared, copied when written, whatever happens to any of them."""

import pytest
from cached_prefixes import ask
from fake_runner import engine_of, request, scheduler_of, serve, solo, table
from invariants import check

from contbatch.errors import InvalidRequestError, SchedulerError
from contbatch.policies import ChunkedPrefill, FairShare, Orca, Policy, StaticBatching
from contbatch.request import Request, RequestStatus
from contbatch.samples import best_samples
from contbatch.sampling_params import SamplingParams

FORKING, WAITING, RUNNING, FINISHED = (RequestStatus[name] for name in ("FORKING", "WAITING", "RUNNING", "FINISHED"))


def several(name="a", prompt=6, output=3, n=2, **others):
    return Request(name, [1] * prompt, SamplingParams(max_tokens=output, n=n, **others))


def same(*requests):
    for r in requests:
        assert (r.output_token_ids, r.finish_reason) == solo(r), r


# ---- shared and copied ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("n", [2, 3])
def test_the_prompt_is_computed_once_and_only_the_page_that_all_write_is_copied(prompt, n):
    a = several(prompt=prompt, output=4, n=n)
    scheduler = scheduler_of(ChunkedPrefill(), a)
    steps = serve(scheduler, 1)
    assert (table(steps), scheduler.pool.num_live) == ([f"a{prompt}"], -(-prompt // 4))
    assert [r.num_output_tokens for r in a.samples] == [1] * n
    steps += serve(scheduler, 1)
    assert table(steps)[1] == " ".join(["a1", *(f"a#{i}1" for i in range(1, n))])
    full = prompt // 4
    assert all(r.pages[:full] == a.pages[:full] for r in a.samples)
    last = [r.pages[full] for r in a.samples]
    assert len(set(last)) == n
    copies = [(last[0], page) for page in last[1:]] if prompt % 4 else []
    assert steps[1].pages_moved("copy") == copies
    assert scheduler.pool.num_live == full + n
    steps += serve(scheduler)
    assert sum(s.num_tokens for s in steps) == prompt + n * 3
    assert sum(len(s.moves) for s in steps) == len(copies)
    same(*a.samples)
    assert len({tuple(r.output_token_ids) for r in a.samples}) > 1


def test_nothing_is_copied_for_answers_of_one_token():
    a = several(output=1, n=3)
    scheduler = scheduler_of(ChunkedPrefill(), a, max_num_seqs=1)
    [step] = serve(scheduler)
    assert step.moves == []
    same(*a.samples)
    assert [r.request_id for r in scheduler.ended] == ["a#1", "a#2", "a"]


def test_a_chunked_prompt_forks_when_it_is_whole():
    a = several(prompt=9, output=2)
    scheduler = scheduler_of(ChunkedPrefill(), a, max_num_batched_tokens=4)
    steps = serve(scheduler)
    assert table(steps) == ["a4", "a4", "a1", "a1 a#11"]
    assert [[r.request_id for r in s.forked] for s in steps] == [[], [], ["a#1"], []]


# ---- no page, no seat ----------------------------------------------------------------------------------------------


def test_a_fork_without_a_free_page_waits_and_holds_nothing():
    a = several(prompt=6, output=3)
    scheduler = scheduler_of(ChunkedPrefill(), a, num_pages=2)
    steps = serve(scheduler, 2)
    [child] = a.children
    assert (child.status, child.pages, child.seat) == (WAITING, [], None)
    assert scheduler.pool.num_live == 2
    steps += serve(scheduler)
    assert table(steps) == ["a6", "a1", "a1", "a#17", "a#11"]
    same(*a.samples)


def test_a_fork_takes_the_page_that_comes_free_and_shares_what_is_left_of_its_kin():
    a, other = several(prompt=6, output=5), request("o", 3, 2)
    scheduler = scheduler_of(ChunkedPrefill(), other, a, num_pages=4)
    steps = serve(scheduler)
    assert table(steps)[:3] == ["o3 a6", "o1 a1 a#11", "a1 a#11"]
    same(*a.samples, other)


def test_a_fork_without_a_seat_waits_for_one_and_forks_then():
    a, other = several(prompt=6, output=6, n=3), request("o", 3, 3)
    scheduler = scheduler_of(ChunkedPrefill(), other, a, max_num_seqs=2)
    steps = serve(scheduler)
    assert table(steps)[:4] == ["o3 a6", "o1 a1", "o1 a1", "a1 a#11"], "from the prompt, not from what a made of it"
    assert len(steps[3].moves) == 1
    assert table(steps)[-3:] == ["a#11 a#21", "a#11 a#21", "a#21"][-3:] or len(steps) > 5
    same(*a.samples, other)
    assert sum(s.num_tokens for s in steps) == 3 + 2 + 6 + 3 * 5, "a#2 forks from a#1 when a has gone"


def test_with_a_prefix_cache_a_late_fork_finds_the_full_pages():
    a = several(prompt=6, output=3)
    scheduler = scheduler_of(ChunkedPrefill(), a, num_pages=2, prefix_cache=True)
    assert table(serve(scheduler)) == ["a6", "a1", "a1", "a#13", "a#11"]
    same(*a.samples)


@pytest.mark.parametrize("policy", [StaticBatching(2), StaticBatching(2, pad=True), Orca(), FairShare()], ids=repr)
def test_under_other_policies(policy):
    a, b = several("a", 5, 4, 3), several("b", 4, 3, 2)
    scheduler = scheduler_of(policy, a, b, num_pages=12)
    serve(scheduler)
    same(*a.samples, *b.samples)


def test_fair_share_charges_a_prompt_once():
    a, b = several("a", 6, 3, 3), request("b", 6, 3)
    for r, name in ((a, "A"), (b, "B")):
        r.client_id = name
    scheduler = scheduler_of(FairShare(input_weight=1.0, output_weight=2.0), a, b)
    serve(scheduler)
    scheduler.policy._ledger.settle(scheduler.policy.price)
    assert dict(scheduler.policy._ledger.counters) == {"A": 6 + 2 * 9, "B": 6 + 2 * 3}


# ---- preempted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_host_pages", [0, 20])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_samples_come_back_with_the_same_tokens(num_host_pages, prefix_cache):
    requests = [several(name, 5, 8, 3) for name in "abc"]
    limits = {"num_pages": 8, "num_host_pages": num_host_pages, "prefix_cache": prefix_cache}
    scheduler = scheduler_of(ChunkedPrefill(), *requests, **limits)
    serve(scheduler)
    samples = [s for r in requests for s in r.samples]
    same(*samples)
    assert sum(s.num_preemptions for s in samples) > 0
    assert (sum(s.num_swaps for s in samples) > 0) == (num_host_pages > 0)


def test_a_preempted_parent_begins_again_from_its_child():
    class Pushy(Policy):
        def plan(self, waiting, running, budget):
            yield from ((r, r.num_uncomputed_tokens) for r in [*waiting, *running])

        def make_way(self, newcomer, running):
            return [r for r in running if r is a and newcomer.request_id == "big"]

    a, big = several(prompt=8, output=5), request("big", 8, 1)
    scheduler = scheduler_of(Pushy(), a, num_pages=8, max_num_seqs=2)
    steps = serve(scheduler, 2)
    scheduler.add(big)
    steps += serve(scheduler)
    assert table(steps) == ["a8", "a#11 a1", "big8 a#11 -a", "a2 a#11", "a#11 a1", "a1"], "of its 10 tokens a#1 has 8"
    same(*a.samples)


# ---- ended in any state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_host_pages", [0, 9])
def test_aborting_a_request_ends_all_its_samples(steps, num_host_pages):
    a, other = several("a", 9, 6, 3), request("o", 4, 9)
    scheduler = scheduler_of(
        ChunkedPrefill(), other, a, num_pages=6, max_num_batched_tokens=8, num_host_pages=num_host_pages
    )
    serve(scheduler, steps)
    scheduler.abort("a")
    assert [(r.status, r.finish_reason) for r in a.samples] == [(FINISHED, "abort")] * 3
    assert set(scheduler.requests) == {"o"}
    serve(scheduler)
    assert len(scheduler.ended) == 4
    same(other)
    assert (scheduler.pool.num_live, scheduler.swap_space.num_free) == (0, num_host_pages)


def test_aborting_a_request_that_has_ended_ends_the_samples_that_have_not():
    a = several(prompt=6, output=3)
    scheduler = scheduler_of(ChunkedPrefill(), a, max_num_seqs=1)
    serve(scheduler, 3)
    assert (a.status, a.children[0].status) == (FINISHED, WAITING)
    scheduler.abort("a")
    assert (a.finish_reason, a.children[0].finish_reason, scheduler.has_requests) == ("length", "abort", False)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_one_sample_can_be_aborted_alone(steps):
    a = several(n=3)
    scheduler = scheduler_of(ChunkedPrefill(), a, max_num_batched_tokens=5)
    serve(scheduler, steps)
    scheduler.abort("a#1")
    first, gone, last = a.samples
    assert gone.finish_reason == "abort"
    serve(scheduler)
    same(first, last)


def test_an_error_of_one_sample_is_its_own():
    for name in ("a", "a#1"):
        a = several(n=3)
        scheduler = scheduler_of(ChunkedPrefill(), a)
        scheduler.runner.poison[name] = 0
        serve(scheduler)
        assert [r.finish_reason for r in a.samples if r.request_id == name] == ["error"]
        same(*(r for r in a.samples if r.request_id != name))


def test_a_prompt_that_fails_before_its_end_takes_all_samples_with_it():
    a = several(n=3)
    scheduler = scheduler_of(ChunkedPrefill(), a, max_num_batched_tokens=4)
    scheduler.update(scheduler.schedule(), {}, {"a": ValueError("lost")})
    assert [(r.finish_reason, str(r.error)) for r in a.samples] == [("error", "lost")] * 3
    assert not scheduler.has_requests


def test_a_missing_token_of_a_sample_is_an_error_that_changes_nothing():
    a = several(n=3)
    scheduler = scheduler_of(ChunkedPrefill(), a)
    step = scheduler.schedule()
    with pytest.raises(SchedulerError, match="'a#2'"):
        scheduler.update(step, {"a": 1, "a#1": 1})
    assert [r.output_token_ids for r in a.samples] == [[]] * 3
    scheduler.update(step, {"a": 1, "a#1": 2, "a#2": 3})
    assert [r.output_token_ids for r in a.samples] == [[1], [2], [3]]


@pytest.mark.parametrize("at", ["a", "a#1", "a#2"])
@pytest.mark.parametrize("ends", ["a", "a#2"])
def test_a_callback_may_abort_samples_that_have_no_token_yet(at, ends):
    a, other = several(n=3), request("o", 3, 3)
    scheduler = scheduler_of(ChunkedPrefill(), a, other)
    serve(scheduler, on_token=lambda r: scheduler.abort(ends) if r.request_id == at else None)
    gone = a.samples if ends == "a" else [a.children[1]]
    assert all(r.finish_reason == "abort" for r in gone)
    same(other, *(r for r in a.samples if r not in gone))
    assert len(scheduler.ended) == 4


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("at", ["a", "a#1", "a#2"])
def test_an_interrupt_in_a_callback_loses_no_sample_and_calls_back_for_every_token(at):
    a, seen = several(n=3, output=4), []

    def on_token(r):
        seen.append((r.request_id, r.num_output_tokens))
        if seen.count((at, 1)) == 1 and seen[-1] == (at, 1):
            raise Interrupt
        return False

    scheduler = scheduler_of(ChunkedPrefill(), a, max_num_batched_tokens=4)
    with pytest.raises(Interrupt):
        serve(scheduler, on_token=on_token)
    check(scheduler)
    serve(scheduler, on_token=on_token)
    same(*a.samples)
    assert sorted(seen) == [(r.request_id, i) for r in a.samples for i in range(1, 5)]


def test_a_policy_that_cannot_rank_a_sample_fails_it_alone():
    class Choosy(ChunkedPrefill):
        def rank(self, request):
            return 1 / (request.sample_index - 1) ** 2

    a = several(n=3)
    scheduler = scheduler_of(Choosy(), a)
    serve(scheduler)
    assert [r.finish_reason for r in a.samples] == ["length", "error", "length"]
    assert isinstance(a.children[0].error, ZeroDivisionError)


# ---- names, order, rows --------------------------------------------------------------------------------------------


def test_ids_of_samples_are_taken():
    scheduler = scheduler_of(ChunkedPrefill(), several(n=3))
    with pytest.raises(InvalidRequestError, match="'a#2' is already in use"):
        scheduler.add(request("a#2"))
    scheduler = scheduler_of(ChunkedPrefill(), request("a#1"))
    with pytest.raises(InvalidRequestError, match="'a#1' is already in use"):
        scheduler.add(several())
    engine = engine_of()
    engine.add(request("a#1", at=5.0))
    with pytest.raises(InvalidRequestError, match="'a#1' is already in use"):
        engine.add(several())


def test_samples_come_before_those_who_came_after_their_prompt():
    a, b = several(output=3, n=3), request("b", 1, 3)
    scheduler = scheduler_of(ChunkedPrefill(), a, b, max_num_seqs=1)
    serve(scheduler, 1)
    assert [r.request_id for r in scheduler.waiting] == ["a#1", "a#2", "b"]


def test_an_engine_gives_every_sample_a_row_and_aborts_before_arrival():
    engine = engine_of(num_pages=20)
    late = Request("late", [1] * 3, SamplingParams(n=2), arrival_time=50.0)
    a = several(prompt=6, output=3, n=3)
    engine.add(late)
    engine.abort("late")
    result = engine.run([a])
    rows = result.requests.set_index("request_id")
    assert list(rows.index) == ["a", "a#1", "a#2"]
    assert list(rows.output_tokens) == [3, 3, 3]
    assert rows.first_token_s.nunique() == 1, "all from the same logits"
    assert rows.admitted_s.nunique() == 1
    assert result.steps.sampled_tokens.sum() == 9
    assert [r.finish_reason for r in late.samples] == ["abort"] * 2


def test_n_and_best_of_are_checked():
    for values, message in (
        ({"n": 0}, "n must be an integer ≥ 1, got 0"),
        ({"n": True}, "n must be"),
        ({"n": 2, "best_of": 1}, "best_of must be None or an integer ≥ n = 2, got 1"),
        ({"best_of": 1.5}, "best_of"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            SamplingParams(**values)
    assert SamplingParams(n=2, best_of=2).logprobs is None
    assert SamplingParams(n=2, best_of=3).logprobs == 0
    assert SamplingParams(n=2, best_of=3).num_samples == 3


def test_the_best_are_those_of_the_largest_sum_of_logprobs():
    from contbatch.logprob import Logprob

    a = Request("a", [1], SamplingParams(max_tokens=2, n=2, best_of=4))
    scheduler = scheduler_of(ChunkedPrefill(), a)
    logprobs = {"a": [-1.0, -3.0], "a#1": [-2.0, -1.0], "a#2": [-0.5, -0.25], "a#3": [-0.1, -9.0]}
    for i in range(2):
        step = scheduler.schedule()
        tokens = {r.request_id: 5 for r in a.samples}
        scores = {name: [{5: Logprob(values[i], 1)}] for name, values in logprobs.items()}
        scheduler.update(step, tokens, scores=scores)
    assert [r.cumulative_logprob for r in a.samples] == [-4.0, -3.0, -0.75, -9.1]
    assert [r.request_id for r in best_samples(a)] == ["a#2", "a#1"]


# ---- forks by hand -------------------------------------------------------------------------------------------------


def test_a_fork_goes_on_from_the_tokens_it_has_in_common():
    a = ask("a", [1, 2, 3, 4, 5], 9)
    scheduler = scheduler_of(ChunkedPrefill(), a)
    serve(scheduler, 3)
    child = ask("b", [1, 2, 3, 4, 5], 9)
    child.output_token_ids = [*a.output_token_ids[:-1], 6]
    scheduler.fork(a, child)
    step = scheduler.schedule()
    assert [(g.request.request_id, g.start, g.num_tokens) for g in step.grants] == [("a", 7, 1), ("b", 7, 1)]
    assert step.moves == [("copy", a.pages[1], child.pages[1])]
    assert child.pages[0] == a.pages[0]


def test_a_fork_of_other_tokens_is_refused():
    a = ask("a", [1, 2, 3, 4, 5], 9)
    scheduler = scheduler_of(ChunkedPrefill(), a)
    serve(scheduler, 1)
    for other in (ask("b", [1, 2, 3, 9, 5]), ask("c", [1, 2, 3, 4, 5], salt="x"), ask("d", [1] * 9)):
        with pytest.raises(InvalidRequestError, match="does not go on from"):
            scheduler.fork(a, other)
    several_of_it = Request("e", a.prompt_token_ids, SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="n of the forked request 'e' must be 1, got 2"):
        scheduler.fork(a, several_of_it)
    assert set(scheduler.requests) == {"a"}


class ChildrenFirst(ChunkedPrefill):
    """The first of the samples waits while any of the others runs."""

    def plan(self, waiting, running, budget):
        yield from super().plan(waiting, [r for r in running if r.sample_index] or running, budget)


def test_a_fork_of_one_sample_takes_nothing_from_the_others_which_may_be_further_on():
    a = Request("a", [1, 2, 3], SamplingParams(max_tokens=9, n=2))
    scheduler = scheduler_of(ChildrenFirst(), a, page_size=2)
    serve(scheduler, 4)
    assert (a.num_computed_tokens, a.children[0].num_computed_tokens) == (4, 6)
    child = ask("b", [*a.prompt_token_ids, *a.output_token_ids], 3)
    scheduler.fork(a, child)
    child_of_the_other = ask("c", a.children[0].token_ids(0, 6), 3)
    scheduler.fork(a.children[0], child_of_the_other)
    serve(scheduler)
    same(*a.samples, child, child_of_the_other)


def test_only_what_is_live_in_the_same_scheduler_can_be_forked():
    a, b = (ask(name, [1, 2, 3, 4, 5], 9) for name in "ab")
    scheduler, other = scheduler_of(ChunkedPrefill(), a), scheduler_of(ChunkedPrefill(), b)
    serve(other, 2)
    child = ask("c", [1, 2, 3, 4, 5, 6])
    with pytest.raises(InvalidRequestError, match=r"'c'.* can't be forked from .*'b'.*not live in this scheduler"):
        scheduler.fork(b, child)
    serve(scheduler)
    with pytest.raises(InvalidRequestError, match="not live"):
        scheduler.fork(a, child)
    child.output_token_ids = [1] * 3
    with pytest.raises(InvalidRequestError, match="tokens of the forked request 'c' must be fewer than 1, got 3"):
        other.fork(b, child)
    assert set(other.requests) == {"b"}
