"""An exported model as a TensorRT engine, built once for this machine's GPU and kept beside the model.

Never run on a GPU: docs/tensorrt.md lists what is unchecked.
"""

import json
import logging
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from contbatch import cached_folder
from contbatch.checks import require_counts, take_python_numbers
from contbatch.errors import EngineBuildError
from contbatch.export import read_config, read_metadata
from contbatch.gpu_kernels import variants
from contbatch.interrupts import interrupts_held_back
from contbatch.plugins.paged_attention import ptx
from contbatch.runners.device import Device
from contbatch.tensorrt_graph import TOP_K, require_form, write_tensorrt_onnx
from contbatch.tensorrt_library import import_tensorrt, new_log, started
from contbatch.tensorrt_limits import EngineLimits, Range
from contbatch.tensorrt_progress import new_monitor

logger = logging.getLogger("contbatch")
ENGINE = "model.engine"
_KERNELS = ("ptx", "tensorrt_plugin", "triton_combine", "triton_kernel", "variant")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What may differ between engines for the same steps; a value out of its range raises `InvalidRequestError`."""

    num_splits: int = 1
    """Programs that share one sequence's pages, see `contbatch.tensorrt_graph.write_tensorrt_onnx`."""
    workspace_bytes: int = 2**30
    """Scratch memory of the GPU that a kernel may use."""
    attention: str = "paged"
    """"paged": our plugins. "gather": no plugin, at a price, see `contbatch.tensorrt_gather`."""
    top_k: int = TOP_K
    """Logits of a row that come back from the GPU by themselves."""

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_counts(num_splits=self.num_splits, workspace_bytes=self.workspace_bytes)
        require_form(self.attention, self.num_splits, self.top_k)


def build_engine(
    model: str | os.PathLike[str],
    limits: EngineLimits,
    options: BuildOptions | None = None,
    *,
    ordinal: int = 0,
    progress: bool = True,
) -> Path:
    """Return the folder of the engine of an exported model for a GPU, built now unless a fitting one is there.

    An engine that is stale, damaged or for another GPU, driver, TensorRT or other limits is built anew, with a message
    to the "contbatch" logger, and never loaded.

    Parameters
    ----------
    model : path
        A file that `contbatch.export.export_onnx` wrote, in float16 or bfloat16 unless pages are gathered.
    limits : EngineLimits
        The largest step, and the pages.
    options : BuildOptions, optional
    ordinal : int
        The GPU to build for and on.
    progress : bool
        Show a bar for each phase of the build.

    Returns
    -------
    Path
        `tensorrt-sm<compute capability>` beside the model, or `gather-sm...`: model.engine and manifest.json, which
        holds hashes, versions, the GPU, the limits and the profiles.

    Raises
    ------
    MissingDependencyError
        TensorRT, PyCUDA or (to build) Triton is not installed.
    DeviceError
        There is no usable GPU.
    UnsupportedModelError
        No kernel for the GPU's architecture or for the model's head size or dtype.
    EngineBuildError
        TensorRT refused, for instance for lack of memory; the message holds its words.
    ModelFileError, InvalidRequestError
        The model is not an exported one, or an option is out of range.
    """
    trt = import_tensorrt()
    with closing(Device(ordinal)) as device:
        return _kept_engine(trt, device, Path(model), limits, options or BuildOptions(), progress)


def _kept_engine(
    trt: Any, device: Device, path: Path, limits: EngineLimits, options: BuildOptions, progress: bool
) -> Path:
    config, paged = read_config(path), options.attention == "paged"
    if paged:
        dtype = read_metadata(path).get("dtype", "?")
        variants(config, dtype, limits.page_size, options.num_splits)  # refuses what no kernel can do
    sizes = limits.page_size, options.num_splits
    graph = write_tensorrt_onnx(path, *sizes, attention=options.attention, top_k=options.top_k)
    profiles = limits.profiles(config)
    identity = _identity(graph, limits, options, profiles, trt.__version__, device)
    folder = path.parent / f"{'tensorrt' if paged else options.attention}-sm{device.sm}"
    if _is_current(folder, identity, device.name):
        return folder
    tools = _prepare(device.sm) if paged else {}
    with cached_folder.made_anew(folder, identity) as new:
        with device.current():
            engine = build_plan(trt, graph, profiles, options, device.sm, progress)
        (new / ENGINE).write_bytes(engine)
        cached_folder.write_manifest(new, identity, (ENGINE,), config=asdict(config), tools=tools)
    return folder


