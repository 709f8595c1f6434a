import math

import pytest
from fake_runner import engine_of, request, solo, time_of
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import POLICIES, WORKLOADS

from contbatch.engine import StepResult
from contbatch.errors import InvalidRequestError, RunnerError
from contbatch.policies import OneAtATime
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams

# ---- whatever the workload ---------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(WORKLOADS, POLICIES)
def test_every_request_ends_once_and_has_one_row(workload, policy):
    engine, requests = engine_of(policy, **workload.limits), workload.requests()
    result = engine.run(requests)
    assert sorted(result.requests.request_id) == list(range(len(requests)))
    assert not engine.has_requests
    for row in result.requests.itertuples():
        r = requests[row.request_id]
        assert (row.finish_reason, row.output_tokens) == (r.finish_reason, r.num_output_tokens)
        if workload.fits(r):
            assert (r.output_token_ids, r.finish_reason) == solo(r)
        else:
            assert (r.output_token_ids, r.finish_reason, type(r.error)) == ([], "rejected", InvalidRequestError)


@settings(max_examples=50)
@given(WORKLOADS, POLICIES, st.sets(st.integers(0, 30)))
def test_a_runner_that_crashes_costs_nothing_but_the_step(workload, policy, crashes):
    engine, requests = engine_of(policy, **workload.limits), list(filter(workload.fits, workload.requests()))
    engine.runner.crash = crashes
    for r in requests:
        engine.add(r)
    while engine.has_requests:
        before = engine.now
        try:
            engine.step()
        except RuntimeError:
            assert engine.now in {before, *(r.arrival_time for r in requests)}, "only an idle engine's clock moves"
    for r in requests:
        assert (r.output_token_ids, r.finish_reason) == solo(r)
    result = engine.recorder.result()
    assert list(result.steps.step) == list(range(len(result.steps)))
    assert dict(zip(result.requests.request_id, result.requests.output_tokens, strict=True)) == {
        r.request_id: r.num_output_tokens for r in requests
    }


# ---- the clock ---------------------------------------------------------------------------------------------------


def test_the_clock_is_the_sum_of_the_steps_and_jumps_over_idle_time():
    engine = engine_of()
    result = engine.run([request("a", 4, 2), request("late", 2, 1, at=100.0)])
    assert list(result.steps.start_s) == [0.0, time_of(4), 100.0]
    assert list(result.steps.elapsed_s) == [time_of(4), time_of(1), time_of(2)]
    assert engine.now == 100.0 + time_of(2)


def test_a_request_that_arrives_during_a_step_joins_the_next():
    result = engine_of().run([request("a", 4, 3), request("b", 2, 1, at=0.01)])
    assert list(result.steps.tokens) == [4, 3, 1]
    assert result.requests.set_index("request_id").queue_s["b"] == time_of(4) - 0.01


def test_ties_go_by_order_of_adding_even_if_one_was_added_after_its_time():
    engine = engine_of(OneAtATime())
    engine.add(request("first", 1, 1))
    engine.add(request("early", 1, 1, at=0.5))
    engine.step()
    engine.add(request("added late", 1, 1, at=0.5))
    assert [r.request_id for r in engine.scheduler.waiting] == ["early", "added late"]


def test_an_idle_engine_does_nothing():
    engine = engine_of()
    assert (engine.step(), engine.now, engine.runner.calls) == ([], 0.0, 0)
    result = engine.run([])
    assert (len(result.requests), len(result.steps)) == (0, 0)


@pytest.mark.parametrize("elapsed_s", [-1.0, math.nan, math.inf])
def test_a_step_takes_finite_time(elapsed_s):
    engine = engine_of()
    engine.runner.execute = lambda step: StepResult({"a": 1}, elapsed_s)
    engine.add(request("a", 1, 1))
    with pytest.raises(RunnerError, match=f"step 0 .* got {elapsed_s}"):
        engine.step()
    assert engine.now == 0.0


def test_a_real_runners_host_time_counts_and_a_virtual_ones_does_not():
    engine = engine_of()
    engine.add(request("a", 1, 2))
    engine.step()
    assert engine.now == time_of(1)
    engine.runner.is_virtual = False
    engine.runner.execute = lambda step: StepResult({"a": 1}, 0.0)
    engine.step()
    host_s = engine.recorder.result().steps.host_s
    assert host_s[0] == 0.0 < host_s[1]
    assert engine.now == time_of(1) + host_s[1]


# ---- requests that follow others ---------------------------------------------------------------------------------


