"""Whatever is given in place of what is wanted: an error of this package that names it, and nothing else is lost."""

import inspect
import math

import numpy as np
import pandas as pd
import pytest
from fake_runner import engine_of, solo
from fake_runner import request as short_request
from hypothesis import given
from hypothesis import strategies as st

import contbatch as cb
from contbatch import arrivals, lengths
from contbatch.errors import ContbatchError, CostModelError, InvalidRequestError, RunnerError
from contbatch.prefix_cache import PrefixCache
from contbatch.prompts import encode, listed
from contbatch.simulation import simulated_engine
from contbatch.source import Source


class Unprintable:
    def __repr__(self):
        raise RuntimeError("it can't be printed")


# fmt: off
ODD = [
    None, True, "x", "", b"x", math.nan, math.inf, -1, 0, -0.5, 1.5, 1e308, 2**70, 10**400, 10**5000, 3j, np.int64(3),
    np.float32(2.5), np.bool_(1), np.array([1, 2]), np.array([1.5]), pd.DataFrame(), [], [None], ["x", 1], [[1]], {},
    {"a": 1}, {1: 2}, {1, 2}, (), (1,), ([],), iter([1]), Unprintable(), object, lambda *_: None,
]
# fmt: on
LIMITS = {"num_pages": 64, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
SIMULATED = cb.Simulated(cost=cb.Linear(step_s=0.01))
AT_4 = arrivals.PoissonArrivals(4)
SMALL = {"num_requests": 4, "prompt": 5, "output": 3}
WORKLOAD = cb.Poisson(rate=4, **SMALL)
EXPERIMENT = cb.Experiment(workload=WORKLOAD, backend=SIMULATED, **LIMITS)
RESULT = cb.run(EXPERIMENT, log=cb.DecisionLog())
FLAGS = {"progress", "fast_forward", "detail", "live", "cache"}
"""Of which only the truth counts."""


def serve(workload):
    if getattr(workload, "num_requests", 1) < 1000:
        cb.simulate(workload, None, SIMULATED, **{**LIMITS, "num_pages": 4096}, max_model_len=2000)


def run_alone(request):
    for policy in (cb.FairShare(), cb.DeadlineFirst(), cb.ShortestJobFirst(by="prediction"), cb.Priority(preempt=True)):
        alike = cb.Request(request.request_id, request.prompt_token_ids, request.sampling, arrival_time=1)
        for name in ("client_id", "priority", "ttft_target_s", "stop_ids", "expected_output_tokens", "cache_salt"):
            setattr(alike, name, getattr(request, name))
        if request.sampling.max_tokens < 100 and request.prompt_token_ids is not None:
            simulated_engine(policy, SIMULATED, **LIMITS, prefix_cache=True).run([alike])
            assert alike.error is None or isinstance(alike.error, ContbatchError)


def plan_with(policy):
    cb.simulate(WORKLOAD, policy, SIMULATED, **LIMITS)


def simulate_on(backend):
    cb.simulate(WORKLOAD, None, backend, **LIMITS)


SHAPE = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
SHAPE |= {"num_layers": 2, "num_heads": 4, "kv_num_heads": 2, "head_size": 16, "max_position": 512}
SPEEDS = dict.fromkeys(("memory_bytes_per_s", "peer_bytes_per_s", "host_bytes_per_s"), 1e12)
GPU = {"name": "x", "peak_flops": {"f16": 1e12}, "memory_bytes": 10**11, "source": "", **SPEEDS}
RUNS = {"policy": cb.ChunkedPrefill(), "backend": SIMULATED}
TABLE = pd.DataFrame({"rate": [1, 1, 2, 2], "seed": [0, 1, 0, 1], "x": [1.0, 2.0, 3.0, 4.0]})
AGENTS = {"arrivals": AT_4, "num_tasks": 2, "tool_calls": 2, "task": 3, "call": 2, "result": 3, "answer": 2}
TURN = {"session": 0, "delay_s": 0, "prompt": ((1, 3),), "output_tokens": 3}
THREE = cb.SamplingParams(max_tokens=3)
CALLS = [
    (cb.SamplingParams, {"max_tokens": 3}, None),
    (
        cb.Request,
        {"request_id": 0, "prompt_token_ids": [1] * 6, "sampling": cb.SamplingParams(max_tokens=3)},
        run_alone,
    ),
    (cb.BeamSearchParams, {}, None),
    *((policy, {}, plan_with) for policy in (cb.Orca, cb.StaticBatching, cb.ShortestJobFirst, cb.Priority)),
    *((policy, {}, plan_with) for policy in (cb.FairShare, cb.DeadlineFirst, cb.ContinuousBatching, cb.MaxUtilization)),
    (cb.Poisson, {"rate": 4, **SMALL}, serve),
    (cb.OpenLoop, {"arrivals": AT_4, **SMALL}, serve),
    (cb.ClosedLoop, {"num_clients": 2, **SMALL}, serve),
    (cb.Conversations, {"arrivals": AT_4, "num_conversations": 2, "turns_each": 2, "prompt": 5, "output": 3}, serve),
    (cb.AgentLoops, AGENTS, serve),
    (cb.Mixture, {"parts": (WORKLOAD,)}, serve),
    (cb.SharedPrefix, {"tokens": 4}, None),
    (cb.Client, {}, lambda client: serve(WORKLOAD.replace(client=client))),
    (
        cb.Turn,
        {"session": 0, "delay_s": 0, "prompt": ((1, 3),), "output_tokens": 3},
        lambda t: serve(cb.Trace((t,), "")),
    ),
    (cb.Trace, {"rows": (cb.Turn(0, 0.0, ((1, 3),), 3),), "name": "a trace"}, serve),
    (Source, {"turns": WORKLOAD.turns()}, None),
    (arrivals.GammaArrivals, {"rate": 1, "cv": 1}, None),
    (arrivals.WeibullArrivals, {"scale_s": 1, "shape": 1}, None),
    (arrivals.BurstArrivals, {"size": 2, "every_s": 1}, lambda a: a.times(3)),
    (arrivals.DiurnalArrivals, {"rates": (1, 2)}, lambda a: a.times(3, 0)),
    (lengths.LogNormal, {"median": 4, "sigma": 1, "high": 8}, lambda a: a.draw(3, 0)),
    (lengths.Geometric, {"mean": 4, "high": 8}, lambda a: a.draw(3, 0)),
    (lengths.Quantiles, {"levels": (0, 1), "tokens": (1, 4)}, lambda a: a.draw(3, 0)),
    (cb.Simulated, {}, simulate_on),
    (cb.Roofline, {"gpu": "H100", "model": "opt-13b"}, lambda c: simulate_on(cb.Simulated(cost=c))),
    (cb.Roofline("H100", "opt-13b").kv_capacity, {}, None),
    (cb.Linear, {}, lambda cost: simulate_on(cb.Simulated(cost=cost))),
    (cb.Hardware, GPU, lambda gpu: simulate_on(cb.Simulated(gpu=gpu))),
    (cb.ModelShape, SHAPE, lambda model: simulate_on(cb.Simulated(model=model))),
    (cb.simulate, {"workload": WORKLOAD, **RUNS, **LIMITS}, None),
    (cb.simulate_fleet, {"workload": WORKLOAD, "num_replicas": 2, **RUNS}, None),
    (cb.simulate_disaggregated, {"workload": WORKLOAD, "num_prefill": 1, "num_decode": 1, **RUNS}, None),
    (cb.Link, {}, None),
    (cb.PowerOfTwo, {}, lambda router: cb.simulate_fleet(WORKLOAD, 2, router, **RUNS)),
    (cb.PrefixAffinity, {}, lambda router: cb.simulate_fleet(WORKLOAD, 2, router, **RUNS)),
    (cb.Experiment, {"workload": WORKLOAD, "backend": SIMULATED, **LIMITS}, cb.run),
    (cb.Experiment.from_json, {"text": EXPERIMENT.to_json()}, None),
    (cb.run, {"experiment": EXPERIMENT}, None),
    (cb.sweep, {"experiments": [EXPERIMENT], "progress": False, "cache": False}, None),
    (cb.run_in_turns, {"experiments": [EXPERIMENT]}, None),
    (cb.find_capacity, {"run": float, "keeps": lambda rate: rate < 5, "low": 1, "high": 10}, None),
    (cb.limits_bound, {"results": {"a": RESULT}}, None),
    (cb.Prices, {}, None),
    (cb.by_client, {"result": RESULT}, None),
    (cb.jain, {"shares": [1, 2]}, None),
    (cb.over_time, {"result": RESULT, "every_s": 0.1}, None),
    (cb.confidence, {"table": TABLE, "by": "rate"}, None),
    (cb.prediction_errors, {"simulated": RESULT, "measured": [RESULT]}, None),
    (cb.replay, {"source": RESULT}, None),
    (cb.Measured.fit, {"run": RESULT}, None),
    (cb.PagePool, {"num_pages": 4, "page_size": 2}, None),
    (cb.SwapSpace, {"num_pages": 4}, None),
    (cb.Scheduler, {"policy": cb.ChunkedPrefill(), "num_pages": 4}, None),
    (cb.Engine, {"scheduler": simulated_engine().scheduler, "runner": SIMULATED.runner()}, None),
    (RESULT.meets, {}, None),
    (RESULT.decisions.diff, {"other": RESULT.decisions}, None),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "good", "use"), CALLS, ids=lambda value: getattr(value, "__qualname__", ""))
