"""Runners by name; each imports its runtime when it is made, and exports the model in the type that it takes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contbatch.build import build
from contbatch.errors import InvalidRequestError
from contbatch.runners.model_runner import ModelRunner


def _cpu(
    source: Path, limits: Mapping[str, Any], *, precision: str, kv_dtype: str | None, num_threads: int | None
) -> ModelRunner:
    from contbatch.runners.cpu import CPUModel

    model = CPUModel(
        build(source, quantization="w8a8" if precision == "w8a8" else None) / "model.onnx",
        limits["num_pages"],
        limits["page_size"],
        precision=precision,
        kv_dtype=kv_dtype,
        num_threads=num_threads,
        num_host_pages=limits["num_host_pages"],
    )
    return ModelRunner(model)


def _reference(
    source: Path, limits: Mapping[str, Any], *, precision: str, kv_dtype: str | None, num_threads: int | None
) -> ModelRunner:
    from contbatch.runners.reference import ReferenceModel

    if (precision, kv_dtype, num_threads) != ("f32", None, None):
        options = f"precision {precision!r}, kv_dtype {kv_dtype!r} and num_threads {num_threads}"
        raise InvalidRequestError(f"backend 'reference' has precision 'f32', no kv_dtype or num_threads, got {options}")
    sizes = limits["num_pages"], limits["page_size"], limits["num_host_pages"]
    return ModelRunner(ReferenceModel(build(source) / "model.onnx", *sizes))


def _tensorrt(
    source: Path, limits: Mapping[str, Any], *, precision: str, kv_dtype: str | None, num_threads: int | None
) -> ModelRunner:
    from contbatch.runners.device import Device
    from contbatch.runners.tensorrt import TensorRTModel
    from contbatch.tensorrt_build import build_engine
    from contbatch.tensorrt_library import import_tensorrt
    from contbatch.tensorrt_limits import EngineLimits

    dtypes = {"f16": "float16", "bf16": "bfloat16"}
    if precision not in dtypes or (kv_dtype, num_threads) != (None, None):
        options = f"precision {precision!r}, kv_dtype {kv_dtype!r} and num_threads {num_threads}"
        raise InvalidRequestError(
            f"backend 'tensorrt' has precision 'f16' or 'bf16', no kv_dtype or num_threads, got {options}"
        )
    import_tensorrt()
    Device().close()  # what is missing is told before the model is exported
    names = "max_num_seqs", "max_num_batched_tokens", "num_pages", "page_size"
    model = build(source, dtypes[precision]) / "model.onnx"
    folder = build_engine(model, EngineLimits(**{name: limits[name] for name in names}))
    return ModelRunner(TensorRTModel(folder, limits["num_pages"], limits["num_host_pages"]))


BACKENDS: dict[str, Callable[..., ModelRunner]] = {"cpu": _cpu, "reference": _reference, "tensorrt": _tensorrt}
"""Each takes what `contbatch.catalog.fetch` found, and the scheduler's limits by name."""
PRECISION = {"cpu": "f32", "reference": "f32", "tensorrt": "f16"}
"""What a backend computes in unless it is told."""