def _is_current(folder: Path, identity: Mapping[str, Any], gpu: str) -> bool:
    """Whether a folder holds the engine wanted; if not, say why one is built."""
    if not folder.exists():
        logger.info("building %s for %s", folder, gpu)
        return False
    if problem := cached_folder.problem_with(folder, identity):
        logger.warning("building %s again: it %s", folder, problem)
        return False
    return True


def _prepare(sm: int) -> dict[str, str]:
    """Make the plugins known to TensorRT; return the versions of what makes their kernels."""
    ptx.require(sm)
    from contbatch.plugins.paged_attention.tensorrt_plugin import register  # imports TensorRT

    register(sm)
    return {"triton": version("triton")}


def _identity(
    graph: Path,
    limits: EngineLimits,
    options: BuildOptions,
    profiles: Mapping[str, Mapping[str, Range]],
    tensorrt: str,
    device: Device,
) -> dict[str, Any]:
    """Return all that an engine depends on, as its manifest will have it."""
    metadata, kernels = read_metadata(graph), _KERNELS if options.attention == "paged" else ()
    identity = {
        "onnx_sha256": cached_folder.sha256_of(graph),
        "weights_sha256": metadata["weights_sha256"],
        "dtype": metadata["dtype"],
        "quantization": metadata["quantization"],
        "versions": {"tensorrt": tensorrt, "cuda_driver": device.driver},
        "kernels": cached_folder.code_hash(*(Path(ptx.__file__).with_name(f"{name}.py") for name in kernels)),
        "gpu": {"name": device.name, "sm": device.sm},
        "limits": asdict(limits),
        "options": asdict(options),
        "profiles": profiles,
    }
    unchanged: dict[str, Any] = json.loads(json.dumps(identity))  # but for tuples, which become lists
    return unchanged


def build_plan(
    trt: Any,
    graph: Path,
    profiles: Mapping[str, Mapping[str, Range]],
    options: BuildOptions,
    sm: int,
    progress: bool,
) -> Any:
    """Return the serialized engine of an ONNX file, a buffer; the work of `build_engine` that TensorRT does.

    Beside the file it keeps the builder's measurements, `timings-sm<SM>.cache`, for the next build.
    """
    timings = graph.with_name(f"timings-sm{sm}.cache")
    # TensorRT swallows an exception in a method that it calls, so a KeyboardInterrupt there would be lost.
    with interrupts_held_back() as held:
        log = new_log(trt)
        builder = started(trt.Builder, log)
        network = _parse(trt, builder, graph, log)
        config = builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # tells the types that each layer computes in
        _add_profiles(builder, config, profiles, f"{graph}: TensorRT refuses the profile", log)
        cache = _timing_cache(config, timings)
        with new_monitor(trt, progress, held.is_waiting) as monitor:
            config.progress_monitor = monitor
            engine = builder.build_serialized_network(network, config)
        if engine is None and not held.is_waiting():
            raise EngineBuildError(f"{graph}: TensorRT built no engine: {log.words()}")
    if engine is None:  # interrupted, and whoever handles that raised nothing, as in asyncio
        raise KeyboardInterrupt
    part = timings.with_suffix(".part")
    part.write_bytes(cache.serialize())
    os.replace(part, timings)
    return engine


def _parse(trt: Any, builder: Any, graph: Path, log: Any) -> Any:
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(graph)):
        told = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise EngineBuildError(f"{graph}: TensorRT's parser refuses it: {told}; {log.words()}")
    _allow_plain_attention(trt, network)
    return network


def _add_profiles(
    builder: Any, config: Any, profiles: Mapping[str, Mapping[str, Range]], refused: str, log: Any
) -> None:
    for name, ranges in profiles.items():
        profile = builder.create_optimization_profile()
        for tensor, shapes in ranges.items():
            profile.set_shape(tensor, *shapes)
        if config.add_optimization_profile(profile) < 0:
            raise EngineBuildError(f"{refused} {name}: {log.words()}")


def _allow_plain_attention(trt: Any, network: Any) -> None:
    """Let TensorRT compute ONNX's Attention in several steps where it has no kernel of one; else it builds nothing."""
    if not hasattr(trt, "IAttentionInputLayer"):  # nor has it such kernels
        return
    for i in range(network.num_layers):
        if (layer := network.get_layer(i)).type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # NVIDIA's way to a layer's own attributes
            layer.attention.decomposable = True


def _timing_cache(config: Any, timings: Path) -> Any:
    """Give the builder what earlier builds measured, as far as it fits this GPU and TensorRT; return the cache."""
    if timings.exists():
        cache = config.create_timing_cache(timings.read_bytes())
        if config.set_timing_cache(cache, ignore_mismatch=False):
            return cache
        logger.warning("%s is of another GPU or TensorRT: timings are measured again", timings)
    cache = config.create_timing_cache(b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    return cache