def test_odd_values_are_taken_or_refused_with_an_error_of_this_package(call, good, use, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    parameters = inspect.signature(call).parameters.values()
    for name in [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        for odd in ODD if name not in FLAGS else ():
            if call is cb.find_capacity and callable(odd):
                continue  # what it returns is its own affair
            try:
                made = call(**{**good, name: odd})
                if use is not None:
                    use(made)
            except ContbatchError:
                continue
            except Exception as error:
                if "unexpected keyword argument" in str(error):  # Python's own
                    continue
                pytest.fail(f"{name} = a {type(odd).__name__}: {type(error).__name__}: {error}")


@pytest.mark.parametrize("odd", [7, None, "a", [1], object])
def test_what_is_no_request_is_refused_and_the_others_go_on(odd):
    engine, other = engine_of(), short_request("a", output=3)
    engine.add(other)
    for add in (engine.add, engine.scheduler.add, engine.scheduler.validate):
        with pytest.raises(InvalidRequestError, match="must be of type Request"):
            add(odd)
    with pytest.raises(InvalidRequestError, match="must be of type Request"):
        engine.scheduler.fork(other, odd)
    while engine.has_requests:
        engine.step()
    assert (other.output_token_ids, other.finish_reason) == solo(other)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_run_of_what_is_no_request_ends_with_its_error_and_what_was_done_before(in_order):
    engine = engine_of()
    with pytest.raises(InvalidRequestError, match="of type Request, got 7"):
        engine.run(iter([short_request("a", output=1), short_request("b", at=50.0), 7]), in_order=in_order)
    reasons = engine.recorder.result().requests.set_index("request_id").finish_reason
    assert dict(reasons) == ({"a": "length", "b": "abort"} if in_order else {"a": "abort", "b": "abort"})
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_pages
    assert engine.run([short_request("a", output=3, at=60.0)]).requests.output_tokens.tolist() == [3]
    with pytest.raises(InvalidRequestError, match="a list of requests, got 5"):
        engine.run(5, in_order=in_order)


class OnlySteps:
    def seconds(self, shape):
        return 0.0


class OnlySwaps:
    def swap_seconds(self, num_pages, page_size):
        return 0.0


REFUSED = [
    (lambda: cb.Simulated(cost=OnlySteps()), "cost must be .* with a method swap_seconds, got <.*OnlySteps"),
    (lambda: cb.Simulated(cost=OnlySwaps()), "cost must be .* with a method seconds, got <.*OnlySwaps"),
    (lambda: cb.by_client(RESULT, ttft=1), "a limit of latency must be one of ttft_s, tpot_s, e2e_s, got 'ttft'"),
    (lambda: RESULT.attainment(tpot=1), "a limit of latency must be .* got 'tpot'"),
    (lambda: RESULT.goodput(e2e=1), "a limit of latency must be .* got 'e2e'"),
    (lambda: PrefixCache(8), "pool must be of type PagePool, got 8"),
    (
        lambda: cb.over_time(RESULT, 1e-9),
        "every_s must be at least .* s, or there are more than 1000000 rows, got 1e-09",
    ),
    (lambda: cb.explore(EXPERIMENT, draw="x"), "draw must be callable, got 'x'"),
    (lambda: cb.limits_bound({"a": RESULT}, at_least=70), r"at_least must be .* in \[0, 1\], got 70"),
    (lambda: cb.limits_bound({"a": RESULT}, at_least=-0.1), r"at_least must be .* in \[0, 1\], got -0.1"),
    (lambda: cb.Request(0, [1.5, -5]), "a token id in the prompt of request 0 must be an integer ≥ 0, got 1.5"),
    (lambda: cb.Request(0, (1, -5)), "an integer ≥ 0, got -5"),
    (lambda: cb.Request(0, [1, True]), "an integer ≥ 0, got True"),
    (
        lambda: listed([True, False]) and encode([True, False], None),
        "a prompt is text, token ids or .* got a list with True",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:24] for _, message in REFUSED])
def test_what_is_wrong_is_said_where_it_is_given(call, message):
    with pytest.raises(ContbatchError, match=message):
        call()


def test_what_is_at_the_limit_is_taken():
    rows = cb.over_time(RESULT, RESULT.duration_s / 1e6)
    assert 999_999 <= len(rows) <= 1_000_001
    assert [cb.limits_bound({"a": RESULT}, at_least=share).shape[0] for share in (0, 1)] == [1, 1]
    assert cb.Request(0, [np.int64(3), 0]).num_prompt_tokens == 2
    assert PrefixCache(cb.PagePool(2, 2)).hit_rate != 0


def test_ids_that_nobody_can_have_are_unknown_ones():
    engine, going = engine_of(), short_request("a", output=2)
    engine.add(going)
    for abort in (engine.abort, engine.scheduler.abort):
        abort(["a"])
        abort(([],))
    assert engine.scheduler.requests == {"a": going}


def test_a_callback_may_return_nothing():
    told, engine = [], engine_of(max_model_len=10)
    requests = [short_request("a", output=2), short_request("long", prompt=20)]
    for in_order in (False, True):
        engine.run(requests, on_finish=lambda r, _: told.append(r.request_id), in_order=in_order)
        requests = [short_request("a", output=2, at=engine.now), short_request("long", prompt=20, at=engine.now)]
    assert sorted(told) == ["a", "a", "long", "long"]


@pytest.mark.parametrize("odd", [7, 1.5, object])
def test_a_callback_that_returns_no_list_ends_the_run_with_an_error(odd):
    engine = engine_of()
    with pytest.raises(InvalidRequestError, match="what comes of a request must be a list of requests"):
        engine.run([short_request("a", output=2)], on_finish=lambda *_: odd)
    assert not engine.has_requests


# ---- valid and invalid requests side by side -------------------------------------------------------------------------

ODD_FIELDS = st.sampled_from(
    [
        {"request_id": ["a"]},
        {"prompt_token_ids": {1, 2}},
        {"prompt_token_ids": [1, [2]]},
        {"eos_token_ids": 5},
        {"eos_token_ids": None},
        {"eos_token_ids": np.array(5)},
        {"arrival_time": 10**400},
        {"client_id": ([],)},
        {"priority": math.nan},
        {"sampling": 7},
    ]
)
TOO_LONG = st.sampled_from([{"prompt_token_ids": [1] * 41}, {"sampling": cb.SamplingParams(max_tokens=60)}])
VALID = st.fixed_dictionaries({"prompt": st.integers(1, 12), "output": st.integers(1, 6), "at": st.integers(0, 9)})
MIX = st.lists(st.one_of(VALID, ODD_FIELDS, TOO_LONG, st.sampled_from([7, None, "poisoned"])), min_size=1, max_size=9)


@given(MIX, st.booleans())
def test_the_valid_get_the_tokens_that_they_get_without_the_others(mix, prefix_cache):
    limits = {"num_pages": 10, "max_num_seqs": 3, "max_num_batched_tokens": 8, "prefix_cache": prefix_cache}
    engine, alone = engine_of(**limits), engine_of(**limits)
    valid, refused, poisoned, listed = [], [], [], []
    for name, item in enumerate(mix):
        if item == "poisoned":
            poisoned.append(short_request(name, output=3))
            engine.runner.poison[name] = 1
        elif not isinstance(item, dict):
            with pytest.raises(InvalidRequestError):
                engine.add(item)
        elif "prompt" in item:
            valid.append(short_request(name, **item))
        else:
            try:
                refused.append(cb.Request(**{"request_id": name, "prompt_token_ids": [1], **item}))
            except InvalidRequestError:
                continue
    listed = [*poisoned, *refused, *valid]
    result = engine.run(sorted(listed, key=lambda r: r.request_id))
    again = [short_request(r.request_id, r.num_prompt_tokens, r.sampling.max_tokens, r.arrival_time) for r in valid]
    alone.run(again)
    assert [(r.output_token_ids, r.finish_reason) for r in valid] == [solo(r) for r in valid]
    assert [r.output_token_ids for r in valid] == [r.output_token_ids for r in again]
    assert {r.finish_reason for r in refused} <= {"rejected"}
    assert {r.finish_reason for r in poisoned} <= {"error"}
    assert len(result.requests) == len(listed)
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_available == 10


# ---- what a cost model says ------------------------------------------------------------------------------------------


class Costs(cb.Linear):
    """Says something else for a request that decodes alone, from its third token on."""

    def __init__(self, odd):
        super().__init__(step_s=0.5)
        object.__setattr__(self, "odd", odd)

    __slots__ = ("odd",)

    def seconds(self, shape):
        return self.odd if 8 < shape.decode_context < 13 else super().seconds(shape)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("odd", "error", "message"),
    [
        (math.inf, RunnerError, "step 3 at 1.5 s must be finite seconds ≥ 0, as must its end, got inf"),
        (-math.inf, RunnerError, "step 3 .* got -inf"),
        (math.nan, RunnerError, "step 3 .* got nan"),
        (-1e-9, RunnerError, "step 3 .* got -1e-09"),
        pytest.param(2**1024, RunnerError, "step 3 .* got inf", id="2**1024"),
        (1e308, RunnerError, r"step 4 at 1e\+308 s .* got 1e\+308"),
        ("1", CostModelError, "seconds of the cost model .*Costs.* must be a number of seconds, got '1'"),
        (None, CostModelError, "got None"),
        ([1.0], CostModelError, "got .1.0."),
        (Unprintable(), CostModelError, "got a Unprintable that can't be printed"),
    ],
)
def test_an_impossible_time_of_a_step_ends_the_run_with_an_error_that_names_both(odd, error, message, skip):
    backend = cb.Simulated(cost=Costs(odd))
    engine = simulated_engine(cb.ChunkedPrefill(), backend, **LIMITS, **({} if skip else {"skip_with": None}))
    requests = [cb.Request(i, [1] * 6, cb.SamplingParams(max_tokens=2 if i else 9)) for i in range(2)]
    with pytest.raises(error, match=message):
        engine.run(requests)
    assert [r.finish_reason for r in requests] == ["abort", "length"]
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_free == LIMITS["num_pages"]
    assert not engine.has_requests
