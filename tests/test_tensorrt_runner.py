"""The TensorRT runner on a fake GPU that computes with the executable spec; no real one has run it."""
# ruff: noqa: F811 - fixtures are imported, and then named as arguments

import sys
import threading

import numpy as np
import pytest
from fake_model import same_scores
from on_fake_gpu import LIMITS, SIZES, driver, engine, models, path, trt  # noqa: F401 - fixtures
from ragged import prompts_for, run_steps, step

import contbatch as cb
from contbatch.errors import (
    DeviceError,
    EngineBuildError,
    InvalidRequestError,
    ModelFileError,
    RunnerError,
)
from contbatch.model import random_model
from contbatch.runners.model_runner import ModelRunner
from contbatch.runners.reference import ReferenceModel
from contbatch.runners.tensorrt import TensorRTModel
from contbatch.runners.top_runner import TopRunner
from contbatch.step import PageMove
from contbatch.tensorrt_limits import EngineLimits, pages_within

pytest.importorskip("triton", reason="an engine is built with kernels made by Triton: pip install 'contbatch[ptx]'")

STEPS = [[(0, 5)], [(0, 1), (1, 9)], [(1, 1), (0, 1), (2, 3)], [(2, 1), (1, 1), (0, 1)]]
PROMPTS = [[3, 5, 8, 13, 21], [7] * 9, [1, 2], [100, 200, 30, 40, 50, 60, 70]]


def serve(runner, policy, **limits):
    scheduler = cb.Scheduler(policy, page_size=4, max_num_seqs=4, max_num_batched_tokens=12, **limits)
    sampling = cb.SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [cb.Request(i, ids, sampling) for i, ids in enumerate(PROMPTS)]
    result = cb.Engine(scheduler, runner).run(requests)
    return [r.output_token_ids for r in requests], result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_are_those_of_the_reference(dtype, models, driver, trt):
    sequences = prompts_for(STEPS, 256)
    expected = run_steps(ReferenceModel(models[dtype], 30, 4), sequences, STEPS)
    model = TensorRTModel(engine(models[dtype]), 30)
    got = run_steps(model, sequences, STEPS)
    assert [rows.tobytes() for rows in got] == [rows.tobytes() for rows in expected]
    assert [index for kind, index in trt.log if kind == "run"] == [1, 1, 1, 0]
    model.close()
    model.close()
    assert trt.contexts == 0
    driver.require_clean()


@pytest.mark.parametrize("num_host_pages", [0, 12])
def test_greedy_tokens_equal_the_reference_runners(num_host_pages, path, driver, trt):
    policy, pages = cb.ChunkedPrefill(), {"num_pages": 9, "num_host_pages": num_host_pages}
    with ModelRunner(ReferenceModel(path, 9, 4, num_host_pages)) as runner:
        expected, _ = serve(runner, policy, **pages)
    with ModelRunner(TensorRTModel(engine(path), 9, num_host_pages)) as runner:
        found, result = serve(runner, policy, **pages)
    assert found == expected
    assert result.requests.preemptions.sum() > 0
    copied = driver.calls.count("memcpy_dtoh_async") - sum(kind in ("run", "launch") for kind, _ in trt.log)
    assert (copied > 0) == (num_host_pages > 0)
    driver.require_clean()


def test_samples_of_a_prompt_share_their_row(path, driver, trt):
    sampling = cb.SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)
    answers = []
    for model in (ReferenceModel(path, 30, 4), TensorRTModel(engine(path), 30)):
        request = cb.Request(0, [1, 2, 3, 4, 5, 6], sampling)
        cb.Engine(cb.Scheduler(cb.ChunkedPrefill(), num_pages=30, page_size=4), ModelRunner(model)).run([request])
        answers.append([sample.output_token_ids for sample in request.samples])
        model.close()
    assert answers[0] == answers[1]
    assert "memcpy_dtod_async" in driver.calls  # the last page of the prompt is copied when a sample forks
    driver.require_clean()


MIXED = [
    cb.SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3),
    cb.SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, top_k=9, top_p=0.8, seed=1, logprobs=0),
    cb.SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, top_p=0.8, seed=2, prompt_logprobs=1),
    cb.SamplingParams(max_tokens=8, ignore_eos=True, repetition_penalty=1.5, logprobs=100),
]


def serve_mixed(runner):
    scheduler = cb.Scheduler(cb.ChunkedPrefill(), num_pages=30, page_size=4, max_num_seqs=4, max_num_batched_tokens=12)
    requests = [cb.Request(i, ids, p) for i, (ids, p) in enumerate(zip(PROMPTS, MIXED, strict=True))]
    cb.Engine(scheduler, runner).run(requests)
    return requests


