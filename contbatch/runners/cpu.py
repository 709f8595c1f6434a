"""An exported model on the CPU: OpenVINO runs the graph, a Numba kernel its attention, on numpy pages."""

import atexit
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from contbatch.checks import is_int, python_number, require, require_counts
from contbatch.errors import InvalidRequestError, RunnerError, UnsupportedModelError
from contbatch.export import read_config, read_metadata
from contbatch.inputs import require_valid, without_single_rows
from contbatch.interrupts import interrupts_held_back
from contbatch.model import rotary_tables
from contbatch.plugins.paged_attention.step_plan import StepPlan, plan_step
from contbatch.runners.cpu_graph import KEPT_INPUTS, compiled
from contbatch.runners.cpu_pages import PAGE_DTYPES, CPUPages
from contbatch.runners.mapped_weights import MappedWeights
from contbatch.step import PageMove

KV_DTYPE = {"f32": "f32", "bf16": "bf16", "w8a8": "int8"}
"""Type of the pages' elements unless it is told, by precision."""
_OPEN: WeakSet["CPUModel"] = WeakSet()


class CPUModel:
    """An exported float32 model and its pages in main memory.

    Parameters
    ----------
    path : path
        A float32 .onnx file of `contbatch.export.export_onnx`.
    num_pages, page_size : int
        Pages per layer, and tokens in each. Memory is touched, and so taken, as pages are used:
        2 * num_layers * num_pages * page_size * kv_num_heads * head_size elements in all.
    precision : {"f32", "bf16", "w8a8"}
        Arithmetic of the linear layers; attention itself is computed in float32. w8a8 takes a file that was exported
        so, and computes in bfloat16 what that keeps in floats.
    kv_dtype : {"f32", "bf16", "int8"}, optional
        Type of the pages' elements; None: f32, bf16, and int8 for w8a8. int8 comes with a float32 scale for each token
        and head.
    num_threads : int, optional
        Threads to use; all cores if None.
    num_host_pages : int
        Pages for requests that are swapped out; here in main memory too.
    observed : sequence of str
        Values of the graph that `observe` is to return.

    Raises
    ------
    ModelFileError
        The file or the one of its weights is missing or damaged, or was not written by `export_onnx`.
    UnsupportedModelError
        The file is not float32, or is quantised and `precision` isn't, or the other way round.
    InvalidRequestError
        An option is out of its range.
    RunnerError
        The process was forked from one that had a model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_pages: int,
        page_size: int = 16,
        *,
        precision: str = "f32",
        kv_dtype: str | None = None,
        num_threads: int | None = None,
        num_host_pages: int = 0,
        observed: Sequence[str] = (),
    ) -> None:
        kv_dtype = KV_DTYPE.get(precision, "") if kv_dtype is None else kv_dtype
        for name, value, known in (("precision", precision, KV_DTYPE), ("kv_dtype", kv_dtype, PAGE_DTYPES)):
            if value not in known:
                raise InvalidRequestError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        num_pages, page_size, threads = require_counts(
            num_pages=num_pages, page_size=page_size, num_threads=1 if num_threads is None else num_threads
        )
        num_host_pages, num_threads = python_number(num_host_pages), num_threads and threads
        require(is_int(num_host_pages, 0), "num_host_pages", num_host_pages, "an integer ≥ 0")
        self.config = read_config(path)
        metadata = read_metadata(path)
        if (dtype := metadata.get("dtype")) != "float32":
            raise UnsupportedModelError(f"{path}: holds {dtype}, the CPU runner takes float32")
        if (precision == "w8a8") != (metadata.get("quantization") == "w8a8"):
            raise UnsupportedModelError(f"{path}: precision {precision!r}, quantization {metadata.get('quantization')}")
        self.num_pages, self.page_size, self.num_host_pages = num_pages, page_size, num_host_pages
        self.num_threads, self.kv_dtype, self._precision = num_threads, kv_dtype, precision
        self._cos, self._sin = (table.astype(np.float32) for table in rotary_tables(self.config))
        self._pages: CPUPages | None = CPUPages(self.config, num_pages, page_size, num_host_pages, kv_dtype)
        self._lock, self._observed = Lock(), observed
        _OPEN.add(self)
        self._weights: MappedWeights | None = None
        self._unfinished: dict[str, np.ndarray] | None = None
        try:
            with interrupts_held_back():  # OpenVINO would make an error of its own of one in a method of _Attention
                self._request, self._weights = compiled(
                    str(Path(path)), self.config, self._pages, precision, num_threads, observed
                )
            self._packed_for: set[tuple[int, ...]] = set()
        except BaseException:
            self.close()  # a notebook keeps the traceback, and thereby this object
            raise

    def forward(self, inputs: Mapping[str, np.ndarray]) -> NDArray[np.float32]:
        """Run one step: see `PagedModel.forward`; the next call, of whatever thread, overwrites the logits.

        With f32 and w8a8 a row's bits don't depend on what else is in the step, or in earlier ones.
        """
        with self._lock:
            return self._forward(inputs, self._precision == "f32")[: len(inputs["logits_indices"])]

    def observe(self, inputs: Mapping[str, np.ndarray]) -> dict[str, NDArray[np.float32]]:
        """Run one step like `forward`; return the values to be observed, a row for each token or logit.

        Like the logits they are overwritten by the next call.
        """
        with self._lock:
            self._forward(inputs, False)
            return {name: self._request.get_tensor(name).data for name in self._observed}

    def _forward(self, inputs: Mapping[str, np.ndarray], invariant: bool) -> NDArray[np.float32]:
        pages, weights, config = self._pages, self._weights, self.config
        if pages is None or weights is None:
            raise RunnerError("forward() after close()")
        require_valid(inputs, config.vocab_size)
        if invariant:  # one row times packed weights is added up in another order than several
            inputs = without_single_rows(inputs)
        plan = plan_step(
            *(inputs[name] for name in ("cumulative_sequence_length", "past_seqlens", "block_table")),
            self._cos,
            self._sin,
            num_rows=len(inputs["input_ids"]),
            pages_shape=pages.shape,
            num_heads=config.num_heads,
            softcap=config.attention_softcap,
            local_window_size=config.sliding_window or -1,
            rotary_interleaved=int(config.rotary_interleaved),
            num_threads=self.num_threads,
        )
        # OpenVINO packs weights in other ways for few rows than for many, when such a step comes.
        sizes = tuple(inputs[name].size.bit_length() for name in KEPT_INPUTS)
        pages.between_layers = None if sizes in self._packed_for else weights.release
        self._infer(pages, plan, {name: inputs[name] for name in KEPT_INPUTS})
        if pages.between_layers is not None:
            self._packed_for.add(sizes)
            weights.release()
        logits: NDArray[np.float32] = self._request.get_output_tensor(0).data
        return logits

    def _infer(self, pages: CPUPages, plan: StepPlan, kept: dict[str, np.ndarray]) -> None:
        """Let OpenVINO run a step; raise what its nodes raised."""
        self._finish_failed_step()  # an interrupt may have kept the last call from that
        failure = ""
        self._unfinished = kept
        try:
            with pages.begin(plan):
                self._request.infer(kept, share_inputs=True, share_outputs=True)  # else it copies the logits
        except RuntimeError as error:
            self._unfinished, failure = None, str(error)
        if failure or pages.layers_done < self.config.num_layers:
            cause, pages.error = pages.error, None
            self._finish_failed_step()
            if cause is None and (not failure or "KeyboardInterrupt" in failure):  # it came between two lines of ours
                cause = KeyboardInterrupt()
            raise cause or RunnerError(f"OpenVINO failed: {failure}")
        self._unfinished = None

    def _finish_failed_step(self) -> None:
        """Have OpenVINO compute what is left of a step whose node failed, without attention.

        With one thread it says nothing of such a failure, and would compute the step before the next one, even that of
        another model: see `Defer` in its cpu_streams_executor.cpp.
        """
        if self._pages is not None and self._unfinished is not None:
            with interrupts_held_back():
                self._pages.rest()
                self._request.infer(self._unfinished, share_inputs=True, share_outputs=True)
            self._unfinished = None

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Move the content of pages, one after the other; `RunnerError`, and nothing moved, for a page it hasn't."""
        with self._lock:
            if self._pages is None:
                raise RunnerError("move_pages() after close()")
            self._pages.move(moves)

    def close(self) -> None:
        """Free model and pages, after the step that another thread may be at; idempotent."""
        with self._lock:
            try:
                self._finish_failed_step()
            finally:
                if self._pages is not None:
                    self._pages.close()
                self._request = self._pages = self._weights = self._unfinished = None


@atexit.register
def _close_all() -> None:
    """Close models while Python still runs: later OpenVINO frees Python objects without its lock, and that is fatal."""
    for model in list(_OPEN):
        model.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_OPEN.clear)  # a model's threads stayed in the parent: none could be waited for