def test_followers_come_when_told_of_the_rejected_too():
    """A chain of four, the second of which can never run."""
    sizes, calls = {0: 4, 1: 65, 2: 3, 3: 2}, []

    def on_finish(r, now):
        calls.append((r.request_id, r.finish_reason, now))
        following = r.request_id + 1
        return [request(following, sizes[following], 2, at=now + 10.0)] if following in sizes else []

    engine = engine_of(num_pages=4, page_size=16)
    result = engine.run([request(0, 4, 2)], on_finish=on_finish)
    first = time_of(4, 1)
    third = first + 10.0 + 10.0 + time_of(3, 1)
    expected = [(0, "length", first), (1, "rejected", first + 10.0), (2, "length", third)]
    assert calls == [*expected, (3, "length", third + 10.0 + time_of(2, 1))]
    assert list(result.requests.arrival_s) == [0.0, first + 10.0, first + 20.0, third + 10.0]


def test_a_follower_may_not_be_a_request_that_was_run():
    engine = engine_of()
    with pytest.raises(InvalidRequestError, match="new Request"):
        engine.run([request("a"), request("b", 1, 5)], on_finish=lambda r, now: [r])
    assert not engine.has_requests


# ---- adding and rejecting ----------------------------------------------------------------------------------------


def test_what_can_never_run_is_rejected_and_the_others_go_on():
    requests = [request("big", 65), request("small", 3), request("used", 4), Request("length", num_prompt_tokens=3)]
    engine = engine_of(num_pages=4, page_size=16)
    engine.add(request("used", 1))
    result = engine.run(requests)
    assert [r.finish_reason for r in requests] == ["rejected", "length", "rejected", "rejected"]
    assert "'big'" in str(requests[0].error)
    assert "already in use" in str(requests[2].error)
    assert "'length'" in str(requests[3].error)
    assert sorted(result.requests.finish_reason) == ["length", "length", "rejected", "rejected", "rejected"]
    rejected = result.requests[result.requests.finish_reason == "rejected"]
    assert rejected[["first_token_s", "finished_s", "queue_s", "ttft_s", "e2e_s"]].isna().all(axis=None)


@pytest.mark.parametrize("at", [0.0, 5.0])
def test_an_id_is_taken_while_its_request_is_live_or_arriving(at):
    engine = engine_of()
    engine.add(request("a", at=at))
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        engine.add(request("a", at=7.0))


@pytest.mark.parametrize("at", [0.0, 5.0])
def test_a_request_listed_twice_is_an_error_and_not_a_rejection(at):
    engine, r = engine_of(), request("a", at=at)
    with pytest.raises(InvalidRequestError):
        engine.run([r, r])
    assert (r.finish_reason, engine.has_requests) == ("abort", False)


@pytest.mark.parametrize("lengths", [(3, 4), (65, 4), (4, 65), (65, 66)])
@pytest.mark.parametrize("at", [0.0, 99.0])
def test_two_requests_of_one_id_are_an_error_even_one_after_the_other(lengths, at):
    """Lists of requests that were numbered apart, put together: their rows could not be told apart."""
    first, second = lengths
    engine, requests = engine_of(num_pages=4, page_size=16), [request(0, first), request(0, second, at=at)]
    with pytest.raises(InvalidRequestError, match="request id 0 is that of two requests of one run"):
        engine.run(requests)
    assert (requests[1].finish_reason, engine.has_requests) == (None, False)


def test_a_follower_comes_when_the_last_sample_has_left():
    asked = Request(0, [1, 1, 1], SamplingParams(max_tokens=6, n=3, stop_token_ids=(4,)))
    told = []

    def on_finish(r, now):
        told.append((r.request_id, now, [s.finish_reason for s in r.samples]))
        return [request(1, 2, 2, at=now)] if r is asked else []

    result = engine_of(max_num_seqs=1).run([asked], on_finish=on_finish)
    rows = result.requests.set_index("request_id")
    assert [name for name, *_ in told] == [0, 1]
    assert told[0][1] == rows.finished_s[[0, "0#1", "0#2"]].max() > rows.finished_s[0]
    assert None not in told[0][2]


def test_running_the_same_requests_again_is_an_error_that_leaves_them_as_they_were():
    requests = [request("a", 1, 2)]
    engine_of().run(requests)
    with pytest.raises(InvalidRequestError, match="new Request"):
        engine_of().run(requests)
    assert (requests[0].finish_reason, requests[0].error) == ("length", None)


def test_a_second_run_has_tables_of_its_own():
    engine = engine_of()
    engine.run([request("a", 1, 2)])
    result = engine.run([request("a", 1, 3, at=engine.now)])
    assert list(result.requests.output_tokens) == [3]
    assert result.duration_s == time_of(1, 1, 1)
