"""The GPU kernel on numpy arrays, run by Triton's interpreter in a process of its own, one program after another.

Whether Triton interprets is decided when it is imported, and elsewhere it compiles. Nothing here says anything about
races between programs.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined"
# ruff: noqa: ARG002 - Triton names the methods of a tensor and their arguments

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from contbatch.plugins.paged_attention.variant import Variant


@cache
def _process() -> ProcessPoolExecutor:
    context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    executor: ProcessPoolExecutor = ProcessPoolExecutor(1, context, initializer=signal.signal, initargs=ignore)
    # numpy's threads would wait for each other on the tiny matrices of one program.
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OPENBLAS_NUM_THREADS="1"):
        executor.submit(int).result()
    return executor


def launch(variant: Variant, inputs: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run one variant on the op's ten inputs, None where one is absent; return output and both caches, all new."""
    result: tuple[np.ndarray, np.ndarray, np.ndarray] = submit(launch_here, variant, inputs)
    return result


def submit(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function in the interpreter's process."""
    return _process().submit(function, *arguments).result()


def launch_here(variant, inputs):
    """Run one variant in this process, in place on the caches; returns output and caches."""
    import triton.runtime.interpreter as interpreter

    from contbatch.plugins.paged_attention import triton_kernel

    _teach_bfloat16(interpreter)
    query, _, _, key_cache, value_cache, cumulative, _, table, cos, _ = inputs
    tokens, heads, splits = len(query), variant.num_heads, variant.num_splits
    output = np.full((tokens, heads * variant.head_size), np.nan, query.dtype)
    partial_output = np.full((splits, tokens, heads, variant.head_size), np.nan, np.float32)
    lse = np.full((splits, tokens, heads), np.nan, np.float32)
    scalars = tokens, len(cumulative) - 1, len(key_cache), table.shape[1], 0 if cos is None else len(cos)
    outputs = [output, None] if splits == 1 else [partial_output, lse]
    grid = tokens // variant.block_tokens + len(cumulative), variant.kv_num_heads * variant.parts, splits
    arguments = [*inputs, *scalars, *outputs, key_cache, value_cache]
    with np.errstate(divide="ignore"):  # log2(0) of a row that saw nothing
        triton_kernel.paged_attention[grid](*map(_tensor, arguments), variant)
    if splits > 1:
        combine_here(variant, partial_output, lse, output)
    return output, key_cache, value_cache


def combine_here(variant, partial_output, lse, output):
    """Weigh partial outputs together, in this process, in place on `output`, which is returned."""
    from contbatch.plugins.paged_attention import triton_combine

    rows = lse[0].size
    sizes = variant.head_size, variant.num_splits
    triton_combine.combine[(rows,)](_tensor(partial_output), _tensor(lse), rows, _tensor(output), *sizes)
    return output


def _tensor(argument):
    return _Array(argument) if isinstance(argument, np.ndarray) else argument


class _Array:
    """What the interpreter wants of a tensor, on the memory of a numpy array."""

    def __init__(self, array):
        self.array, self.dtype = array, str(array.dtype)

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, size, device):
        return _Array(self.array)

    def set_(self, storage, offset, size, stride):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides

    def copy_(self, other):
        assert other.array is self.array


def _teach_bfloat16(interpreter):
    """Multiply and round bfloat16 as hardware does: the interpreter multiplies its bits, and truncates."""
    if interpreter._convert_float is _convert_float:
        return
    _convert_float.original, interpreter._convert_float = interpreter._convert_float, _convert_float
    builder = type(interpreter.interpreter_builder)
    create_dot = builder.create_dot

    def dot(self, a, b, d, *options):
        a, b = (_widened(interpreter, x) for x in (a, b))
        return create_dot(self, a, b, d, *options)

    builder.create_dot = dot


def _widened(interpreter, handle):
    if str(handle.dtype.scalar) != "bf16":
        return handle
    values = handle.data.view(ml_dtypes.bfloat16).astype(np.float32)
    return interpreter.TensorHandle(values, interpreter.tl.float32)


def _convert_float(data, source, target, rounding):
    if (str(source), str(target)) == ("fp32", "bf16"):
        return data.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    return _convert_float.original(data, source, target, rounding)
