"""The engine builder and the backend on a fake CUDA and TensorRT; no real ones have run them."""
# ruff: noqa: F811 - fixtures are imported, and then named as arguments

import json
import logging
import re
import signal
import sys
from pathlib import Path

import fake_cuda
import fake_tensorrt
import onnx
import pytest
from on_fake_gpu import LIMITS, SIZES, driver, engine, models, path, trt  # noqa: F401 - fixtures
from tiny_llm import greedy, tokens_of, write_tiny

import contbatch as cb
from contbatch import cli
from contbatch.errors import (
    DeviceError,
    EngineBuildError,
    InvalidRequestError,
    MissingDependencyError,
    UnsupportedModelError,
)
from contbatch.runners.model_runner import ModelRunner
from contbatch.runners.reference import ReferenceModel
from contbatch.tensorrt_build import build_engine
from contbatch.tensorrt_limits import EngineLimits

pytest.importorskip("triton", reason="an engine is built with kernels made by Triton: pip install 'contbatch[ptx]'")


def test_an_engine_is_built_once_and_says_what_it_is_made_of(path, driver, trt, caplog):
    caplog.set_level(logging.INFO, "contbatch")
    folder = engine(path, workspace_bytes=12345)
    assert folder == path.parent / "tensorrt-sm90"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["gpu"] == {"name": "Fake GPU 0", "sm": 90}
    assert manifest["versions"] == {"tensorrt": "11.4.0.106", "cuda_driver": 13000}
    assert manifest["limits"]["page_size"] == 4
    assert manifest["profiles"]["decode"]["input_ids"] == [[1], [4], [4]]
    assert manifest["profiles"]["prompts"]["block_table"] == [[1, 1], [4, 15], [4, 30]]
    assert trt.registered == [90]
    [config] = trt.built
    assert list(config.limits.values()) == [12345]
    assert engine(path, workspace_bytes=12345) == folder
    assert len(trt.built) == 1
    assert [record.message for record in caplog.records] == [f"building {folder} for Fake GPU 0"]
    assert {p.name for p in path.parent.iterdir() if p.name.startswith(".")} == set()
    driver.require_clean()


def damage(folder):
    file = folder / "model.engine"
    file.write_bytes(file.read_bytes()[:-1] + b"!")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d, t, m, f: setattr(d, "get_driver_version", lambda: 13010), r"has versions .*13000.*, now .*13010"),
        (lambda d, t, m, f: fake_tensorrt.install(m, d, "11.5.0.1"), r"has versions .*, now .*11\.5\.0\.1"),
        (lambda d, t, m, f: damage(f), "has another model.engine than its manifest says"),
        (lambda d, t, m, f: (f / "model.engine").unlink(), "is incomplete"),
        (
            lambda d, t, m, f: m.setattr("contbatch.cached_folder.code_hash", lambda *_: "new"),
            "has kernels .*, now new",
        ),
    ],
    ids=["driver", "TensorRT", "damaged", "missing", "kernel code"],
)
def test_a_stale_engine_is_built_again(change, reason, path, driver, trt, monkeypatch, caplog):
    folder = engine(path)
    change(driver, trt, monkeypatch, folder)
    assert engine(path) == folder
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(reason, record.message)
    caplog.clear()
    engine(path)
    assert not caplog.records


def test_other_limits_and_other_gpus_have_other_engines(path, driver, trt, caplog):
    engine(path)
    engine(path, EngineLimits(8, 12, 30, 4))
    assert "has limits" in caplog.records[-1].message
    driver.sm = (8, 0)
    assert engine(path).name == "tensorrt-sm80"
    assert (path.parent / "tensorrt-sm90").is_dir()


def test_splits_reach_the_graph(path, driver, trt):
    engine(path, num_splits=2)
    graph = onnx.load(path.with_name("model.tensorrt.onnx"), load_external_data=False).graph
    assert {node.op_type for node in graph.node if node.domain} == {"PagedAttentionSplit", "PagedAttentionCombine"}
    with pytest.raises(InvalidRequestError, match="num_splits must be an integer ≥ 1, got 0"):
        engine(path, num_splits=0)


