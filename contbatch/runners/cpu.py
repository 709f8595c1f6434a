"""An exported model on the CPU: OpenVINO runs the graph, a Numba kernel its attention, on numpy pages."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from contbatch.checks import is_int, python_number, require, require_counts
from contbatch.errors import InvalidRequestError, RunnerError, UnsupportedModelError
from contbatch.export import read_config, read_metadata
from contbatch.inputs import require_valid, without_single_rows
from contbatch.interrupts import interrupts_held_back
from contbatch.model import rotary_tables
from contbatch.open_models import close_at_exit
from contbatch.plugins.paged_attention.step_plan import StepPlan, plan_step
from contbatch.runners.cpu_graph import KEPT_INPUTS, compiled
from contbatch.runners.cpu_pages import PAGE_DTYPES, CPUPages
from contbatch.runners.mapped_weights import MappedWeights
from contbatch.step import PageMove

KV_DTYPE = {"f32": "f32", "bf16": "bf16", "w8a8": "int8"}
"""Type of the pages' elements unless it is told, by precision."""


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
        self._weights: MappedWeights | None = None
        self._cut_off: dict[str, np.ndarray] | None = None
        self._num_held = 0  # steps that were cut off and that OpenVINO has in its queue
        close_at_exit(self)
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
        """Let OpenVINO run a step; raise what a node raised, when the step is over."""
        with interrupts_held_back() as hold:  # between two lines of a node, one would be an error of OpenVINO's
            self._finish()
            failure: BaseException | None = None
            try:
                with pages.begin(plan):
                    self._compute(pages, kept)
            except RunnerError as error:
                failure = error
            if self._cut_off is not None:
                failure = KeyboardInterrupt() if hold.is_waiting() else failure or RunnerError("OpenVINO failed")
                with suppress(RunnerError):  # what is left of it is the next call's, then
                    self._finish()
            failure, pages.error = pages.error or failure, None
        if failure is not None:
            raise failure

    def _compute(self, pages: CPUPages, kept: dict[str, np.ndarray]) -> None:
        """Let OpenVINO compute a step, and know of one that was cut off: where a node raised between two lines of ours.

        With several threads OpenVINO says so, and the nodes behind have the sizes of the step before, for good. With
        one it says nothing, and computes that step before the next one of the thread, be it another model's: see
        `Defer` in its cpu_streams_executor.cpp.
        """
        self._cut_off, pages.layers_done = kept, 0
        try:
            self._request.infer(kept, share_inputs=True, share_outputs=True)  # else it copies the logits
        except RuntimeError as error:
            raise RunnerError(f"OpenVINO failed: {error}") from None
        finished = pages.layers_done // self.config.num_layers
        if finished > self._num_held:
            self._cut_off, self._num_held = None, 0
        else:
            self._num_held += 1 - finished

    def _finish(self) -> None:
        """Compute a step that was cut off to its end, without attention."""
        for _ in range(4):
            if self._cut_off is None or self._pages is None:
                return
            self._pages.rest()
            self._compute(self._pages, self._cut_off)
        if self._cut_off is not None:
            raise RunnerError("OpenVINO failed four times to compute a step to its end")

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
                with suppress(RunnerError), interrupts_held_back():
                    self._finish()
            finally:
                if self._pages is not None:
                    self._pages.close()
                self._request = self._pages = self._weights = self._cut_off = None