def test_sampled_on_the_device_as_on_the_host(path, driver, trt):
    with ModelRunner(ReferenceModel(path, 30, 4)) as runner:
        expected = serve_mixed(runner)
    with TopRunner(TensorRTModel(engine(path, top_k=20), 30)) as runner:
        found = serve_mixed(runner)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.output_token_ids == theirs.output_token_ids
        for scores, wanted in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
            same_scores(scores, wanted and [w and {t: (p.logprob, p.rank) for t, p in w.items()} for w in wanted], 2e-6)
    driver.require_clean()


def test_only_the_largest_logits_come_back(path, driver, trt, monkeypatch):
    copied, copy = [], driver.memcpy_dtoh_async
    monkeypatch.setattr(driver, "memcpy_dtoh_async", lambda to, *rest: (copied.append(to.nbytes), copy(to, *rest)))
    model = TensorRTModel(engine(path, top_k=5), 30)
    arrays = step(([1, 2, 3], 0), ([4], 0), table=[[0], [1]], logits=[2, 3, 2])
    top = model.forward_top(arrays)
    assert sum(copied) == 2 * (5 * 8 + 4)
    copied.clear()
    rows = model.whole_rows(top, [2, 0])
    assert sum(copied) == 256 * 4
    expected = ReferenceModel(path, 4, 4).forward(arrays)
    np.testing.assert_array_equal(rows, expected[[2, 0]])
    best = np.sort(np.argsort(-expected, axis=1, kind="stable")[:, :5], axis=1)
    np.testing.assert_array_equal(top.ids, best)
    np.testing.assert_array_equal(top.values, np.take_along_axis(expected, best, 1))
    np.testing.assert_allclose(top.log_total, np.log(np.exp(expected.astype(float)).sum(1)), rtol=1e-6)
    model.forward_top(arrays)
    with pytest.raises(RunnerError, match="not the last one: its logits are gone"):
        model.whole_rows(top, [0])
    nothing = {name: array[:0] for name, array in arrays.items()} | {"cumulative_sequence_length": np.zeros(1, "i4")}
    assert model.forward_top(nothing).ids.shape == (0, 5)
    model.close()
    for use in (lambda: model.forward_top(arrays), lambda: model.whole_rows(top, [])):
        with pytest.raises(RunnerError, match="after close"):
            use()
    driver.require_clean()


def test_an_engine_that_gathers_pages(path, driver, trt, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    sequences = prompts_for(STEPS, 256)
    expected = run_steps(ReferenceModel(path, 30, 4), sequences, STEPS)
    folder = engine(path, attention="gather")
    assert (folder.name, trt.registered) == ("gather-sm90", [])
    assert engine(path, attention="gather") == folder
    assert len(trt.built) == 1
    model = TensorRTModel(folder, 30)
    got = run_steps(model, sequences, STEPS)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=0.1)  # float16; see test_tensorrt_gather for float32
    assert {kind for kind, _ in trt.log} == {"shape", "run"}
    page = 4 * 1 * 64 * 2 * 2 * model.config.num_layers
    assert max(len(allocation.bytes) for allocation in driver.memory.values()) >= 2 * 30 * page  # pages and spare ones
    assert driver.calls.count("memcpy_dtod_async") == len(STEPS)
    padding = step(([1, 2], 0), table=[[0]]) | {"cumulative_sequence_length": np.zeros(2, np.int32)}
    with pytest.raises(RunnerError, match="a step of padding alone"):
        model.forward(padding)
    model.move_pages([PageMove("copy", 0, 1)])
    model.close()
    driver.require_clean()


def test_rows_of_logits(path, driver, trt):
    model, reference = TensorRTModel(engine(path), 4), ReferenceModel(path, 4, 4)
    for wanted in ([], [2, 0, 2, 1], [1]):
        arrays = step(([1, 2, 3], 0), table=[[2]], logits=wanted)
        np.testing.assert_array_equal(model.forward(arrays), reference.forward(arrays))
    nothing = {name: array[:0] for name, array in arrays.items()} | {"cumulative_sequence_length": np.zeros(1, "i4")}
    assert model.forward(nothing).shape == (0, model.config.vocab_size)


def test_shapes_are_told_only_when_they_change(path, driver, trt):
    model = TensorRTModel(engine(path), 30)
    assert [entry for entry in trt.log if "cache" not in entry[1]] == []
    for past in range(3):
        model.forward(step(([5], past), table=[[0]]))
    assert [name for kind, name in trt.log if kind == "shape" and "cache" not in name] == list(
        step(([5], 0), table=[[0]])
    )