def test_timings_are_kept_between_builds(path, driver, trt, caplog):
    engine(path)
    timings = path.parent / "timings-sm90.cache"
    assert timings.read_bytes() == b"timings"
    engine(path, EngineLimits(8, 12, 30, 4))
    assert [config.cache.content for config in trt.built] == [b"", b"timings"]
    timings.write_bytes(b"of another GPU")
    engine(path)
    assert trt.built[-1].cache.content == b""
    assert "timings are measured again" in caplog.text


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"build": "out of memory"}, "built no engine: out of memory"),
        ({"parse": 1}, "parser refuses it: no importer for"),
        ({"profile": 1}, "refuses the profile decode"),
        ({"start": "CUDA driver version is insufficient"}, "TensorRT doesn't start: CUDA driver version is insuff"),
    ],
)
def test_failed_builds_leave_nothing(faults, message, path, driver, trt):
    trt.faults.update(faults)
    with pytest.raises(EngineBuildError, match=message):
        engine(path)
    assert not (path.parent / "tensorrt-sm90").exists()
    driver.require_clean()


def test_progress_and_an_interrupt_of_it(path, driver, trt, monkeypatch):
    shown = []

    class Bar:
        n = 0

        def __init__(self, total, unit, shown_at_all):
            shown.append(("total", total, shown_at_all))

        def set_description(self, name):
            shown.append(("phase", name))

        def update(self, count):
            if shown[-1] == ("step", 1):
                signal.raise_signal(signal.SIGINT)  # TensorRT swallows an exception of a method that it calls
            self.n += count
            shown.append(("step", self.n))

        def close(self):
            shown.append(("closed",))

    monkeypatch.setattr("contbatch.tensorrt_progress.progress_bar", Bar)
    with pytest.raises(KeyboardInterrupt):
        build_engine(path, LIMITS)
    assert shown == [("total", 3, True), ("phase", "Top"), ("step", 1), ("step", 2), ("closed",)]
    assert not (path.parent / "tensorrt-sm90").exists()


# ---- the backend -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny").mkdir()
    return write_tiny(tmp_path / "tiny", **SIZES)


def test_an_llm_on_the_backend_answers_as_the_reference_model(tiny, driver, trt, tmp_path):
    with cb.LLM(tiny, backend="tensorrt", num_pages=40, page_size=4, max_num_seqs=2) as llm:
        found = tokens_of(llm)
    [path] = (tmp_path / "cache").glob("tiny-float16-*/model.onnx")
    with ModelRunner(ReferenceModel(path, 40, 4)) as runner:
        requests = llm.requests([[5, 6, 7] * 6, [9] * 3, "the"], greedy(3))
        cb.Engine(cb.Scheduler(cb.ChunkedPrefill(), num_pages=40, page_size=4), runner).run(requests)
    assert found == [tuple(r.output_token_ids) for r in requests]
    assert trt.built[0].profiles[0].ranges["input_ids"] == [(1,), (2,), (2,)]
    driver.require_clean()


def test_a_fraction_of_the_memory_becomes_a_number_of_pages(tiny, driver, trt):
    with cb.LLM(tiny, backend="tensorrt", num_pages=0.5, page_size=4, max_num_seqs=2) as llm:
        page = 4 * 1 * 64 * 2 * 2 * llm.config.num_layers
        have, most = llm.runner.model.num_pages, trt.built[0].profiles[0].ranges["key_cache.0"][2][0]
        assert most == driver.total // page
        assert 0.4 * most < have < 0.5 * most
        assert f"tensorrt f16, {have} pages of 4 tokens" in repr(llm)
        assert llm.num_free_pages == llm.description()["num_pages"] == have
        tokens_of(llm)
    with cb.LLM(tiny, backend="tensorrt", num_pages=0.25, page_size=4, max_num_seqs=2) as llm:
        assert llm.runner.model.num_pages < 0.6 * have
    assert len(trt.built) == 1  # the same engine serves any fraction
    driver.require_clean()


@pytest.mark.parametrize(
    ("backend", "num_pages"), [("cpu", 0.9), ("reference", 0.9), ("tensorrt", 1.0), ("tensorrt", 2.5)]
)
def test_a_fraction_is_one_and_of_a_gpu(backend, num_pages, tiny, driver, trt):
    wanted = r"an integer ≥ 1, or with backend 'tensorrt' a fraction in \(0, 1\) of the GPU's memory"
    with pytest.raises(InvalidRequestError, match=f"num_pages must be {wanted}, got {num_pages}"):
        cb.LLM(tiny, backend=backend, num_pages=num_pages)
    assert not driver.calls


