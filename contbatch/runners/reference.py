"""An exported model run by ONNX's own reference evaluator: slow, and only as clever as the standard."""

import math
import os
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx.checker import ValidationError
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from contbatch.checks import is_int, python_number, require, require_counts
from contbatch.errors import ModelFileError, RunnerError
from contbatch.export import read_config
from contbatch.inputs import require_valid
from contbatch.plugins.paged_attention.reference import paged_attention
from contbatch.runners.page_memory import require_memory
from contbatch.runners.page_moves import move_pages
from contbatch.step import PageMove


class PagedAttention(OpRun):
    """`com.microsoft::PagedAttention` for `onnx.reference.ReferenceEvaluator(..., new_ops=[PagedAttention])`."""

    op_domain = "com.microsoft"

    def _run(self, *inputs: np.ndarray | None, **attributes: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        outputs: tuple[np.ndarray, np.ndarray, np.ndarray] = paged_attention(*inputs, **attributes)
        return outputs


class ReferenceModel:
    """An exported model and its pages.

    Parameters
    ----------
    path : path
        An .onnx file of `contbatch.export.export_onnx`, in any of its dtypes.
    num_pages, page_size : int
        Pages per layer, tokens per page. Each layer holds keys and values of the file's dtype, shape
        (num_pages, page_size, kv_num_heads, head_size).
    num_host_pages : int
        Pages for requests that are swapped out.

    Raises
    ------
    ModelFileError
        The file or the one of its weights is missing or damaged, or was not written by `export_onnx`.
    InvalidRequestError
        num_pages or page_size is no integer ≥ 1, or num_host_pages none ≥ 0.
    """

    def __init__(self, path: str | os.PathLike[str], num_pages: int, page_size: int, num_host_pages: int = 0) -> None:
        num_pages, page_size = require_counts(num_pages=num_pages, page_size=page_size)
        num_host_pages = python_number(num_host_pages)
        require(is_int(num_host_pages, 0), "num_host_pages", num_host_pages, "an integer ≥ 0")
        self.config, self.num_pages, self.page_size = read_config(path), num_pages, page_size
        self.num_host_pages = num_host_pages
        try:
            proto = onnx.load(path)
        except (OSError, ValueError, ValidationError) as error:
            raise ModelFileError(f"{path}: its weights can't be read ({error})") from None
        shape = (num_pages, page_size, self.config.kv_num_heads, self.config.head_size)
        dtypes = {
            value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            for value in proto.graph.input
            if value.name.startswith(("key_cache.", "value_cache."))
        }
        page_bytes = math.prod(shape[1:]) * sum(dtype.itemsize for dtype in dtypes.values())
        require_memory(num_pages, num_host_pages, page_bytes)
        self.caches = {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
        self._host = [np.zeros((num_host_pages, *shape[1:]), cache.dtype) for cache in self.caches.values()]
        self._evaluator: ReferenceEvaluator | None = ReferenceEvaluator(proto, new_ops=[PagedAttention])

    def forward(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run one step: see `PagedModel.forward`."""
        if self._evaluator is None:
            raise RunnerError("forward() after close()")
        require_valid(inputs, self.config.vocab_size)
        with np.errstate(over="ignore", invalid="ignore"):  # Sigmoid computes both of its branches and drops one
            logits, *caches = map(np.asarray, self._evaluator.run(None, {**inputs, **self.caches}))
        self.caches = dict(zip(self.caches, caches, strict=True))
        return logits

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Move the content of pages, one after the other; `RunnerError`, and nothing moved, for a page it hasn't."""
        if self._evaluator is None:
            raise RunnerError("move_pages() after close()")
        move_pages(moves, list(self.caches.values()), self._host)

    def close(self) -> None:
        """Free model and pages; idempotent."""
        self._evaluator, self.caches, self._host = None, {}, []