def test_moves_like_the_reference(path, driver, trt):
    models = TensorRTModel(engine(path), 6, 3), ReferenceModel(path, 6, 4, 3)
    moves = [("copy", 2, 4), ("out", 2, 1), ("copy", 0, 2), ("in", 1, 5), ("out", 4, 0), ("in", 0, 0)]
    for model in models:
        model.forward(step(([1, 2, 3], 0), ([4, 5, 6, 7], 0), table=[[2], [0]], logits=[6]))
        model.move_pages([PageMove(*move) for move in moves])
    for page in (2, 4, 5, 0):
        after = [model.forward(step(([9], 3), table=[[page]])) for model in models]
        np.testing.assert_array_equal(*after)
    for move, limit in ((("copy", 6, 0), 6), (("out", 0, 3), 3), (("in", -1, 0), 3)):
        with pytest.raises(RunnerError, match=rf"{move[0]}.* is not in \[0, {limit}\)"):
            models[0].move_pages([PageMove("copy", 0, 1), PageMove(*move)])


def test_one_allocation_holds_all_pages_and_a_fraction_says_how_many(path, driver, trt):
    folder = engine(path, EngineLimits(4, 12, 10**6, 4))
    before = len(driver.memory)
    model = TensorRTModel(folder, 0.25)
    page = 4 * 1 * 64 * 2 * 2 * model.config.num_layers
    largest = max(len(allocation.bytes) for allocation in driver.memory.values())
    others = sum(len(allocation.bytes) for allocation in driver.memory.values()) - largest  # scratch and buffers
    assert model.num_pages == int((driver.total - others) * 0.25) // page
    assert 0 <= largest - model.num_pages * page < 256 * 2 * 2
    assert len(driver.memory) - before == 2 + 5 + 4  # scratch, pages; five inputs, four outputs
    model.close()
    driver.require_clean()


@pytest.mark.parametrize("num_pages", [0, -1, 0.0, 1.0, float("nan"), True, "many", None])
def test_bad_numbers_of_pages(num_pages, path, driver, trt):
    with pytest.raises(InvalidRequestError, match="num_pages must be an integer ≥ 1 or a fraction"):
        TensorRTModel(engine(path), num_pages)
    driver.require_clean()


def test_too_much_is_refused_by_name(path, driver, trt):
    folder = engine(path, EngineLimits(4, 12, 10**6, 4))
    with pytest.raises(DeviceError, match=r"num_pages 1000000 of \d,\d+ bytes each don't fit in the [\d,]+ bytes"):
        TensorRTModel(folder, 10**6)
    with pytest.raises(DeviceError, match="num_pages 1e-07 of"):
        TensorRTModel(folder, 1e-7)
    with pytest.raises(RunnerError, match="built for at most 30 pages, got 31"):
        TensorRTModel(engine(path), 31)
    driver.require_clean()


def test_steps_that_are_refused_leave_everything_as_it_was(path, driver, trt):
    model = TensorRTModel(engine(path), 30)
    good = step(([1, 2, 3], 0), table=[[0]])
    expected = model.forward(good)
    bad = [
        (step(([1] * 13, 0), table=[range(4)]), r"input_ids.*\(13,\).* is more than the engine was built for"),
        (step(*[([1], 0)] * 5, table=[[i] for i in range(5)]), r"past_seqlens.*\(5,\)"),
        (step(([1], 0), table=[[30]]), "is page 30, outside"),
        (step(([256], 0), table=[[0]]), "input_ids must be in"),
        (step(([1], 0), table=[[0]], logits=[1]), "logits_indices must be in"),
    ]
    calls = len(driver.calls)
    for arrays, message in bad:
        with pytest.raises(RunnerError, match=message):
            model.forward(arrays)
    assert len(driver.calls) == calls
    np.testing.assert_array_equal(model.forward(good), expected)
    model.close()
    for use in (lambda: model.forward(good), lambda: model.move_pages([])):
        with pytest.raises(RunnerError, match="after close"):
            use()


