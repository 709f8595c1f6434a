"""A TensorRT engine of `contbatch.tensorrt_build` and its pages on a GPU.

Never run on a GPU: docs/tensorrt.md lists what is unchecked.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contbatch.cached_folder import MANIFEST
from contbatch.errors import DeviceError, EngineBuildError, ModelFileError, RunnerError
from contbatch.inputs import TYPES, require_valid
from contbatch.model import ModelConfig
from contbatch.plugins.paged_attention.contract import validate
from contbatch.runners.device import Device
from contbatch.runners.device_pages import DevicePages
from contbatch.step import PageMove
from contbatch.tensorrt_build import ENGINE
from contbatch.tensorrt_library import import_tensorrt, new_log
from contbatch.tensorrt_limits import fitting


class TensorRTModel:
    """An engine, one execution context for each of its profiles, and the pages that all of them work on.

    Parameters
    ----------
    folder : path
        What `contbatch.tensorrt_build.build_engine` returned.
    num_pages : int or float
        Pages per layer, at most those the engine was built for; or the fraction of the memory left free by the engine
        that they take, in (0, 1): `num_pages` of this object says how many they are.
    num_host_pages : int
        Pages in pinned host memory for requests that are swapped out.
    ordinal : int
        The GPU.

    Raises
    ------
    MissingDependencyError, DeviceError
        No TensorRT or PyCUDA; no usable GPU, or too little memory for pages, activations or buffers.
    ModelFileError, EngineBuildError
        The folder has no readable manifest or engine; TensorRT can't load it, for instance on another GPU.
    InvalidRequestError
        num_pages or num_host_pages is out of range.
    """

    def __init__(
        self, folder: str | os.PathLike[str], num_pages: int | float, num_host_pages: int = 0, *, ordinal: int = 0
    ) -> None:
        trt = import_tensorrt()
        manifest, plan = _read(Path(folder))
        self.config = ModelConfig(**manifest["config"])
        self.page_size: int = manifest["limits"]["page_size"]
        self._profiles: dict[str, Any] = manifest["profiles"]
        self._lock = Lock()
        self._device: Device | None = Device(ordinal)
        self._log, self._engine = new_log(trt), None
        self._contexts: dict[str, Any] = {}
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        try:
            with self._device.current():
                self._load(trt, self._device, Path(folder), plan)
                self._pages = DevicePages(self._device, self.config, num_pages, self.page_size, num_host_pages)
                self.num_pages, self.num_host_pages = self._pages.num_pages, num_host_pages
                if self.num_pages > (most := manifest["limits"]["num_pages"]):
                    raise RunnerError(f"{folder}: built for at most {most} pages, got {self.num_pages}")
                self._bind(self._device)
        except BaseException:
            self.close()
            raise

    def _load(self, trt: Any, device: Device, folder: Path, plan: bytes) -> None:
        """Make a context for each profile; they share scratch memory, as only one of them runs at a time."""
        self._engine = engine = trt.Runtime(self._log).deserialize_cuda_engine(plan)
        if engine is None:
            raise EngineBuildError(f"{folder}: TensorRT can't load the engine: {self._log.words()}")
        sizes = [engine.get_device_memory_size_for_profile_v2(i) for i in range(len(self._profiles))]
        scratch = device.allocate(max(sizes), "activations")
        for i, name in enumerate(self._profiles):
            context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if context is None:
                raise EngineBuildError(f"{folder}: TensorRT makes no execution context: {self._log.words()}")
            self._contexts[name], self._shapes[name] = context, {}
            self._require(context.set_optimization_profile_async(i, device.stream), "set_optimization_profile_async")
            context.set_device_memory(scratch, max(sizes))
        device.synchronize()

    def _bind(self, device: Device) -> None:
        """Allocate the buffers of the largest step and tell all contexts, once, where everything is."""
        config, addresses = self.config, self._pages.addresses()
        self._staging: dict[str, NDArray[np.uint8]] = {}
        for name, (dtype, _) in TYPES.items():
            largest = max(math.prod(ranges[name][2]) for ranges in self._profiles.values()) * dtype.itemsize
            self._staging[name] = device.pinned(largest, name)
            addresses[name] = device.allocate(largest, name)
        most_rows = max(ranges["logits_indices"][2][0] for ranges in self._profiles.values())
        self._logits = device.pinned(most_rows * config.vocab_size * 4, "logits")
        addresses["logits"] = device.allocate(most_rows * config.vocab_size * 4, "logits")
        for kind in ("key", "value"):  # the caches are updated in place
            addresses |= {f"{kind}_cache_out.{i}": addresses[f"{kind}_cache.{i}"] for i in range(config.num_layers)}
        self._addresses = addresses
        page = self.page_size, config.kv_num_heads, config.head_size
        for name in self._contexts:
            for tensor, address in addresses.items():
                self._require(self._contexts[name].set_tensor_address(tensor, address), f"set_tensor_address {tensor}")
                if tensor.startswith(("key_cache.", "value_cache.")):
                    self._set_shape(name, tensor, (self.num_pages, *page))

    def forward(self, inputs: Mapping[str, np.ndarray]) -> NDArray[np.float32]:
        """Run one step: see `PagedModel.forward`.

        Raises
        ------
        RunnerError
            Also for a step larger than the engine was built for.
        DeviceError
            CUDA failed. Only `close` is of use then.
        """
        with self._lock:
            if (device := self._device) is None:
                raise RunnerError("forward() after close()")
            self._check(inputs)
            # Rows may be asked for twice, for samples of one prompt, or not at all; the engine computes each once.
            rows, where = np.unique(inputs["logits_indices"], return_inverse=True)
            if not len(inputs["input_ids"]):
                return np.empty((0, self.config.vocab_size), np.float32)
            wanted = rows if rows.size else np.zeros(1, np.int64)
            feed = {**{name: inputs[name] for name in TYPES}, "logits_indices": wanted}
            return self._run(device, feed)[where]

    def _check(self, inputs: Mapping[str, np.ndarray]) -> None:
        config = self.config
        require_valid(inputs, config.vocab_size)
        indices = (inputs[name] for name in ("cumulative_sequence_length", "past_seqlens", "block_table"))
        sizes = len(inputs["input_ids"]), self.num_pages, self.page_size, config.max_position
        validate(*indices, *sizes, config.sliding_window or -1)

    def _run(self, device: Device, feed: Mapping[str, np.ndarray]) -> NDArray[np.float32]:
        shapes = {name: array.shape for name, array in feed.items()}
        if (profile := fitting(self._profiles, shapes)) is None:
            largest = {name: tuple(list(self._profiles.values())[-1][name][2]) for name in shapes}
            raise RunnerError(f"a step of shapes {shapes} is more than the engine was built for: {largest}")
        logits = self._logits[: len(feed["logits_indices"]) * self.config.vocab_size * 4]
        with device.current():
            try:
                for name, array in feed.items():
                    staged = self._staging[name][: array.nbytes]
                    staged.view(array.dtype).reshape(array.shape)[...] = array
                    device.upload(self._addresses[name], staged)
                    self._set_shape(profile, name, array.shape)
                queued = self._contexts[profile].execute_async_v3(device.stream)
                self._require(queued, "execute_async_v3")
                device.download(logits, self._addresses["logits"])
            except BaseException:
                device.drain()  # the buffers belong to the copies until they are done
                raise
            device.synchronize()
        return logits.view(np.float32).reshape(-1, self.config.vocab_size)

    def _set_shape(self, profile: str, name: str, shape: tuple[int, ...]) -> None:
        if self._shapes[profile].get(name) != shape:
            self._require(self._contexts[profile].set_input_shape(name, shape), f"set_input_shape {name} {shape}")
            self._shapes[profile][name] = shape

    def _require(self, done: bool, call: str) -> None:
        if not done:
            raise RunnerError(f"TensorRT refuses {call}: {self._log.words()}")

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Move the content of pages, one after the other; `RunnerError`, and nothing moved, for a page it hasn't."""
        with self._lock:
            if self._device is None:
                raise RunnerError("move_pages() after close()")
            with self._device.current():
                self._pages.move(moves)

    def close(self) -> None:
        """Free engine, pages and buffers, after the step that another thread may be at; idempotent."""
        with self._lock:
            device, self._device = self._device, None
            if device is not None:
                with suppress(DeviceError), device.current():
                    device.drain()
                self._contexts, self._engine = {}, None  # before the memory that they were told of
                device.close()


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest, (folder / ENGINE).read_bytes()
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{folder}: no engine that `build_engine` made ({error})") from None
