"""What must not break a runner: wrong files, wrong arrays, interrupts, a close at any time."""

import gc
import os
import signal
import threading

import numpy as np
import onnx
import pytest
from ragged import step
from tracing import lines_of, raise_at

from contbatch.errors import InvalidRequestError, ModelFileError, RunnerError, UnsupportedModelError
from contbatch.export import export_onnx
from contbatch.model import random_model
from contbatch.runners.cpu import CPUModel
from contbatch.runners.model_runner import ModelRunner
from contbatch.runners.reference import ReferenceModel

BOTH = pytest.mark.parametrize("kind", [CPUModel, ReferenceModel])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return export_onnx(random_model(0), tmp_path_factory.mktemp("faults") / "m.onnx")


# ---- files -----------------------------------------------------------------------------------------------------------


def no_file(path):
    path.unlink()


def no_onnx(path):
    path.write_bytes(b"not an ONNX file")


def half_a_file(path):
    path.write_bytes(path.read_bytes()[:2000])


def a_folder(path):
    path.unlink()
    path.mkdir()


def not_ours(path):
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])), path)


def no_weights(path):
    path.with_name("m.onnx.data").unlink()


def half_the_weights(path):
    data = path.with_name("m.onnx.data")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


@BOTH
@pytest.mark.parametrize("damage", [no_file, no_onnx, half_a_file, a_folder, not_ours, no_weights, half_the_weights])
def test_damaged_files_are_named(kind, damage, tmp_path):
    path = export_onnx(random_model(0), tmp_path / "m.onnx")
    kind(path, 2, 16).close()
    damage(path)
    with pytest.raises(ModelFileError, match=r"m\.onnx"):
        kind(path, 2, 16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_cpu_refuses_small_dtypes_which_the_reference_takes(dtype, tmp_path):
    path = export_onnx(random_model(0), tmp_path / "m.onnx", dtype)
    for precision in ("f32", "bf16"):
        with pytest.raises(UnsupportedModelError, match=f"m.onnx: holds {dtype}, the CPU runner takes float32"):
            CPUModel(path, 2, precision=precision)
    assert ReferenceModel(path, 2, 16).forward(step(([1], 0), table=[[0]])).dtype == np.float32


@BOTH
@pytest.mark.parametrize("name", ["num_pages", "page_size"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "4", None])
def test_sizes_are_integers_of_at_least_one(kind, name, value, path):
    with pytest.raises(InvalidRequestError, match=f"{name} must be an integer ≥ 1, got {value!r}"):
        kind(path, **{"num_pages": 2, "page_size": 16, name: value})


@pytest.mark.parametrize(
    "options", [{"precision": "f16"}, {"precision": None}, {"kv_dtype": "f16"}, {"num_threads": 0}]
)
def test_options_of_the_cpu_are_named(options, path):
    with pytest.raises(InvalidRequestError, match=f"{next(iter(options))} must be"):
        CPUModel(path, 2, **options)


# ---- arrays ----------------------------------------------------------------------------------------------------------

GOOD = step(([1, 2, 3], 0), table=[[0, 1]])
BAD = {
    "a page beyond the pool": {"block_table": np.array([[4, 1]], np.int32)},
    "a page far beyond": {"block_table": np.array([[2**31 - 1, 1]], np.int32)},
    "an unmapped page": {"block_table": np.array([[-1, 1]], np.int32)},
    "a negative page": {"block_table": np.array([[-4, 1]], np.int32)},
    "no page": {"block_table": np.zeros((1, 0), np.int32)},
    "one page twice": {"block_table": np.array([[1, 1]], np.int32), "past_seqlens": np.array([2], np.int32)},
    "no table": {"block_table": None},
    "a list": {"block_table": [[0, 1]]},
    "int64 pages": {"block_table": np.array([[0, 1]])},
    "a row of pages": {"block_table": np.array([0, 1], np.int32)},
    "a token beyond the vocabulary": {"input_ids": np.array([1, 256, 3])},
    "a negative token": {"input_ids": np.array([1, -1, 3])},
    "float tokens": {"input_ids": np.array([1, np.nan, 3])},
    "int32 tokens": {"input_ids": np.array([1, 2, 3], np.int32)},
    "tokens in two dimensions": {"input_ids": np.array([[1, 2, 3]])},
    "a number": {"input_ids": np.array(3)},
    "too few tokens": {"input_ids": np.array([1, 2]), "logits_indices": np.array([0])},
    "a row beyond the step": {"logits_indices": np.array([3])},
    "a negative row": {"logits_indices": np.array([-1])},
    "rows in two dimensions": {"logits_indices": np.array([[0]])},
    "decreasing ends": {"cumulative_sequence_length": np.array([3, 0], np.int32)},
    "ends that don't begin at 0": {"cumulative_sequence_length": np.array([1, 3], np.int32)},
    "too many ends": {"cumulative_sequence_length": np.array([0, 2, 3], np.int32)},
    "a negative past": {"past_seqlens": np.array([-1], np.int32)},
    "a past beyond the pages": {"past_seqlens": np.array([6], np.int32)},
    "a past beyond the rotary tables": {
        "past_seqlens": np.array([600], np.int32),
        "block_table": np.arange(200, dtype=np.int32)[None],
    },
}


@BOTH
def test_bad_arrays_are_refused_and_change_nothing(kind, path):
    """Two pages of 4 are filled, then each bad step is tried on them, then they are read: as if nothing had been."""
    prompt, decode = step(([5] * 7, 0), table=[[0, 1]]), step(([6], 7), table=[[0, 1]])
    untouched, model = kind(path, 4, 4), kind(path, 4, 4)
    untouched.forward(prompt)
    expected = untouched.forward(decode).copy()
    model.forward(prompt)
    for name, changes in BAD.items():
        with pytest.raises(RunnerError):
            pytest.fail(f"{name}: logits of {model.forward(GOOD | changes).shape}")
    for name in GOOD:
        with pytest.raises(RunnerError, match=name):
            model.forward({other: array for other, array in GOOD.items() if other != name})
    np.testing.assert_array_equal(model.forward(decode), expected)


@BOTH
def test_closed_is_closed(kind, path):
    with ModelRunner(kind(path, 2, 16)) as runner:
        runner.model.forward(GOOD)
    runner.close()
    with pytest.raises(RunnerError, match="after close"):
        runner.model.forward(GOOD)


# ---- interrupts and threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [None, 1])
def test_an_interrupt_at_any_line_of_a_step(path, num_threads):
    model = CPUModel(path, 80, 4, num_threads=num_threads)
    arrays = step((np.arange(250), 0), table=[range(63)])
    expected = model.forward(arrays).copy()
    lines = lines_of(lambda: model.forward(arrays))
    assert lines > 100
    for line in range(1, lines - 9, 5):  # two or three lines depend on how far the helper threads have come
        with pytest.raises(KeyboardInterrupt):
            raise_at(line, lambda: model.forward(arrays))
        np.testing.assert_array_equal(model.forward(arrays), expected)


def test_an_interrupt_at_any_line_of_loading(path):
    gc.collect()
    lines = lines_of(lambda: CPUModel(path, 2))
    assert lines > 100
    for line in range(1, lines - 40, 15):  # some lines depend on how many mappings of the file other models have left
        with pytest.raises(KeyboardInterrupt):
            raise_at(line, lambda: CPUModel(path, 2))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_that_openvino_did_not_come_along(path):
    """It would wait for ever for a thread of the parent's model, which is free for the next one."""
    CPUModel(path, 2).close()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            CPUModel(path, 2)
        except RunnerError as error:
            os._exit(42 if "spawn" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def test_close_while_another_thread_computes(path):
    for _ in range(5):
        model, begun, errors = CPUModel(path, 40), threading.Event(), []

        def compute(model=model):
            model.forward(step((np.arange(200), 0), table=[range(13)]))

        def work(compute=compute, begun=begun, errors=errors):
            compute()
            begun.set()
            try:
                while True:
                    compute()
            except Exception as error:
                errors.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        model.close()
        thread.join()
        assert errors == ["forward() after close()"]
