import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from fake_runner import engine_of, request, time_of
from hypothesis import given, settings
from random_workloads import POLICIES, WORKLOADS

import contbatch as cb
from contbatch.engine import StepResult
from contbatch.policies import ChunkedPrefill, ContinuousBatching, StaticBatching
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams

NAN = math.nan


def run(policy, *requests, **limits):
    return engine_of(policy, **limits).run(requests)


# ---- against plain Python ----------------------------------------------------------------------------------------


def replay(engine, requests):
    """Work out, from what the runner was given, when steps began, tokens were made and requests left."""
    now, starts, made, left, batch = 0.0, [], {r.request_id: [] for r in requests}, {}, set()
    static = isinstance(engine.scheduler.policy, StaticBatching)
    total = {r.request_id: r.num_output_tokens for r in requests}
    for grants, elapsed_s in engine.runner.steps:
        to_come = [r.arrival_time for r in requests if r.request_id not in left]
        now = max(now, min(to_come))
        starts.append(now)
        now += elapsed_s
        for name, _, _, samples, _ in grants:
            made[name] += [now] if samples else []
            batch.add(name)
        ended = {name for name in batch if len(made[name]) == total[name]}
        if ended == batch or not static:
            left |= dict.fromkeys(ended, now)
            batch -= ended
    return starts, made, left


def percentile(values, p):
    """By linear interpolation between closest ranks."""
    values, at = sorted(values), (len(values) - 1) * p / 100
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


@settings(max_examples=100)
@given(WORKLOADS, POLICIES)
def test_metrics_are_those_of_their_definitions(workload, policy):
    engine, requests = engine_of(policy, **workload.limits), list(filter(workload.fits, workload.requests()))
    result = engine.run(requests)
    if not requests:
        return
    starts, made, left = replay(engine, requests)
    assert list(result.steps.start_s) == starts
    rows, defined = result.requests.set_index("request_id"), {"ttft_s": [], "tpot_s": [], "e2e_s": [], "itl_s": []}
    for r in requests:
        row, times = rows.loc[r.request_id], made[r.request_id]
        assert row.generated_s == times[-1]
        if policy.release == "batch":
            times = [left[r.request_id]] * len(times)
        assert result.token_s[r.request_id] == times
        gaps = [b - a for a, b in pairwise(times)] if times[-1] > times[0] else []
        tpot = sum(gaps) / len(gaps) if gaps else NAN
        arrival = r.arrival_time
        assert (row.arrival_s, row.first_token_s, row.finished_s) == (arrival, times[0], times[-1])
        assert (row.ttft_s, row.e2e_s) == (times[0] - arrival, times[-1] - arrival)
        assert row.normalized_latency_s == pytest.approx((times[-1] - arrival) / len(times))
        assert row.tpot_s == pytest.approx(tpot, nan_ok=True)
        assert row.max_itl_s == pytest.approx(max(gaps, default=NAN), nan_ok=True)
        assert row.e2e_s == pytest.approx(row.ttft_s + sum(gaps)), "E2E = TTFT + ΣITL"
        defined["ttft_s"].append(row.ttft_s)
        defined["tpot_s"] += [tpot] if gaps else []
        defined["e2e_s"].append(row.e2e_s)
        defined["itl_s"] += gaps
    summary = result.summary()
    for name, values in defined.items():
        expected = [sum(values) / len(values), *(percentile(values, p) for p in (50, 90, 99))] if values else [NAN] * 4
        names = [f"{name}_mean", f"{name}_p50", f"{name}_p90", f"{name}_p99"]
        assert list(summary[names]) == pytest.approx(expected, nan_ok=True)
    tokens = sum(r.num_output_tokens for r in requests)
    seconds = starts[-1] + engine.runner.steps[-1][1] - min(r.arrival_time for r in requests)
    assert (summary.duration_s, summary.output_tokens, summary.requests) == (seconds, tokens, len(requests))
    assert summary.output_tokens_per_s == pytest.approx(tokens / seconds)


