"""Steps of decoding as CUDA graphs, on the fakes: the protocol of capture, and that padding touches no page."""
# ruff: noqa: F811 - fixtures are imported, and then named as arguments

import inspect
import logging
import sys

import fake_graphs
import fake_tensorrt
import numpy as np
import pytest
from hypothesis import given, settings
from on_fake_gpu import driver, engine, models, path, trt  # noqa: F401 - fixtures
from paged_problem import problems, same_bits
from ragged import prompts_for, run_steps, step

from contbatch.errors import DeviceError
from contbatch.inputs import TYPES, padded
from contbatch.plugins.paged_attention.contract import validate
from contbatch.plugins.paged_attention.reference import paged_attention
from contbatch.runners.reference import ReferenceModel
from contbatch.runners.tensorrt import TensorRTModel
from contbatch.tensorrt_limits import buckets

pytest.importorskip("triton", reason="an engine is built with kernels made by Triton: pip install 'contbatch[ptx]'")

STEPS = [[(0, 5), (1, 3)], *[[(0, 1), (1, 1), (2, 1)], [(2, 1), (0, 1)], [(1, 1)]] * 3, [(0, 2), (2, 1)]]
"""Sizes 8; 3, 2 and 1, three times; 3 tokens of two sequences. Of LIMITS, steps of at most 4 are captured."""


def launched(trt):
    return [size for kind, size in trt.log if kind == "launch"]


def captured(trt):
    return sum(kind == "capture" for kind, _ in trt.log)


def test_sizes():
    assert [buckets(n) for n in (1, 2, 3, 4, 6, 64)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16, 32, 64],
    ]


@settings(max_examples=25)
@given(problems(pages=[np.float32], past=20, new=(0, 1, 1, 3), page_sizes=(1, 3, 16), head_sizes=(8,)))
def test_padding_changes_no_result_and_no_page(problem):
    if not len(problem.qkv):
        return
    ids = np.arange(len(problem.qkv))
    arrays = ids, problem.cumulative, problem.past, problem.table, ids[:1]
    size, width = max(len(ids), len(problem.past)) + 3, problem.table.shape[1] + 2
    new = padded(dict(zip(TYPES, arrays, strict=True)), size, width)
    assert [array.shape for array in new.values()] == [(size,), (size + 1,), (size,), (size, width), (size,)]
    assert [array.dtype for array in new.values()] == [array.dtype for array in arrays]
    indices = new["cumulative_sequence_length"], new["past_seqlens"], new["block_table"]
    validate(*indices, size, len(problem.caches[0]), problem.page_size, 10**6)
    expected, *pages = problem.reference()
    qkv = np.concatenate([problem.qkv, np.ones((size - len(ids), problem.qkv.shape[1]), np.float32)])
    tables = problem.steps()[3:]
    heads = {"num_heads": problem.heads, "kv_num_heads": problem.kv_heads, "do_rotary": int(problem.rotary_dim > 0)}
    caches = problem.caches[0], problem.caches[1]
    output, *changed = paged_attention(qkv, None, None, *caches, *indices, *tables, **heads, **problem.attributes)
    assert same_bits([output[: len(ids)], *changed], [expected, *pages])


def all_pages(model, driver):
    """The bytes of each page of each cache, from the fake's memory."""
    page_bytes = model.page_size * model.config.kv_num_heads * model.config.head_size * 2
    at = model._pages.addresses()
    names = [name for name in at if "_out" not in name]
    return {
        name: driver.at(at[name], model.num_pages * page_bytes).reshape(model.num_pages, page_bytes) for name in names
    }


def test_steps_are_launched_and_touch_no_other_page(path, driver, trt):
    sequences = prompts_for(STEPS, 256)
    reference = ReferenceModel(path, 30, 4)
    expected = run_steps(reference, sequences, STEPS)
    model = TensorRTModel(engine(path), 30)
    got = run_steps(model, sequences, STEPS)
    assert [rows.tobytes() for rows in got] == [rows.tobytes() for rows in expected]
    assert launched(trt) == [4, 2, 1] * 2 + [4]
    assert captured(trt) == 3
    fresh = 0
    for name, pages in all_pages(model, driver).items():
        for page, theirs in zip(pages, reference.caches[name], strict=True):
            slots = theirs.reshape(4, -1)
            for slot, bits in zip(slots, page.reshape(4, -1), strict=True):
                untouched = not slot.any()
                fresh += untouched
                assert bits.tobytes() == (b"\xff" * len(bits) if untouched else slot.tobytes())
    assert fresh > 100
    model.close()
    model.close()
    assert trt.contexts == 0
    driver.require_clean()