def test_the_command_builds_what_an_llm_loads(tiny, driver, trt, capsys, monkeypatch, tmp_path):
    limits = ["--max-num-seqs", "2", "--num-pages", "40", "--page-size", "4"]
    assert cli.main(["build", str(tiny), *limits]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert (folder.name, len(trt.built)) == ("tensorrt-sm90", 1)
    cb.LLM(tiny, backend="tensorrt", num_pages=40, page_size=4, max_num_seqs=2).close()
    assert len(trt.built) == 1
    others = [
        "--attention",
        "gather",
        "--precision",
        "bf16",
        "--top-k",
        "7",
        "--workspace-mib",
        "3",
        "--num-pages",
        "0.5",
    ]
    assert cli.main(["build", str(tiny), *others, "--cache-dir", str(tmp_path / "other")]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.parents[1] == tmp_path / "other"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["options"] == {"num_splits": 1, "workspace_bytes": 3 << 20, "attention": "gather", "top_k": 7}
    assert (manifest["dtype"], manifest["limits"]["page_size"]) == ("bfloat16", 16)
    assert manifest["limits"]["num_pages"] == driver.total // (16 * 64 * 2 * 2 * 2)
    driver.require_clean()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--top-k", "0"], r"top_k must be an integer in \[1, 3840\], got 0"),
        (["--num-pages", "1.5"], r"num_pages must be an integer ≥ 1 or a fraction in \(0, 1\), got 1.5"),
        (["--max-num-seqs", "0"], "max_num_seqs must be an integer ≥ 1, got 0"),
        (["--gpu", "3"], "GPU 3 asked for, CUDA finds 1"),
        (["--attention", "gather", "--num-splits", "2"], "num_splits must be 1 where pages are gathered, got 2"),
    ],
)
def test_the_command_names_what_is_wrong(wrong, told, tiny, driver, trt, capsys, tmp_path):
    assert cli.main(["build", str(tiny), *wrong]) == 1
    assert re.fullmatch(f"contbatch: error: {told}\n", capsys.readouterr().err)
    assert not list(tmp_path.glob("cache/*/model.onnx"))


def test_the_command_where_there_is_no_gpu(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert cli.main(["build", str(tiny)]) == 1
    assert "the backend 'tensorrt' needs TensorRT: pip install 'contbatch[tensorrt]'" in capsys.readouterr().err
    driver = fake_cuda.Driver(gpus=0).install(monkeypatch)
    fake_tensorrt.install(monkeypatch, driver)
    assert cli.main(["build", str(tiny)]) == 1
    assert "no usable GPU: cuInit failed: no CUDA-capable device is detected" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [{"precision": "f32"}, {"precision": "f8"}, {"kv_dtype": "int8"}, {"num_threads": 2}]
)
def test_options_that_the_backend_has_not(options, tiny, driver, trt):
    message = "backend 'tensorrt' has precision 'f16', 'bf16' or 'w8a8', no kv_dtype or num_threads"
    with pytest.raises(InvalidRequestError, match=message):
        cb.LLM(tiny, backend="tensorrt", **options)


@pytest.mark.parametrize(("backend", "attention"), [("tensorrt", "flash"), ("cpu", "gather"), ("reference", "gather")])
def test_forms_of_attention_that_a_backend_has_not(backend, attention, tiny, driver, trt):
    got = f"got '{attention}' with backend '{backend}'"
    message = f"attention must be 'paged' or, with backend 'tensorrt', 'gather', {got}"
    with pytest.raises(InvalidRequestError, match=message):
        cb.LLM(tiny, backend=backend, attention=attention)
    assert not driver.calls


PRECISIONS = {"f16": ("float16", "none"), "bf16": ("bfloat16", "none"), "w8a8": ("float16", "w8a8")}


