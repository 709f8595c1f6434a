"""NumPy's numbers are taken wherever Python's are, and are Python's from then on."""

import json
from dataclasses import fields, replace
from fractions import Fraction

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt
from fake_runner import engine_of

import contbatch as cb
from contbatch import arrivals, lengths
from contbatch.backends import require_backend, require_limits, within
from contbatch.calibrate import whole
from contbatch.checks import python_number
from contbatch.description import describe, digest
from contbatch.errors import ContbatchError
from contbatch.export import export_onnx
from contbatch.expressions import expression
from contbatch.model import random_model
from contbatch.runners.cpu import CPUModel
from contbatch.runners.reference import ReferenceModel
from contbatch.tensorrt_build import BuildOptions
from contbatch.tensorrt_limits import EngineLimits
from contbatch.turn import Segment

AT_4 = arrivals.GammaArrivals(4.0, 2.0)
WORKLOAD = cb.Poisson(rate=4.0, num_requests=4, prompt=5, output=3, prefix=cb.SharedPrefix(4, 2, 0.5))
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "max_position": 64}
SPEEDS = {"memory_bytes_per_s": 1e12, "peer_bytes_per_s": 1e11, "host_bytes_per_s": 1e10}
BIASED = {"logit_bias": {3: 0.5}, "stop_token_ids": (1, 2), "logprobs": 2, "prompt_logprobs": 1}
SETTINGS = [
    cb.SamplingParams(8, 1, 2, 0.5, 5, 0.5, 0.25, 1.0, 1.0, 1.5, seed=3, min_tokens=2, **BIASED),
    cb.BeamSearchParams(2, 8, 0.5),
    cb.Client(priority=1.0, ttft_target_s=0.5, tpot_target_s=0.25, max_tokens=6),
    cb.Turn(1, 0.5, (Segment(1, 3),), 3),
    cb.Trace((cb.Turn(0, 0.0, ((1, 3),), 3),), "a trace", 1, 1),
    WORKLOAD,
    cb.OpenLoop(arrivals=AT_4, num_requests=4, seed=2),
    cb.ClosedLoop(num_clients=2, num_requests=4, think_s=0.5, seed=2),
    cb.Conversations(arrivals=AT_4, num_conversations=2, turns_each=2, think_s=0.5, seed=2),
    cb.AgentLoops(arrivals=AT_4, num_tasks=2, tool_calls=2, tool_s=0.5, seed=2),
    *(WORKLOAD.prefix, arrivals.PoissonArrivals(2.5), AT_4, arrivals.WeibullArrivals(2.0, 0.5)),
    *(arrivals.BurstArrivals(2, 0.5), arrivals.AllAtOnce(0.5), arrivals.DiurnalArrivals((1.0, 2), 0.5)),
    *(lengths.Fixed(3), lengths.Uniform(2, 5), lengths.LogNormal(4.0, 0.5, 8, 2), lengths.Zipf(0.5, 8, 2)),
    *(lengths.Geometric(4.0, 8), lengths.CappedExponential(4.0, 8), lengths.Quantiles((0, 0.5, 1), (1, 2, 4))),
    cb.Simulated(tensor_parallel=2, memory_utilization=0.5, kv_tokens=4096),
    cb.Roofline("H100", "opt-13b", "f16", 2, 0.5, 0.5, 0.5, 0.125, 0.125),
    cb.Linear(step_s=0.5, few_rows=2, min_rows=2, resize_s=0.25),
    cb.Measured(step_s=0.5, num_steps=8, error=0.25, bias=0.125),
    cb.Hardware("x", {"f16": 1e12}, memory_bytes=2**30, source="", **SPEEDS),
    cb.ModelShape(num_heads=4, kv_num_heads=2, head_size=16, position_rows=2, **SIZES),
    *(cb.Link(bytes_per_s=2.0, latency_s=0.5), cb.Prices(gpu_hour=2.5, gpus=2, api_prompt=0.5, api_output=0.25)),
    *(cb.StaticBatching(4), cb.Orca("max", 512), cb.ShortestJobFirst("prediction", 0.5, 3)),
    *(cb.FairShare(input_weight=0.5, output_weight=2.5), cb.DeadlineFirst(least_ttft_s=0.5)),
    cb.Experiment(workload=WORKLOAD, num_pages=64, page_size=4, max_model_len=64, num_host_pages=8),
    *(BuildOptions(2, 2**20, top_k=8), EngineLimits(4, 32, 8, 16)),
]


