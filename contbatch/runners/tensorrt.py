"""A TensorRT engine of `contbatch.tensorrt_build` and its pages on a GPU.

Never run on a GPU: docs/tensorrt.md lists what is unchecked.
"""

import json
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
from contbatch.inputs import TYPES, padded, require_valid
from contbatch.model import ModelConfig
from contbatch.plugins.paged_attention.contract import validate
from contbatch.runners.cuda_graphs import CudaGraphs, cuda_graphs
from contbatch.runners.device import Device
from contbatch.runners.device_pages import DevicePages
from contbatch.runners.step_buffers import TOP, StepBuffers
from contbatch.runners.tensorrt_execution import Execution, executions
from contbatch.step import PageMove
from contbatch.tensorrt_build import ENGINE
from contbatch.tensorrt_library import import_tensorrt, new_log, started
from contbatch.tensorrt_limits import buckets, fitting
from contbatch.top_logits import TopLogits


class TensorRTModel:
    """An engine, its execution contexts, and the pages that all of them work on.

    With CUDA graphs, steps that fit the profile "decode" are padded to 1, 2, 4, 8, ... tokens and sequences. Each such
    size has an execution context of its own, as NVIDIA advises: the second step of a size, and all after it, is one
    launch of its graph. Padding belongs to no sequence, so it touches no page.

    Parameters
    ----------
    folder : path
        What `contbatch.tensorrt_build.build_engine` returned.
    num_pages : int or float
        Pages per layer, at most those the engine was built for; or the fraction of the memory left free by the engine
        and its buffers that they take, in (0, 1): `num_pages` of this object says how many they are.
    num_host_pages : int
        Pages in pinned host memory for requests that are swapped out.
    ordinal : int
        The GPU.
    use_graphs : bool
        Whether to capture steps as CUDA graphs; without cuda-bindings, or where capture fails, a warning says that they
        are not. Engines that gather pages have none.

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
        self,
        folder: str | os.PathLike[str],
        num_pages: int | float,
        num_host_pages: int = 0,
        *,
        ordinal: int = 0,
        use_graphs: bool = True,
    ) -> None:
        trt = import_tensorrt()
        manifest, plan = _read(Path(folder))
        self.config, options = ModelConfig(**manifest["config"]), manifest["options"]
        self.page_size: int = manifest["limits"]["page_size"]
        self._profiles: dict[str, Any] = manifest["profiles"]
        self._gathers = options["attention"] == "gather"
        self._lock = Lock()
        self._device: Device | None = Device(ordinal)
        self._log = new_log(trt)
        self._runtime: Any = None
        self._engine: Any = None
        self._graphs: CudaGraphs | None = None
        self._executions: dict[str | int, Execution] = {}
        self._latest: tuple[TopLogits, NDArray[np.intp]] | None = None
        try:
            with self._device.current():
                if use_graphs and not self._gathers:
                    self._graphs = cuda_graphs(self._device.stream)
                self._load(trt, self._device, Path(folder), plan)
                top_k = min(options["top_k"], self.config.vocab_size)
                self._buffers = StepBuffers(self._device, self._profiles, self.config.vocab_size, top_k)
                sizes = self.page_size, num_host_pages, 4 if manifest["dtype"] == "float32" else 2
                most: int = manifest["limits"]["num_pages"]
                self._pages = DevicePages(self._device, self.config, num_pages, *sizes, spare=self._gathers, most=most)
                self.num_pages, self.num_host_pages = self._pages.num_pages, num_host_pages
                if self.num_pages > most:
                    raise RunnerError(f"{folder}: built for at most {most} pages, got {self.num_pages}")
                self._bind()
        except BaseException:
            self.close()
            raise

    def _load(self, trt: Any, device: Device, folder: Path, plan: bytes) -> None:
        self._runtime = started(trt.Runtime, self._log)
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise EngineBuildError(f"{folder}: TensorRT can't load the engine: {self._log.words()}")
        sizes = buckets(self._profiles["decode"]["input_ids"][2][0]) if self._graphs else []
        fixed = dict.fromkeys(sizes, self._graphs) if self._graphs else {}
        self._executions = executions(trt, self._engine, self._log, device, list(self._profiles), fixed)

    def _bind(self) -> None:
        """Tell all contexts, once, where everything is."""
        pages, page = self._pages.addresses(), (self.page_size, self.config.kv_num_heads, self.config.head_size)
        for execution in self._executions.values():
            execution.bind(pages | self._buffers.addresses)
            for name in pages:
                if "_out" not in name:
                    execution.set_shape(name, (self.num_pages, *page))

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
            [logits], where = self._step("forward", inputs, ["logits"])
            return logits[where]

    def forward_top(self, inputs: Mapping[str, np.ndarray]) -> TopLogits:
        """Run one step as `forward` does; bring back the largest logits alone, see `TopModel.forward_top`."""
        with self._lock:
            (values, ids, log_total), where = self._step("forward_top", inputs, TOP)
            top = TopLogits.sorted_by_id(ids[where], values[where], log_total[where, 0], self.config.vocab_size)
            self._latest = top, where
            return top

    def whole_rows(self, top: TopLogits, rows: Sequence[int]) -> NDArray[np.float32]:
        """Return all logits of some rows of the last step, float32 (len(rows), vocab_size).

        `top` is what `forward_top` returned for it; `RunnerError` if another step has been run since.
        """
        with self._lock:
            if (device := self._device) is None:
                raise RunnerError("whole_rows() after close()")
            if self._latest is None or self._latest[0] is not top:
                raise RunnerError("whole_rows() of a step that is not the last one: its logits are gone")
            with device.current():
                return self._buffers.download_each("logits", self._latest[1][list(rows)].tolist())

    def _step(
        self, call: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]
    ) -> tuple[list[NDArray[Any]], NDArray[np.intp]]:
        """Check and run a step; return the rows of these outputs, and in which of them each wanted row is."""
        self._latest = None
        if (device := self._device) is None:
            raise RunnerError(f"{call}() after close()")
        self._check(inputs)
        # Rows may be asked for twice, for samples of one prompt, or not at all; the engine computes each once.
        rows, where = np.unique(inputs["logits_indices"], return_inverse=True)
        feed = {
            **{name: inputs[name] for name in TYPES},
            "logits_indices": rows if rows.size else np.zeros(1, np.int64),
        }
        with device.current():
            if not len(inputs["input_ids"]):
                return [self._buffers.download(name, 0, 0) for name in outputs], where
            return self._run(device, feed, outputs), where

    def _check(self, inputs: Mapping[str, np.ndarray]) -> None:
        config = self.config
        require_valid(inputs, config.vocab_size)
        indices = [inputs[name] for name in ("cumulative_sequence_length", "past_seqlens", "block_table")]
        sizes = len(inputs["input_ids"]), self.num_pages, self.page_size, config.max_position
        validate(*indices, *sizes, config.sliding_window or -1)
        if self._gathers and sizes[0] and not indices[0][-1]:
            raise RunnerError("a step of padding alone, which an engine that gathers pages can't do")

    def _run(self, device: Device, feed: Mapping[str, np.ndarray], outputs: Sequence[str]) -> list[NDArray[Any]]:
        execution, placed = self._placed(feed)
        try:
            for name, array in placed.items():
                self._buffers.upload(name, array)
                execution.set_shape(name, array.shape)
            execution.queue(device.stream)
            if self._gathers:
                self._pages.take_over()
            results = [self._buffers.download(name, 0, len(feed["logits_indices"])) for name in outputs]
        except BaseException:
            device.drain()  # the buffers belong to the copies until they are done
            raise
        device.synchronize()
        execution.capture(device.stream)
        return results

    def _placed(self, feed: Mapping[str, np.ndarray]) -> tuple[Execution, Mapping[str, np.ndarray]]:
        """Return who runs a step, and the step, padded where that is wanted."""
        shapes = {name: array.shape for name, array in feed.items()}
        if (profile := fitting(self._profiles, shapes)) is None:
            largest = {name: tuple(list(self._profiles.values())[-1][name][2]) for name in shapes}
            raise RunnerError(f"a step of shapes {shapes} is more than the engine was built for: {largest}")
        if profile in self._executions:
            return self._executions[profile], feed
        needed = max(len(feed[name]) for name in ("input_ids", "past_seqlens", "logits_indices"))
        size = min(size for size in self._executions if isinstance(size, int) and size >= needed)
        return self._executions[size], padded(feed, size, self._profiles["decode"]["block_table"][2][1])

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
                    if self._graphs is not None:
                        self._graphs.close()  # before the contexts that they were captured from
                for execution in self._executions.values():
                    execution.close()
                self._executions, self._engine = {}, None
                self._runtime = None  # after what it has made
                device.close()


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if missing := {"config", "dtype", "limits", "options", "profiles"} - manifest.keys():
            raise ValueError(f"{MANIFEST} lacks {', '.join(sorted(missing))}")
        return manifest, (folder / ENGINE).read_bytes()
    except (OSError, ValueError, AttributeError) as error:
        raise ModelFileError(f"{folder}: no engine that `build_engine` made ({error})") from None