@pytest.mark.parametrize("attention", ["paged", "gather"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_with_either_attention(precision, attention, tiny, driver, trt, tmp_path):
    options = {"precision": precision, "attention": attention, "num_pages": 40, "page_size": 4, "max_num_seqs": 2}
    with cb.LLM(tiny, backend="tensorrt", **options) as llm:
        found = tokens_of(llm)
        assert llm.description()["precision"] == precision
        assert llm.description().get("attention", "paged") == attention
    [folder] = (tmp_path / "cache").glob("*/*-sm90")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["dtype"], manifest["quantization"]) == PRECISIONS[precision]
    assert manifest["options"]["attention"] == attention
    cb.LLM(tiny, backend="tensorrt", **options).close()
    assert len(trt.built) == 1
    with ModelRunner(ReferenceModel(folder.parent / "model.onnx", 40, 4)) as runner:
        requests = llm.requests([[5, 6, 7] * 6, [9] * 3, "the"], greedy(3))
        cb.Engine(cb.Scheduler(cb.ChunkedPrefill(), num_pages=40, page_size=4), runner).run(requests)
    if attention == "paged":  # ONNX's own operators round otherwise
        assert found == [tuple(r.output_token_ids) for r in requests]
    assert [len(tokens) for tokens in found] == [3, 3, 3]
    driver.require_clean()


def test_the_command_builds_8_bits(tiny, driver, trt, capsys):
    limits = ["--max-num-seqs", "2", "--num-pages", "40", "--page-size", "4", "--attention", "gather"]
    assert cli.main(["build", str(tiny), "--w8a8", *limits]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert "-float16-w8a8-" in folder.parent.name
    options = {"num_pages": 40, "page_size": 4, "max_num_seqs": 2}
    cb.LLM(tiny, backend="tensorrt", precision="w8a8", attention="gather", **options).close()
    assert len(trt.built) == 1
    with pytest.raises(SystemExit):
        cli.main(["build", str(tiny), "--w8a8", "--precision", "bf16"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_an_engine_of_other_weights_or_form_is_built_again(tiny, driver, trt, caplog):
    options = {"backend": "tensorrt", "num_pages": 40, "page_size": 4, "max_num_seqs": 2}
    cb.LLM(tiny, precision="w8a8", **options).close()
    [folder] = tiny.parent.glob("cache/*/*-sm90")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"quantization": "w8a8"', '"quantization": "none"'))
    cb.LLM(tiny, precision="w8a8", **options).close()
    assert "has quantization none, now w8a8" in caplog.text
    assert len(trt.built) == 2


@pytest.mark.parametrize("missing", ["tensorrt", "pycuda.driver"])
def test_missing_packages_are_named_before_anything_is_exported(missing, tiny, driver, trt, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependencyError, match=r"backend 'tensorrt' needs .*pip install 'contbatch\[tensorrt\]'"):
        cb.LLM(tiny, backend="tensorrt")
    assert not list(tmp_path.glob("cache/*/model.onnx"))


def test_old_tensorrt_and_machines_without_a_gpu(tiny, monkeypatch, tmp_path):
    driver = fake_cuda.Driver(gpus=0).install(monkeypatch)
    fake_tensorrt.install(monkeypatch, driver, version="10.11.0.33")
    with pytest.raises(MissingDependencyError, match=r"TensorRT must be ≥ 10.12, got 10\.11\.0\.33"):
        cb.LLM(tiny, backend="tensorrt")
    fake_tensorrt.install(monkeypatch, driver, version="10.12.0.1")
    with pytest.raises(DeviceError, match="no usable GPU: cuInit failed: no CUDA-capable device is detected"):
        cb.LLM(tiny, backend="tensorrt")
    assert not list(tmp_path.glob("cache/*/model.onnx"))


def test_gpus_without_a_kernel_and_wrong_numbers_of_them(path, monkeypatch):
    driver = fake_cuda.Driver(sm=(7, 5)).install(monkeypatch)
    fake_tensorrt.install(monkeypatch, driver)
    with pytest.raises(UnsupportedModelError, match="kernels exist for SM 80, 86, 89, 90, 100, 120, got 75"):
        engine(path)
    with pytest.raises(DeviceError, match="GPU 1 asked for, CUDA finds 1"):
        build_engine(path, LIMITS, ordinal=1)
    driver.require_clean()
