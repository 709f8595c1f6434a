"""Fixtures: a tiny float16 model on a fake GPU with a fake TensorRT."""

import fake_cuda
import fake_tensorrt
import pytest

from contbatch.export import export_onnx
from contbatch.model import random_model
from contbatch.tensorrt_build import BuildOptions, build_engine
from contbatch.tensorrt_limits import EngineLimits

SIZES = {"num_heads": 3, "kv_num_heads": 1, "head_size": 64, "hidden_size": 64, "intermediate_size": 32}
LIMITS = EngineLimits(max_num_seqs=4, max_num_batched_tokens=12, num_pages=30, page_size=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {dtype: export_onnx(random_model(0, **SIZES), folder / dtype / "model.onnx", dtype)
            for dtype in ("float16", "bfloat16")}  # fmt: skip


@pytest.fixture
def path(models, tmp_path):
    for file in models["float16"].parent.glob("model.onnx*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path / "model.onnx"


@pytest.fixture
def driver(monkeypatch):
    return fake_cuda.Driver().install(monkeypatch)


@pytest.fixture
def trt(monkeypatch, driver):
    return fake_tensorrt.install(monkeypatch, driver)


def engine(path, limits=LIMITS, **options):
    return build_engine(path, limits, BuildOptions(**options), progress=False)
