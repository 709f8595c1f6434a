"""Aborts, interrupts and errors while an engine runs: rows stay right, and the engine goes on."""

from contextlib import suppress
from heapq import heappop

import pytest
from fake_runner import engine_of, request, solo, time_of

from contbatch.arriving import Arriving
from contbatch.errors import InvalidRequestError, PolicyError
from contbatch.policies import ChunkedPrefill, ContinuousBatching, StaticBatching
from contbatch.request import RequestStatus
from contbatch.sampling_params import SamplingParams

# ---- aborting ----------------------------------------------------------------------------------------------------


def test_aborting_before_arrival_frees_the_id_and_leaves_a_row():
    engine, gone, other = engine_of(), request("a", at=5.0), request("a", at=9.0)
    engine.add(gone)
    engine.abort("a")
    assert (gone.finish_reason, gone.status, engine.has_requests) == ("abort", RequestStatus.FINISHED, False)
    engine.add(other)
    while engine.has_requests:
        engine.step()
    assert other.finish_reason == "length"
    rows = engine.recorder.result().requests
    assert list(zip(rows.request_id, rows.finish_reason, rows.finished_s, strict=True))[1] == (
        "a",
        "length",
        9 + time_of(1),
    )
    assert (rows.finish_reason[0], rows.output_tokens[0]) == ("abort", 0)


def _asks_for_too_much(coming):
    coming.sampling = SamplingParams(max_tokens=10_000)


def _gets_a_longer_prompt(coming):
    coming.num_prompt_tokens = 10_000


def _runs_elsewhere(coming):
    engine_of().run([coming])


@pytest.mark.parametrize("change", [_asks_for_too_much, _gets_a_longer_prompt, _runs_elsewhere])
def test_a_request_that_can_run_no_more_when_it_arrives_is_refused_alone(change):
    engine, coming = engine_of(), request("a", at=5.0)
    engine.add(coming)
    change(coming)
    with pytest.raises(InvalidRequestError):
        engine.run([])
    following = engine.run([request("b", output=3, at=9.0)])
    assert following.requests.output_tokens.tolist() == [3]


def test_an_interrupt_between_leaving_the_queue_and_noting_it_does_not_move_who_comes_next(monkeypatch):
    arriving, first = Arriving(), request("a", at=1.0)
    arriving.add(first)
    arriving.add(request("b", at=500.0))
    monkeypatch.setattr("contbatch.arriving.heappop", lambda heap: (heappop(heap), raise_interrupt()))
    with pytest.raises(KeyboardInterrupt):
        arriving.remove(first)
    monkeypatch.undo()
    assert arriving.next_s == 500
    assert arriving.pop()[0].request_id == "b"


def raise_interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("release", ["token", "batch"])
def test_a_callback_may_abort_its_own_request_and_others_through_the_engine(release):
    def on_token(r):
        if r.request_id == "b" and r.num_output_tokens == 2:
            for name in "abcd":
                engine.abort(name)

    engine = engine_of(StaticBatching(4, release=release), on_token=on_token)
    requests = [*(request(name, 1, 5) for name in "abc"), request("d", 1, 5, at=50.0), request("e", 1, 5)]
    result = engine.run(requests)
    rows = result.requests.set_index("request_id")
    assert dict(rows.finish_reason) == {"a": "abort", "b": "abort", "c": "abort", "d": "abort", "e": "length"}
    assert dict(rows.output_tokens) == {r.request_id: r.num_output_tokens for r in requests}
    assert rows.finished_s["b"] == time_of(3 + 1, 4), "it leaves with the step that it was aborted in"


# ---- interrupts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ChunkedPrefill(), StaticBatching(2)], ids=repr)
@pytest.mark.parametrize("where", ["runner", "callback", "policy"])
def test_an_interrupted_run_aborts_its_requests_and_the_engine_runs_the_next(policy, where):
    engine = engine_of(policy, on_token=lambda r: False)
    owner, name = {
        "runner": (engine.runner, "execute"),
        "callback": (engine, "on_token"),
        "policy": (engine.scheduler.policy, "plan"),
    }[where]
    whole = getattr(owner, name)

    def interrupted(*args):
        if engine.scheduler.num_steps == 2:
            raise KeyboardInterrupt
        return whole(*args)

    object.__setattr__(owner, name, interrupted)  # policies are frozen
    requests = [request("a", 4, 5), request("b", 4, 5), request("c", 4, 5, at=1.0), request("d", 4, 5, at=99.0)]
    with pytest.raises(KeyboardInterrupt):
        engine.run(requests)
    object.__setattr__(owner, name, whole)
    assert [r.finish_reason for r in requests] == ["abort"] * 4
    rows = engine.recorder.result().requests
    assert dict(zip(rows.request_id, rows.output_tokens, strict=True)) == {
        r.request_id: r.num_output_tokens for r in requests
    }
    assert engine.scheduler.pool.num_live == 0
    assert engine.run([again := request("a", 4, 5)]).requests.finish_reason[0] == "length"
    assert again.output_token_ids == solo(again)[0]


def test_a_request_that_only_an_interrupted_step_saw_has_no_segment():
    engine = engine_of()
    engine.runner.crash = {0}
    engine.add(request("a", 4, 5))
    with pytest.raises(RuntimeError, match="crashed"):
        engine.step()
    engine.abort("a")
    result = engine.recorder.result()
    assert (len(result.segments), len(result.steps), list(result.requests.finish_reason)) == (0, 0, ["abort"])


def test_a_step_interrupted_in_a_callback_loses_no_token():
    def on_token(r):
        if len(interrupts) < 4:
            interrupts.append(r.request_id)
            raise KeyboardInterrupt

    interrupts, requests = [], [request("a", 1, 1), request("b", 2, 3)]
    engine = engine_of(on_token=on_token)
    for r in requests:
        engine.add(r)
    while engine.has_requests:
        with suppress(KeyboardInterrupt):
            engine.step()
    assert interrupts == ["a", "b", "b", "b"]
    assert [(r.output_token_ids, r.finish_reason) for r in requests] == [solo(r) for r in requests]
    rows = engine.recorder.result().requests
    assert list(rows.output_tokens) == [1, 3]


def test_a_failing_request_and_a_failing_callback_leave_rows():
    def on_token(r):
        if r.request_id == "b":
            raise KeyError("callback")
        return r.request_id == "c" and r.num_output_tokens == 2

    engine = engine_of(on_token=on_token)
    engine.runner.poison["a"] = 1
    rows = engine.run([request(name, 2, 4) for name in "abcd"]).requests.set_index("request_id")
    assert dict(rows.finish_reason) == {"a": "error", "b": "error", "c": "stop", "d": "length"}
    assert dict(rows.output_tokens) == {"a": 1, "b": 1, "c": 2, "d": 4}


def test_a_broken_policy_stops_the_run_with_its_error():
    class Greedy(ContinuousBatching):
        def plan(self, waiting, running, budget):
            return ((r, r.num_uncomputed_tokens + 1) for r in waiting)

    with pytest.raises(PolicyError, match=r"Greedy.plan wants 2 tokens"):
        engine_of(Greedy()).run([request("a")])