@settings(max_examples=100)
@given(WORKLOADS, POLICIES)
def test_step_rows_add_up(workload, policy):
    engine, requests = engine_of(policy, **workload.limits), list(filter(workload.fits, workload.requests()))
    scheduler, execute, expected, cached = engine.scheduler, engine.runner.execute, [], []

    def watched(step):
        running = scheduler.running
        new = {g.request.request_id: g.num_tokens for g in step.grants if not g.padding}
        size, slots = workload.limits["page_size"], set()
        for r in running:
            positions = range(r.num_computed_tokens + new.get(r.request_id, 0))
            slots |= {(r.pages[at // size], at % size) for at in positions}
        in_pages = len(slots)
        pages = len({page for r in running for page in r.pages})
        expected.append((len(running), sum(r.is_finished for r in running), len(scheduler.waiting), pages, in_pages))
        cached.append((scheduler.pool.num_cached, scheduler.pool.num_evictions))
        return execute(step)

    engine.runner.execute = watched
    result = engine.run(requests)
    steps = result.steps
    columns = ["seats", "held_seats", "waiting", "live_pages", "kv_tokens"]
    assert list(steps[columns].itertuples(index=False, name=None)) == expected
    assert list(zip(steps.cached_pages, steps.evictions.cumsum(), strict=True)) == cached
    found = [r.num_cached_tokens for r in requests]
    assert list(result.requests.sort_values("request_id").cached_tokens) == found
    if not steps.preempted.any():
        assert steps.cached_tokens.sum() == sum(found)
    grants = [g for g, _ in engine.runner.steps]
    assert list(steps.step) == list(range(len(grants)))
    assert list(steps.seqs) == [len(g) for g in grants]
    assert list(steps.tokens) == [sum(n for _, _, n, _, _ in g) for g in grants]
    assert list(steps.padding_tokens) == [sum(padding for *_, padding in g) for g in grants]
    assert (steps.tokens == steps.prefill_tokens + steps.decode_tokens + steps.padding_tokens).all()
    assert (steps.kv_tokens <= steps.live_pages * workload.limits["page_size"]).all()
    assert steps.sampled_tokens.sum() == sum(r.num_output_tokens for r in requests)
    assert steps.preempted.sum() == sum(r.num_preemptions for r in requests)
    assert steps.admitted.sum() == len(requests) + steps.preempted.sum()
    assert steps.left.sum() == len(requests)


@settings(max_examples=100)
@given(WORKLOADS, POLICIES)
def test_segments_cover_the_time_of_every_seat_once(workload, policy):
    result = run(policy, *filter(workload.fits, workload.requests()), **workload.limits)
    steps, segments = result.steps, result.segments
    taken, held = Counter(), Counter()
    for s in segments.itertuples():
        assert s.start_step < s.end_step
        assert s.start_s == steps.start_s[s.start_step]
        assert s.end_s == steps.start_s[s.end_step - 1] + steps.elapsed_s[s.end_step - 1]
        for step in range(s.start_step, s.end_step):
            taken[step, s.seat] += 1
            held[step] += s.kind == "held"
    assert set(taken.values()) <= {1}, "two requests on one seat"
    assert Counter(step for step, _ in taken) == dict(enumerate(steps.seats))
    assert [held[step] for step in steps.step] == list(steps.held_seats)
    for _, of_one in segments.groupby("request_id"):
        for before, after in pairwise(of_one.itertuples()):
            assert before.end_step <= after.start_step, "a request on two seats"
            assert (before.kind, before.seat, before.end_step) != (after.kind, after.seat, after.start_step)
            assert before.kind != "held"


# ---- by hand -----------------------------------------------------------------------------------------------------

LENGTHS = [3, 200, 100, 100, 50, 50, 10, 10]
"""The teaching example: eight requests start together; one needs 3 tokens, one 200."""
UNUSED = sum(200 - n for n in LENGTHS)


@pytest.mark.parametrize("pad", [False, True])
def test_static_batching_keeps_the_seat_of_a_3_token_answer_for_197_steps(pad):
    requests = [request(i, 1, n) for i, n in enumerate([*LENGTHS, 1])]
    result = run(StaticBatching(8, pad=pad), *requests, num_pages=500)
    assert len(result.steps) == 200 + 1
    held = result.segments[result.segments.kind == "held"].set_index("request_id")
    assert (held.end_step - held.start_step)[0] == 197
    assert result.summary().wasted_seats == UNUSED / (8 * 200 + 1)
    assert result.steps.padding_tokens.sum() == pad * UNUSED
    assert result.steps.tokens.sum() == sum(LENGTHS) + 1 + pad * UNUSED
    rows = result.requests.set_index("request_id")
    end_of_batch = result.steps.start_s[200]
    assert (rows.ttft_s[0], rows.e2e_s[0], rows.generated_s[0]) == (end_of_batch, end_of_batch, 3 * time_of(8))
    assert math.isnan(rows.tpot_s[0])
    assert rows.queue_s[8] == end_of_batch


def test_a_streaming_server_hands_out_tokens_at_once_though_the_seat_stays_taken():
    requests = [request(i, 1, n) for i, n in enumerate([*LENGTHS, 1])]
    result = run(StaticBatching(8, release="token"), *requests, num_pages=500)
    rows = result.requests.set_index("request_id")
    assert (rows.ttft_s[0], rows.e2e_s[0], rows.tpot_s[0]) == (time_of(8), 3 * time_of(8), time_of(8))
    assert rows.queue_s[8] == result.steps.start_s[200]
    assert result.summary().wasted_seats == UNUSED / (8 * 200 + 1)


def test_continuous_batching_refills_the_seat_before_the_next_step():
    requests = [request(i, 1, n) for i, n in enumerate([*LENGTHS, 1])]
    result = run(ContinuousBatching(), *requests, num_pages=500, max_num_seqs=8)
    assert result.summary().wasted_seats == 0
    short, last = (result.segments[result.segments.request_id == i].iloc[-1] for i in (0, 8))
    assert (short.end_step, short.seat) == (last.start_step, last.seat) == (3, 0)
    assert len(result.steps) == 200


def test_a_preemption_stall_is_one_long_itl():
    result = run(ChunkedPrefill(), request("a", 4, 5), request("b", 4, 3), num_pages=2)
    rows = result.requests.set_index("request_id")
    assert dict(rows.preemptions) == {"a": 0, "b": 1}
    assert result.token_s["b"] == [time_of(8), time_of(8, 1, 1, 1, 1, 5), time_of(8, 1, 1, 1, 1, 5, 1)]
    assert rows.max_itl_s["b"] == time_of(1, 1, 1, 1, 5)
    assert rows.queue_s["b"] == 0.0


def test_one_token_has_no_tpot_and_counts_nowhere():
    result = run(ChunkedPrefill(), request("a", 1, 1), request("b", 1, 3))
    assert np.isnan(result.requests.tpot_s).tolist() == [True, False]
    assert list(result.itl_s()) == [time_of(1), time_of(1)]
    assert result.summary().tpot_s_mean == time_of(1)


def test_the_hit_rate_is_that_of_the_prompts_admitted():
    engine = engine_of(num_pages=4, prefix_cache=True)
    engine.add(gone := request("gone", 8, at=99.0))
    engine.abort("gone")
    result = engine.run([request("a", 9), request("b", 9, at=5.0), request("c", 13, at=9.0), request("big", 99)])
    assert dict(zip(result.requests.request_id, result.requests.cached_tokens, strict=True)) == {
        "big": 0,
        "a": 0,
        "b": 8,
        "c": 8,
    }
    assert list(result.steps.cached_tokens) == [0, 8, 8]
    assert list(result.steps.prefill_tokens) == [9, 1, 5]
    assert list(result.steps.cached_pages) == [0, 0, 0]
    assert list(result.steps.live_pages) == [3, 3, 4]
    summary = result.summary()
    assert (summary.hit_rate, summary.evictions) == (16 / 31, 0)
    assert gone.num_cached_tokens == 0


def test_evictions_are_counted_in_the_step_that_needed_the_page():
    result = engine_of(num_pages=3, prefix_cache=True).run(
        [request("a", 8), Request("b", [2] * 8, SamplingParams(max_tokens=1), arrival_time=50.0)]
    )
    assert list(result.steps.evictions) == [0, 1]
    assert list(result.steps.cached_pages) == [0, 1]
    assert (result.summary().evictions, result.summary().hit_rate) == (1, 0.0)


def test_goodput_counts_those_within_every_limit():
    result = run(ChunkedPrefill(), request("a", 1, 1), request("b", 1, 3), request("c", 1, 3, at=0.5))
    seconds = time_of(2, 2, 2, 1)
    assert result.duration_s == seconds
    assert result.goodput() == 3 / seconds
    assert result.goodput(ttft_s=time_of(2)) == 2 / seconds
    assert result.goodput(tpot_s=time_of(1)) == 1 / seconds, "an undefined TPOT breaks no limit"
    assert result.goodput(e2e_s=time_of(2, 2, 2), ttft_s=time_of(2)) == 2 / seconds
    assert result.goodput(e2e_s=0.0) == 0.0


def test_attainment_is_of_all_requests_and_by_their_own_targets():
    own = Request("d", [1], SamplingParams(max_tokens=3), ttft_target_s=time_of(2), tpot_target_s=time_of(2) / 2)
    result = run(ChunkedPrefill(), request("a", 1, 1), own, request("big", 9999))
    assert dict(zip(result.requests.request_id, result.meets(), strict=True)) == {"big": False, "a": True, "d": False}
    assert result.attainment() == 1 / 3, "one was rejected, one missed its target for further tokens"
    assert result.attainment(tpot_s=time_of(2)) == 2 / 3, "a limit that is given counts in place of the target"
    assert result.attainment(tpot_s=time_of(2), ttft_s=0.0) == 0.0
    assert result.goodput() == 1 / result.duration_s
    assert result.requests.client_id.isna().all()


def test_the_share_of_seats_taken_needs_to_know_how_many_there_are():
    load = cb.Poisson(rate=4, num_requests=9)
    result = cb.simulate(load, max_num_seqs=5)
    assert result.summary().seat_use == result.steps.seats.mean() / 5
    assert math.isnan(run(ChunkedPrefill(), request("a", 1, 1)).summary().seat_use)


def test_summary_counts_the_failed_apart():
    engine = engine_of(ChunkedPrefill(), num_pages=4)
    engine.runner.poison["bad"] = 2
    summary = engine.run([request("bad", 1, 9), request("good", 1, 4), request("big", 99)]).summary()
    assert (summary.requests, summary.failed, summary.output_tokens) == (1, 2, 4)
    assert summary.e2e_s_mean == time_of(2, 2, 2, 1)
    assert summary.page_use == (2 + 2 + 2 + 1) / 4 / 4
    assert summary.kv_use == pytest.approx((2 + 4 + 6 + 4) / (4 * (2 + 2 + 2 + 1)))


@pytest.mark.parametrize("requests", [[], [request("big", 999)]], ids=["nobody", "all rejected"])
def test_a_run_in_which_nothing_happened_has_a_summary(requests):
    summary = run(ChunkedPrefill(), *requests).summary()
    assert (summary.requests, summary.failed, summary.steps) == (0, len(requests), 0)
    assert math.isnan(summary.e2e_s_mean)
    assert math.isnan(summary.output_tokens_per_s)


def test_a_run_that_took_no_time_has_no_rates():
    engine = engine_of()
    engine.runner.execute = lambda step: StepResult({g.request.request_id: 0 for g in step.grants}, 0.0)
    result = engine.run([request("a", 1, 3)])
    assert math.isnan(result.summary().requests_per_s)
    assert math.isnan(result.goodput())
    assert result.summary().e2e_s_mean == 0.0
