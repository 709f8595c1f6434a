"""Runners by name; each imports its runtime when it is made, and exports the model in the type that it takes."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contbatch.build import build
from contbatch.checks import is_int, is_one_of, python_number, require, require_type, shown
from contbatch.errors import InvalidRequestError
from contbatch.export import read_config
from contbatch.policies import Policy
from contbatch.runners.model_runner import ModelRunner
from contbatch.scheduler import Scheduler

if TYPE_CHECKING:
    from contbatch.tensorrt_build import BuildOptions


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
    source: Path,
    limits: Mapping[str, Any],
    *,
    precision: str,
    kv_dtype: str | None,
    num_threads: int | None,
    attention: str = "paged",
) -> ModelRunner:
    from contbatch.runners.tensorrt import TensorRTModel
    from contbatch.runners.top_runner import TopRunner
    from contbatch.tensorrt_build import BuildOptions

    if precision not in _EXPORTS or (kv_dtype, num_threads) != (None, None):
        options = f"precision {precision!r}, kv_dtype {kv_dtype!r} and num_threads {num_threads}"
        raise InvalidRequestError(
            f"backend 'tensorrt' has precision 'f16', 'bf16' or 'w8a8', no kv_dtype or num_threads, got {options}"
        )
    folder = engine_of(source, limits, precision, BuildOptions(attention=attention))
    return TopRunner(TensorRTModel(folder, limits["num_pages"], limits["num_host_pages"]))


_EXPORTS = {"f16": ("float16", None), "bf16": ("bfloat16", None), "w8a8": ("float16", "w8a8")}
"""Dtype and quantization of the file that an engine of a precision is built from."""


def engine_of(
    source: Path,
    limits: Mapping[str, Any],
    precision: str = "f16",
    options: "BuildOptions | None" = None,
    *,
    cache_dir: Path | None = None,
    ordinal: int = 0,
) -> Path:
    """Return the folder of a model's TensorRT engine, exported and built now unless the cache has it.

    Parameters
    ----------
    source : path
        What `contbatch.catalog.fetch` found.
    limits : mapping
        max_num_seqs, max_num_batched_tokens, num_pages and page_size. num_pages may be a fraction in (0, 1): the engine
        then takes as many as fit in all of the GPU's memory.
    precision : {"f16", "bf16", "w8a8"}
        "w8a8": linear layers in 8 bits, float16 around them; a CPU reads the text to calibrate with.
    options : BuildOptions, optional
    cache_dir : path, optional
        In place of `contbatch.catalog.cache_dir()`.
    ordinal : int
        The GPU.

    Raises
    ------
    ContbatchError
        A limit out of its range; see `contbatch.build.build` and `contbatch.tensorrt_build.build_engine`. A missing GPU
        or package is told before the model is exported.
    """
    from contbatch.runners.device import Device
    from contbatch.tensorrt_build import build_engine
    from contbatch.tensorrt_library import import_tensorrt
    from contbatch.tensorrt_limits import EngineLimits, pages_within

    import_tensorrt()
    with closing(Device(ordinal)) as device, device.current():
        memory = device.total_bytes()
    pages, names = limits["num_pages"], ("max_num_seqs", "max_num_batched_tokens", "page_size")
    fraction = isinstance(pages, float)
    if fraction:
        require(0 < pages < 1, "num_pages", pages, "an integer ≥ 1 or a fraction in (0, 1)")
    most = EngineLimits(num_pages=1 if fraction else pages, **{name: limits[name] for name in names})
    dtype, quantization = _EXPORTS[precision]
    model = build(source, dtype, cache_dir, quantization) / "model.onnx"
    if fraction:
        most = replace(most, num_pages=max(1, pages_within(memory, read_config(model), most.page_size)))
    return build_engine(model, most, options, ordinal=ordinal)


MAX_THREADS = 1024


def require_backend(
    backend: str, attention: str, precision: str | None, kv_dtype: str | None, num_threads: int | None
) -> int | None:
    """Return the number of threads; `InvalidRequestError` for a backend that there isn't, or options none can have."""
    for name, value in (("precision", precision), ("kv_dtype", kv_dtype)):
        require(value is None or isinstance(value, str), name, value, "None or a string")
    num_threads = python_number(num_threads)
    threads_ok = num_threads is None or is_int(num_threads, 1, MAX_THREADS)
    require(threads_ok, "num_threads", num_threads, f"None or an integer in [1, {MAX_THREADS}]")
    require_type("attention", attention, str)
    require(is_one_of(backend, BACKENDS), "backend", backend, f"one of {', '.join(map(repr, BACKENDS))}")
    if attention != "paged" and (backend, attention) != ("tensorrt", "gather"):
        forms = "'paged' or, with backend 'tensorrt', 'gather'"
        raise InvalidRequestError(f"attention must be {forms}, got {attention!r} with backend {backend!r}")
    return num_threads


def require_limits(backend: str, policy: Policy, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return limits as Python numbers; `InvalidRequestError` if no scheduler takes them, before anything is loaded."""
    limits = {name: python_number(value) for name, value in given.items()}
    if isinstance(pages := limits["num_pages"], float):
        wanted = "an integer ≥ 1, or with backend 'tensorrt' a fraction in (0, 1) of the GPU's memory"
        require(backend == "tensorrt" and 0 < pages < 1, "num_pages", pages, wanted)
    Scheduler(policy, **({**limits, "num_pages": 1} if isinstance(pages, float) else limits))
    return limits


BACKENDS: dict[str, Callable[..., ModelRunner]] = {"cpu": _cpu, "reference": _reference, "tensorrt": _tensorrt}
"""Each takes what `contbatch.catalog.fetch` found, and the scheduler's limits by name."""
PRECISION = {"cpu": "f32", "reference": "f32", "tensorrt": "f16"}
"""What a backend computes in unless it is told."""


def within(have: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits that are asked for (not None); `InvalidRequestError` if one is more pages than there are."""
    chosen = {name: python_number(value) for name, value in asked.items() if value is not None}
    for name in ("num_pages", "num_host_pages"):
        value = chosen.get(name)
        if isinstance(value, int) and value > have[name]:
            raise InvalidRequestError(f"{name} must be at most the {have[name]} pages of this LLM, got {shown(value)}")
    return chosen