def changed(value, to):
    """A value with every number in it as NumPy's; what holds others stays what it is."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return to(value)
    if isinstance(value, Segment):
        return Segment(*map(to, value))
    if isinstance(value, tuple):
        return tuple(changed(item, to) for item in value)
    return {key: changed(item, to) for key, item in value.items()} if isinstance(value, dict) else value


def as_numpy(value):
    return np.float64(value) if isinstance(value, float) else np.int64(value)


def short(value):
    return np.float32(value) if isinstance(value, float) else np.int16(value) if value < 2**15 else np.int64(value)


def numbers_in(value):
    if isinstance(value, (tuple, dict)):
        for item in value.items() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, (int, float, np.number)):
        yield value


def by_name(setting):
    return {f.name: getattr(setting, f.name) for f in fields(setting) if f.init}


@pytest.mark.parametrize("to", [as_numpy, short])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: type(setting).__name__)
def test_settings_of_numpy_numbers_are_those_of_python_numbers(setting, to):
    given = {name: changed(value, to) for name, value in by_name(setting).items()}
    assert any(isinstance(number, np.number) for value in given.values() for number in numbers_in(value))
    made = type(setting)(**given)
    expected = replace(setting, **{k: changed(v, lambda n: to(n).item()) for k, v in by_name(setting).items()})
    assert made == expected
    assert (repr(made), describe(made)) == (repr(expected), describe(expected))
    assert digest(describe(made)) == digest(describe(expected))
    assert json.loads(json.dumps(describe(made))) == describe(made)
    for value in by_name(made).values():
        assert {type(number) for number in numbers_in(value)} <= {bool, int, float}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: type(setting).__name__)
def test_truth_values_are_no_numbers(setting):
    for name, value in by_name(setting).items():
        if type(value) in (int, float) and name not in ("num_steps", "error", "bias"):  # what a fit says of itself
            for truth in (True, np.True_):
                with pytest.raises(ContbatchError, match=name):
                    replace(setting, **{name: truth})


def test_what_numbers_become():
    for given, number in ((np.uint8(200), 200), (np.float32(0.1), float(np.float32(0.1))), (np.float64(2), 2.0)):
        assert (python_number(given), type(python_number(given))) == (number, type(number))
    others = [True, np.True_, None, "1", 1j, np.array(1), Fraction(10**400), np.complex64(1), 10**400]
    others += [np.timedelta64(4, unit) for unit in ("ns", "s")] + [np.timedelta64("NaT")]
    assert all(python_number(other) is other for other in others)


def test_times_with_a_unit_are_no_numbers():
    for time in (np.timedelta64(4, "ns"), np.timedelta64(4, "s")):
        for change in ({"rate": time}, {"num_requests": time}):
            with pytest.raises(ContbatchError, match=f"{next(iter(change))} must be"):
                WORKLOAD.replace(**change)
        with pytest.raises(ContbatchError, match="delay_s must be finite seconds ≥ 0, got"):
            cb.Turn(0, time, ((1, 3),), 3)


def test_each_number_of_a_turn_becomes_one_of_python_by_itself():
    for name, value in (("session", np.int64(1)), ("delay_s", np.float64(0.5)), ("output_tokens", np.int64(3))):
        turn = cb.Turn(**{"session": 1, "delay_s": 0.5, "prompt": ((1, 3),), "output_tokens": 3} | {name: value})
        assert type(getattr(turn, name)) is type(value.item())


def test_a_sweep_over_numpy_numbers_is_one_over_python_numbers():
    experiment = cb.Experiment(workload=WORKLOAD)
    rates, pages = np.arange(1, 4), np.array([64, 128, 256], np.uint16)
    ours = [
        experiment.replace(workload=WORKLOAD.replace(rate=int(r)), num_pages=int(p))
        for r, p in zip(rates, pages, strict=True)
    ]
    theirs = [
        experiment.replace(workload=WORKLOAD.replace(rate=r), num_pages=p) for r, p in zip(rates, pages, strict=True)
    ]
    assert [point.hash for point in theirs] == [point.hash for point in ours]
    assert [point.to_json() for point in theirs] == [point.to_json() for point in ours]
    assert list(map(expression, theirs)) == list(map(expression, ours))
    with pytest.raises(ContbatchError, match=r"num_requests must be an integer in \[1, 10000000\], got 0"):
        WORKLOAD.replace(num_requests=np.int64(0))
    with pytest.raises(ContbatchError, match="rate must be a finite number > 0, got nan"):
        WORKLOAD.replace(rate=np.float32("nan"))


class Slow(cb.ChunkedPrefill):
    def __init__(self, share):
        object.__setattr__(self, "share", share)


def test_a_policy_of_ones_own_with_numpy_numbers_is_described_as_with_python_numbers():
    one, other = (cb.Experiment(workload=WORKLOAD, policy=Slow(share)) for share in (np.int64(2), 2))
    assert (one.hash, one.to_json()) == (other.hash, other.to_json())


def test_a_request_of_numpy_numbers():
    to = np.int16
    given = {"arrival_time": to(2), "priority": to(3), "ttft_target_s": np.float32(0.5), "tpot_target_s": to(1)}
    request = cb.Request(to(7), num_prompt_tokens=to(5), eos_token_ids=np.array([1, 2]), **given)
    told = [request.request_id, request.num_prompt_tokens, *request.eos_token_ids]
    told += [getattr(request, name) for name in given]
    assert told == [7, 5, 1, 2, 2, 3, 0.5, 1]
    assert {type(number) for number in told} == {int, float}
    request = cb.Request(0, [1], expected_output_tokens=to(5))
    assert type(request.expected_output_tokens) is int
    with pytest.raises(ContbatchError, match="priority of request 0 must be a finite number, got nan"):
        cb.Request(0, [1], arrival_time=to(2), priority=np.float32("nan"))
    with pytest.raises(ContbatchError, match=r"arrival_time of request 0 must be finite seconds ≥ 0, got -1"):
        cb.Request(0, [1], arrival_time=to(-1))


def test_limits_of_engines():
    to = np.int8  # 100 + 100 does not fit
    ours = {"num_pages": 100, "max_num_seqs": 100, "max_num_batched_tokens": 100, "num_host_pages": 100}
    ours |= {"page_size": 100, "max_model_len": 100}
    theirs = {name: to(value) for name, value in ours.items()}
    scheduler = cb.Scheduler(cb.Orca(), **theirs)
    kept = [scheduler.pool.num_pages, scheduler.pool.page_size, scheduler.swap_space.num_pages]
    kept += [scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_model_len]
    assert (kept, {*map(type, kept)}) == ([100] * 6, {int})
    one, other = (cb.simulate(WORKLOAD, **limits) for limits in (ours, theirs))
    assert one.requests.equals(other.requests)
    assert type(other.max_num_seqs) is int
    assert other.provenance.description == one.provenance.description
    limits = {name: value for name, value in theirs.items() if name != "max_model_len"}
    assert {*map(type, require_limits("cpu", cb.Orca(), limits).values())} == {int}
    assert type(require_limits("tensorrt", cb.Orca(), {**limits, "num_pages": np.float32(0.5)})["num_pages"]) is float
    assert type(require_backend("cpu", "paged", None, None, to(2))) is int
    assert within(ours, {"num_pages": to(7)}) == {"num_pages": 7}
    with pytest.raises(ContbatchError, match="num_pages must be an integer ≥ 1, got 'x'"):
        require_limits("cpu", cb.Orca(), {**limits, "num_pages": "x"})
    with pytest.raises(ContbatchError, match="at most the 5 pages of this LLM, got 7"):
        within({"num_pages": 5}, {"num_pages": to(7)})


@pytest.mark.parametrize("kind", [CPUModel, ReferenceModel])
def test_pages_of_a_model(kind, tmp_path):
    to = np.int8  # 100 · 8 does not fit
    threads = {"num_threads": to(1)} if kind is CPUModel else {}
    path = export_onnx(random_model(0), tmp_path / "model.onnx")
    model = kind(path, to(100), to(8), num_host_pages=to(2), **threads)
    kept = [model.num_pages, model.page_size, model.num_host_pages]
    assert (kept, {*map(type, kept)}) == ([100, 8, 2], {int})
    assert model.forward(whole([1, 2, 3])).shape == (3, 256)
    model.close()


class Least(cb.Router):
    def choose(self, request, loads):
        return np.argmin(loads.tokens)


def test_fleets():
    one = cb.simulate_fleet(WORKLOAD, 2, cb.LeastTokens(), max_num_seqs=2)
    other = cb.simulate_fleet(WORKLOAD, np.int64(2), Least(), max_num_seqs=np.int8(2))
    assert one.together.requests.equals(other.together.requests)
    counts = {"num_prefill": np.int64(1), "num_decode": np.int32(1), "page_size": np.int8(8)}
    told = cb.simulate_disaggregated(WORKLOAD, **counts).transfers
    assert told.equals(cb.simulate_disaggregated(WORKLOAD, num_prefill=1, num_decode=1, page_size=8).transfers)
    assert repr(cb.PowerOfTwo(np.int64(3))) == "PowerOfTwo(seed=3)"
    assert repr(cb.PrefixAffinity(np.int64(8), np.float32(16))) == repr(cb.PrefixAffinity(8, 16.0))


def test_questions_about_results():
    result = engine_of().run(WORKLOAD.requests())
    for ask in (
        lambda to: cb.over_time(result, to(2)).equals(cb.over_time(result, 2)),
        lambda to: cb.by_client(result, until_s=to(2)).equals(cb.by_client(result, until_s=2)),
        lambda to: result.meets(e2e_s=to(2)).equals(result.meets(e2e_s=2)),
        lambda to: cb.limits_bound({"a": result}, at_least=to(1)).equals(cb.limits_bound({"a": result}, at_least=1)),
        lambda to: cb.Prices().api_request(to(3), to(2)) == cb.Prices().api_request(3, 2),
        lambda to: cb.find_capacity(float, lambda rate: rate < 5, low=to(1), high=to(9)).rate < 5,
        lambda to: cb.Roofline("H100", "opt-13b").kv_capacity(to(1)) == cb.Roofline("H100", "opt-13b").kv_capacity(1),
    ):
        assert ask(np.int8)
        assert ask(np.float32)


def test_draws_and_pictures():
    for draw in (AT_4.times, lengths.Uniform(2, 9).draw):
        assert draw(np.int64(5), np.int64(2), "x").tolist() == draw(5, 2, "x").tolist()
    log = cb.DecisionLog()
    cb.simulate(WORKLOAD, log=log)
    player = cb.replay(log)
    player.step = np.int64(1)
    with pytest.raises(ContbatchError, match="step must be in"):
        player.step = np.int64(-1)
    result = engine_of().run(WORKLOAD.requests())
    drawn = [cb.plots.fairness(result, input_weight=weight) for weight in (2, np.int8(2))]
    assert drawn[0].lines[0].get_ydata().tolist() == drawn[1].lines[0].get_ydata().tolist()
    plt.close("all")


def test_parts_of_a_trace():
    trace = cb.Trace(WORKLOAD.turns(), "a")
    assert trace.sample(np.int64(2), np.int64(1)) == trace.sample(2, 1)
    assert trace.head(np.int8(2)) == trace.head(2)
    assert trace.at_rate(np.float32(2)) == trace.at_rate(2.0)
    assert trace.with_arrivals(AT_4, np.int64(3)) == trace.with_arrivals(AT_4, 3)
