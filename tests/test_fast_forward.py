"""Skipping the planning of steps changes nothing but the time it takes."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check
from random_workloads import POLICIES, READY, WORKLOADS

import contbatch as cb
from contbatch.arrivals import AllAtOnce
from contbatch.engine import Engine
from contbatch.errors import DetailError, RunnerError
from contbatch.fast_forward import FastForward
from contbatch.lengths import Uniform
from contbatch.policies import Policy, StaticBatching
from contbatch.runners.simulated import SimulatedRunner
from contbatch.workload import OpenLoop, Poisson

COST = cb.Linear(
    step_s=0.4,
    token_s=0.03,
    seq_s=0.01,
    logits_s=0.002,
    decode_context_s=7e-4,
    prefill_pair_s=1e-4,
    swapped_token_s=0.1,
    resize_s=3e-3,
)
CHANGED = ("num_free", "num_cached", "num_live", "num_evictions", "cached_pages")


class CountingScheduler(cb.Scheduler):
    """Counts its plans, and checks itself after every stretch."""

    num_plans = num_grants = 0

    def schedule(self, now=0.0):
        self.num_plans += 1
        step = super().schedule(now)
        self.num_grants += len(step.grants)
        return step

    def skip(self, step, num_steps):
        left = super().skip(step, num_steps)
        if not self.decoders:
            check(self)
        return left


class LookingEngine(Engine):
    """Looks at everybody after every stretch and every step."""

    def advance(self):
        left = super().advance()
        if self.scheduler.decoders:
            self.scheduler.decoders.release()
        check(self.scheduler)
        return left


def run(requests, policy, limits, fast, cost=COST, logged=False, detail=True, kind=Engine):
    """Run requests; return the engine and the result."""
    scheduler = CountingScheduler(policy, **limits)
    runner = SimulatedRunner(cost, limits["page_size"])
    fast_forward = FastForward(scheduler, runner) if fast else None
    log = cb.DecisionLog() if logged else None
    engine = kind(scheduler, runner, log=log, fast_forward=fast_forward, detail=detail)
    return engine, engine.run(requests)


def same(workload, policy, limits, logged, kind=Engine):
    requests = [workload.requests() for _ in range(2)]
    engine, result = run(requests[0], policy, limits, fast=False, logged=logged)
    fast, skipped = run(requests[1], policy, limits, fast=True, logged=logged, kind=kind)
    for name in ("requests", "steps", "segments"):
        assert getattr(skipped, name).equals(getattr(result, name)), name
    assert skipped.token_s == result.token_s
    assert skipped.decisions == result.decisions
    assert fast.now == engine.now
    for a, b in zip(*requests, strict=True):
        assert (a.output_token_ids, a.finish_reason) == (b.output_token_ids, b.finish_reason)
        assert (a.num_preemptions, a.num_swaps, a.num_cached_tokens) == (
            b.num_preemptions,
            b.num_swaps,
            b.num_cached_tokens,
        )
    pools = [each.scheduler.pool for each in (engine, fast)]
    assert len({tuple(getattr(pool, name) for name in CHANGED) for pool in pools}) == 1
    in_order = tuple if logged else sorted
    assert len({tuple(in_order(pool.take(pool.num_available))) for pool in pools if pool.layout == "paged"}) <= 1, (
        "free pages"
    )
    return engine, fast


# Longer answers and a few more requests than elsewhere, so that there is something to skip.
@st.composite
def _longer(draw):
    workload = draw(WORKLOADS)
    limits = workload.limits | {
        "num_pages": draw(st.integers(4, 60)),
        "max_num_batched_tokens": draw(st.integers(1, 40)),
    }
    specs = [
        (prompt, sampling.replace(max_tokens=draw(st.integers(1, 40))), at, salt)
        for prompt, sampling, at, salt in workload.specs
    ]
    return replace(workload, limits=limits, specs=specs)


@settings(max_examples=300, deadline=None)
@given(_longer(), st.sampled_from(READY), st.booleans(), st.booleans(), st.sampled_from([Engine, LookingEngine]))
def test_nothing_but_the_number_of_plans_changes(workload, policy, logged, contiguous, kind):
    limits = workload.limits
    if contiguous:
        limits = limits | {"layout": "contiguous", "prefix_cache": False}
    engine, fast = same(workload, policy, limits, logged, kind)
    assert fast.scheduler.num_plans <= engine.scheduler.num_plans
    if not policy.steady:
        assert fast.scheduler.num_plans == engine.scheduler.num_plans


@settings(max_examples=100, deadline=None)
@given(_longer(), POLICIES, st.booleans())
def test_without_detail_the_same_figures(workload, policy, fast):
    whole = run(workload.requests(), policy, workload.limits, fast)[1]
    brief = run(workload.requests(), policy, workload.limits, fast, detail=False)[1]
    assert brief.requests.equals(whole.requests)
    assert (len(brief.segments), len(brief.token_s)) == (0, 0)
    of_gaps = [name for name in whole.summary().index if name.startswith("itl_s")]
    figures, expected = (result.summary().drop(of_gaps) for result in (brief, whole))
    assert list(figures) == pytest.approx(list(expected), rel=1e-9, nan_ok=True)


def test_a_row_without_detail_is_the_mean_of_its_steps(monkeypatch):
    monkeypatch.setattr("contbatch.step_rows.SUMMED", 50)
    limits = {"num_pages": 60, "page_size": 4, "max_num_seqs": 4}
    load = Poisson(rate=0.1, num_requests=30, prompt=Uniform(1, 30), output=Uniform(1, 30))
    whole, brief = (run(load.requests(), cb.ChunkedPrefill(), limits, True, detail=d)[1] for d in (True, False))
    assert not brief.steps.internal_slots.any(), "it is not counted then"
    assert len(brief.steps) > 3
    assert brief.steps.num_steps.sum() == len(whole.steps)
    for row in brief.steps.to_dict("records"):
        rows = whole.steps[whole.steps.step.between(row["step"], row["step"] + row["num_steps"] - 1)]
        assert row["start_s"] == rows.start_s.iloc[0]
        for name in set(row) - {"step", "start_s", "num_steps", "internal_slots"}:
            assert row[name] == pytest.approx(rows[name].mean(), rel=1e-12), name
    assert brief.summary()["duration_s"] == pytest.approx(whole.duration_s, rel=1e-12)


@pytest.mark.parametrize("what", ["itl_s", "waste"])
def test_what_was_not_kept_is_an_error(what):
    result = cb.simulate(Poisson(rate=1, num_requests=2), detail=False)
    with pytest.raises(DetailError, match=f"{what}.* needs a run with detail=True"):
        getattr(result, what)()


# ---- what is skipped ---------------------------------------------------------------------------------------------


def plans(requests, policy=None, **limits):
    limits = {"num_pages": 1000, "page_size": 4} | limits
    engine, result = run(requests, policy or cb.ChunkedPrefill(), limits, True)
    return engine.scheduler.num_plans, len(result.steps)


def crowd(n, prompt=5, output=100, **more):
    return OpenLoop(arrivals=AllAtOnce(), num_requests=n, prompt=prompt, output=output, **more).requests()


def test_decodes_are_not_planned():
    assert plans(crowd(8)) == (1, 100)
    assert plans(crowd(8), max_num_seqs=4) == (2, 200), "waiting for a seat"
    assert plans(crowd(8), StaticBatching(4, pad=True), max_num_seqs=4) == (2, 200)
    assert plans(crowd(4), cb.OneAtATime()) == (4, 400)
    assert plans(crowd(8), cb.GuaranteedNoEvict(), num_pages=30) == (8, 800), "waiting for pages"


def test_an_arrival_is_planned_for():
    early, late = crowd(2)
    late.arrival_time = 20.0
    num_plans, num_steps = plans([early, late])
    assert num_plans == 2
    assert num_steps < 200


@pytest.mark.parametrize("policy", [p for p in READY if p.decodes != "among"], ids=repr)
def test_who_decodes_is_not_looked_at(policy):
    load = Poisson(rate=0.2, num_requests=40, prompt=20, output=60)
    limits = {"num_pages": 1000, "page_size": 4, "max_num_batched_tokens": 100}
    engine, result = run(load.requests(), policy, limits, True)
    assert engine.scheduler.num_plans >= 30, "nearly each arrival is planned for"
    assert engine.scheduler.num_grants == 40, "their prompts, and no decode"
    assert result.steps.decode_tokens[result.steps.admitted > 0].mean() > 5


def test_who_looks_sees_everybody():
    engine, _ = run([], cb.ChunkedPrefill(), {"num_pages": 1000, "page_size": 4}, True)
    requests = crowd(3, output=20)
    for request in requests:
        engine.add(request)
    engine.step()
    requests.append(cb.Request("late", [1, 2], arrival_time=engine.now + 1.0))
    engine.add(requests[-1])
    engine.advance()
    assert not engine.scheduler.running, "carried"
    engine.abort(requests[1].request_id)
    check(engine.scheduler)
    assert engine.scheduler.running == [requests[0], requests[2]]
    assert requests[0].num_output_tokens == requests[2].num_output_tokens > 1
    while engine.has_requests:
        engine.advance()
    assert [r.finish_reason for r in requests] == ["length", "abort", "length", "length"]
    assert requests[2].num_output_tokens == 20
    assert engine.scheduler.pool.num_free == 1000


def test_a_step_that_comes_to_nothing_takes_no_pages_twice():
    class Cost(cb.Linear):
        broken = False

        def seconds(self, shape):
            if self.broken:
                return 1 / 0
            return super().seconds(shape)

    class Broken(Cost):
        broken = True

    engine, _ = run([], cb.ChunkedPrefill(), {"num_pages": 1000, "page_size": 1}, True, cost=Cost(step_s=1.0))
    for request in [*crowd(2, output=9), cb.Request("late", [1, 2], cb.SamplingParams(max_tokens=5), arrival_time=3.5)]:
        engine.add(request)
    while engine.now < 3.5:
        engine.advance()
    engine.runner.cost, kept = Broken(step_s=1.0), engine.runner.cost
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            engine.advance()
    engine.runner.cost = kept
    while engine.has_requests:
        engine.advance()
        engine.scheduler.decoders.release()
        check(engine.scheduler)
    assert engine.scheduler.pool.num_free == 1000


def test_another_cost_model_counts_from_then_on():
    def times(fast):
        engine, _ = run(crowd(3), cb.ChunkedPrefill(), {"num_pages": 1000, "page_size": 4}, fast)
        engine.runner.cost = cb.Linear(step_s=7.0)
        engine.run(crowd(3))
        return engine.now

    assert times(fast=True) == times(fast=False) > 700


@settings(max_examples=50, deadline=None)
@given(_longer(), st.sampled_from([p for p in READY if p.decodes != "among"]), st.booleans())
def test_short_stretches_and_a_short_memory_change_nothing(workload, policy, look):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("contbatch.recorder.KEPT", 3)
        patch.setattr("contbatch.fast_forward.MOST_STEPS", 5)
        same(workload, policy, workload.limits | {"prefix_cache": False}, False, LookingEngine if look else Engine)


def test_a_policy_that_promises_nothing_is_asked_before_every_step():
    class Mine(cb.ChunkedPrefill):
        pass

    class Promised(cb.ChunkedPrefill):
        steady = True

    assert not Mine.steady
    assert not Policy.steady
    assert (Mine.decodes, cb.ChunkedPrefill.decodes, Policy.decodes) == ("among", "first", "among")
    assert plans(crowd(2), Mine()) == (100, 100)
    assert plans(crowd(2), Promised()) == (1, 100)
    assert plans(crowd(2), cb.FairShare()) == (100, 100)
    assert not any(policy.steady for policy in (cb.FairShare(), cb.DeadlineFirst(), cb.Policy()))


def test_an_impossible_time_stops_the_run_at_its_step():
    class Cost(cb.Linear):
        def seconds(self, shape):
            return inf if shape.decode_context > 50 else 1.0

    scheduler = CountingScheduler(cb.ChunkedPrefill(), num_pages=100)
    runner = SimulatedRunner(Cost())
    engine = Engine(scheduler, runner, fast_forward=FastForward(scheduler, runner))
    with pytest.raises(RunnerError, match=r"elapsed_s of step 46 at 46\.0 s must be finite"):
        engine.run(crowd(1))
    assert not engine.has_requests
    assert scheduler.pool.num_available == 100


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["grow", "take_pages", "advance", "next_token", "on_land", "join", "make_ready"])
def test_an_interrupt_in_a_stretch_leaves_a_usable_engine(name, late):
    policy = cb.Priority() if name == "grow" else cb.ChunkedPrefill()
    scheduler = CountingScheduler(policy, num_pages=100)
    runner = SimulatedRunner(COST)
    engine = Engine(scheduler, runner, fast_forward=FastForward(scheduler, runner))
    owner = scheduler.pool if name == "grow" else scheduler.decoders
    method, calls = getattr(owner, name), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3 and not late:
            raise KeyboardInterrupt
        returned = method(*args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return returned

    if name == "on_land":  # set anew by every stretch
        engine.recorder.land = interrupted
        engine.forget = lambda: None
        method = type(engine.recorder).land.__get__(engine.recorder)
    else:
        setattr(owner, name, interrupted)
    requests = crowd(8)
    for i, request in enumerate(requests):
        request.arrival_time = 5.0 * i
    with pytest.raises(KeyboardInterrupt):
        engine.run(requests)
    check(scheduler)
    assert scheduler.pool.num_available == 100
    engine.__dict__.pop("forget", None)
    assert len(engine.run([cb.Request("next", [1], cb.SamplingParams(max_tokens=9))]).requests) == 1


def test_who_is_refused_or_aborted_on_the_way_hides_nobody_behind():
    """The engine is told of one coming request at a time; a stretch must end at those it was not told of yet."""

    def served(fast, abort):
        scheduler = cb.Scheduler(cb.ContinuousBatching(), num_pages=100, max_model_len=300)
        runner = SimulatedRunner(cb.Linear(step_s=0.1))
        engine = Engine(scheduler, runner, fast_forward=FastForward(scheduler, runner) if fast else None)
        sizes = [("first", 0.0, 200), ("too long", 1.0, 300), ("aborted", 2.0, 5), ("last", 3.0, 5)]
        requests = [
            cb.Request(name, [1] * 5, cb.SamplingParams(max_tokens=size, ignore_eos=True), arrival_time=at)
            for name, at, size in sizes
        ]

        def watch(engine, _left):
            if abort and engine.is_coming(requests[2]):
                engine.abort("aborted")

        return engine.run(iter(requests), in_order=True, watch=watch).requests.set_index("request_id")

    for abort in (False, True):
        stepwise, skipped = served(False, abort), served(True, abort)
        assert skipped.ttft_s["last"] == pytest.approx(0.1, abs=0.11)
        assert skipped.finish_reason.to_dict() == stepwise.finish_reason.to_dict()
        assert skipped.ttft_s.to_dict() == pytest.approx(stepwise.ttft_s.to_dict(), rel=1e-9, nan_ok=True)