def test_inside_a_capture_is_one_call_and_nothing_else(path, driver, trt):
    model = TensorRTModel(engine(path), 30)
    before = len(driver.calls)
    for past in range(3):
        model.forward(step(([5], past), table=[[0]]))
    queued = ["memcpy_htod_async"] * 5
    finished = ["memcpy_dtoh_async", "synchronize"]
    # Captured after the first step was waited for; the fake refuses any other call meanwhile.
    assert driver.calls[before:] == [
        *queued,
        "execute_async_v3",
        *finished,
        "execute_async_v3",
        *(queued + finished) * 2,
    ]
    calls = ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy", "cuGraphLaunch"]
    assert driver.graphs.calls == [*calls, "cuGraphLaunch"]
    model.close()
    assert driver.graphs.calls[-1] == "cuGraphExecDestroy"
    driver.require_clean()


@pytest.mark.parametrize("call", ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "TensorRT"])
def test_where_capture_fails_it_is_told_once_and_the_answers_are_right(call, path, driver, trt, caplog):
    sequences = prompts_for(STEPS, 256)
    expected = run_steps(ReferenceModel(path, 30, 4), sequences, STEPS)
    model = TensorRTModel(engine(path), 30)
    if call == "TensorRT":
        trt.faults["capture"] = 1
    else:
        driver.graphs.failing = {call}
    caplog.set_level(logging.WARNING, "contbatch")
    got = run_steps(model, sequences, STEPS)
    assert [rows.tobytes() for rows in got] == [rows.tobytes() for rows in expected]
    assert launched(trt) == []
    [record] = caplog.records
    told = "TensorRT refuses execute_async_v3" if call == "TensorRT" else f"CUDA: {call} failed: CUDA_ERROR_"
    assert record.getMessage().startswith(f"no CUDA graphs: {told}")
    assert driver.graphs.calls.count("cuStreamBeginCapture") == 1
    model.close()
    driver.require_clean()


def test_an_interrupt_ends_the_capture(path, driver, trt, monkeypatch):
    model, arrays = TensorRTModel(engine(path), 30), step(([5], 0), table=[[0]])
    execute = fake_tensorrt.IExecutionContext.execute_async_v3

    def interrupted(context, stream):
        if driver.streams[-1].captured is not None:
            raise KeyboardInterrupt
        return execute(context, stream)

    with monkeypatch.context() as patch:
        patch.setattr(fake_tensorrt.IExecutionContext, "execute_async_v3", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.forward(arrays)
    assert driver.streams[-1].captured is None
    expected = ReferenceModel(path, 4, 4).forward(arrays)
    for _ in range(3):  # captured now, and launched
        np.testing.assert_array_equal(model.forward(arrays), expected)
    assert len(launched(trt)) == 2
    model.close()
    driver.require_clean()


def test_a_launch_that_fails_is_an_error(path, driver, trt):
    model, arrays = TensorRTModel(engine(path), 30), step(([5], 0), table=[[0]])
    model.forward(arrays)
    driver.graphs.failing = {"cuGraphLaunch"}
    with pytest.raises(DeviceError, match="CUDA: cuGraphLaunch failed: CUDA_ERROR_INVALID_VALUE"):
        model.forward(arrays)
    model.close()
    driver.require_clean()


@pytest.mark.parametrize("use_graphs", [True, False])
def test_without_graphs(use_graphs, path, driver, trt, monkeypatch, caplog):
    folder = engine(path)
    if use_graphs:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    caplog.set_level(logging.WARNING, "contbatch")
    model = TensorRTModel(folder, 30, use_graphs=use_graphs)
    assert trt.contexts == 2
    assert [r.getMessage()[:61] for r in caplog.records] == (
        ["no CUDA graphs: pip install 'contbatch[tensorrt]' (import of "] * use_graphs
    )
    sequences = prompts_for(STEPS, 256)
    expected = run_steps(ReferenceModel(path, 30, 4), sequences, STEPS)
    assert [rows.tobytes() for rows in run_steps(model, sequences, STEPS)] == [rows.tobytes() for rows in expected]
    model.close()
    driver.require_clean()


def test_the_fake_has_functions_of_the_real_one():
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings: pip install 'contbatch[tensorrt]'")
    fake = fake_graphs.GraphDriver(None)
    names = [name for name in dir(fake) if name.startswith("cu")]
    assert len(names) == 6
    for name in names:
        ours, theirs = inspect.signature(getattr(fake, name)), inspect.signature(getattr(real, name))
        assert list(ours.parameters) == list(theirs.parameters), name
    for kind in (fake_graphs.CUresult, fake_graphs.CUstreamCaptureMode):
        theirs = getattr(real, kind.__name__)
        assert {member.name: int(getattr(theirs, member.name)) for member in kind} == {m.name: int(m) for m in kind}
        assert [getattr(theirs, member.name).name for member in kind] == [member.name for member in kind]