def test_other_threads(path, driver, trt):
    with ModelRunner(TensorRTModel(engine(path), 30)) as runner:
        arrays = step(([1, 2, 3], 0), table=[[0]])
        expected, found = runner.model.forward(arrays), []
        threads = [threading.Thread(target=lambda: found.append(runner.model.forward(arrays))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [rows.tobytes() for rows in found] == [expected.tobytes()] * 4
    driver.require_clean()


def move_and_run(model, arrays):
    model.move_pages([PageMove("copy", 0, 1)])
    return model.forward(arrays)


FAULTS = ["memcpy_htod_async", "memcpy_dtoh_async", "execute_async_v3", "synchronize", "memcpy_dtod_async"]


@pytest.mark.parametrize("call", FAULTS)
def test_errors_of_cuda_are_typed_and_leave_the_model_closable(call, path, driver, trt):
    model = TensorRTModel(engine(path), 30, use_graphs=False)
    arrays = step(([1, 2, 3], 0), table=[[0]])
    model.forward(arrays)
    driver.failing = {call: 0}
    with pytest.raises(DeviceError, match=f"CUDA on Fake GPU 0: .*{call} failed"):
        move_and_run(model, arrays)
    with pytest.raises(DeviceError, match="failed"):
        model.forward(arrays)
    model.close()
    assert (driver.retained, driver.current_stack(), trt.contexts) == (0, [], 0)


@pytest.mark.parametrize("call", ["mem_alloc", "pagelocked_empty", "Stream", "synchronize"])
def test_errors_at_each_allocation_free_the_others(call, path, driver, trt):
    folder, before = engine(path), len(driver.calls)
    TensorRTModel(folder, 30, 3).close()
    for succeed in range(driver.calls[before:].count(call) - (call == "synchronize") * 2):
        driver.failing, driver.broken = {call: succeed}, False
        with pytest.raises(DeviceError, match=r"bytes wanted|failed"):
            TensorRTModel(folder, 30, 3)
        assert (driver.retained, driver.current_stack()) == (0, [])
        if call in ("mem_alloc", "pagelocked_empty"):
            driver.require_clean()


def test_an_interrupt_waits_for_the_copies(path, driver, trt, monkeypatch):
    model = TensorRTModel(engine(path), 30)
    arrays = step(([1, 2, 3], 0), table=[[0]])
    with monkeypatch.context() as patch:
        patch.setattr(driver, "memcpy_dtoh_async", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.forward(arrays)
    assert [stream.queue for stream in driver.streams if stream.queue] == []
    np.testing.assert_array_equal(model.forward(arrays), ReferenceModel(path, 4, 4).forward(arrays))


@pytest.mark.parametrize(
    ("faults", "error", "message"),
    [
        ({"load": "engine of SM 80"}, EngineBuildError, "can't load the engine: engine of SM 80"),
        ({"start": "no kernel image"}, EngineBuildError, "TensorRT doesn't start: no kernel image"),
        ({"shape": "key_cache.0"}, RunnerError, r"TensorRT refuses set_input_shape key_cache.0 \(30, 4, 1, 64\)"),
        ({"run": 1}, RunnerError, "TensorRT refuses execute_async_v3: TensorRT gave no reason"),
    ],
)
def test_what_tensorrt_refuses_is_told(faults, error, message, path, driver, trt):
    folder = engine(path)
    trt.faults.update(faults)
    with pytest.raises(error, match=message):
        TensorRTModel(folder, 30).forward(step(([1], 0), table=[[0]]))


def test_all_but_a_little_of_the_memory_may_go_to_pages(path, driver, trt):
    """Whatever else a step needs is allocated before pages are counted."""
    with ModelRunner(TensorRTModel(engine(path, EngineLimits(4, 12, 10**6, 4)), 0.9999)) as runner:
        assert runner.model.forward(step(([1, 2, 3], 0), table=[[0]], logits=[2])).shape == (1, 256)
    driver.require_clean()


def test_a_fraction_is_of_no_more_pages_than_the_engine_was_built_for(path, driver, trt):
    model = TensorRTModel(engine(path), 0.5)
    assert model.num_pages == LIMITS.num_pages == 30
    model.close()
    driver.require_clean()


def test_a_cache_has_no_more_elements_than_tensorrt_takes():
    config = random_model(0, **SIZES).config
    assert pages_within(2**40, config, 16) == (2**31 - 1) // (16 * 1 * 64)
    assert pages_within(10 * 16 * 64 * 2 * 2 * config.num_layers, config, 16) == 10


def test_a_folder_without_an_engine(path, tmp_path, driver, trt):
    with pytest.raises(ModelFileError, match="no engine that `build_engine` made"):
        TensorRTModel(tmp_path, 30)
    for text in ("{}", '{"config": {}, "dtype": "float16"}', "[]"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ModelFileError, match=r"lacks .*limits, options, profiles|has no attribute"):
            TensorRTModel(tmp_path, 30)
