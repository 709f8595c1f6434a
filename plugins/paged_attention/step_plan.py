"""What all layers of one step share: its indices, checked, and its work, dealt out to threads."""

import os
from dataclasses import dataclass

import numpy as np

from contbatch.plugins.paged_attention.contract import (
    require_attributes,
    require_pages,
    rotary_tables,
    validate,
)
from contbatch.plugins.paged_attention.tasks import make_tasks

CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
"""CPUs that this process may use, asked before a runtime such as OpenVINO pins the calling thread to one of them."""
COST_PER_THREAD = 300
"""Cost, see `make_tasks`, below which waking another thread takes longer than it saves (tens of microseconds)."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What all layers of one step share; made by `plan_step`, checked there, never changed."""

    num_heads: int
    pages_shape: tuple[int, int, int, int]
    """(num_pages, page_size, kv_num_heads, head_size) of every layer's caches."""
    num_rows: int
    """Rows of qkv and output, padding included."""
    slots: np.ndarray
    """(num_tokens,) int64: where each token's K/V go, page · page_size + offset."""
    block_table: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    """(num_tokens, rotary_dim / 2) float32: the rows of the rotary tables for each token."""
    interleaved: bool
    tasks: np.ndarray
    """(num_tasks, 9) int64, the dearest first: sequence, first kv head and end of heads, first token, tokens, position
    of the first token, first key, end of keys, where in `parts` of the kernels its sums go (-1: they are its own)."""
    splits: np.ndarray
    """(num_splits, 5) int64, blocks of tokens whose keys several tasks share: kv head, first token, rows (tokens ×
    heads of a group), the first of its parts, spans."""
    scale: np.float32
    softcap: np.float32
    window: int
    num_helpers: int
    """Threads that work besides the caller's."""


def plan_step(
    cumulative_sequence_length: np.ndarray,
    past_seqlens: np.ndarray,
    block_table: np.ndarray,
    cos_cache: np.ndarray | None = None,
    sin_cache: np.ndarray | None = None,
    *,
    num_rows: int,
    pages_shape: tuple[int, int, int, int],
    num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    local_window_size: int = -1,
    rotary_interleaved: int = 0,
    num_threads: int | None = None,
) -> StepPlan:
    """Check one step's indices and deal out its work, once for all layers that share these attributes.

    Parameters
    ----------
    cumulative_sequence_length, past_seqlens, block_table, cos_cache, sin_cache : array
        Inputs 5 to 9 of the op: three int32, two float32; without tables nothing is rotated (do_rotary = 0).
    num_rows : int
        Rows of qkv and output: the step's tokens and any padding after them.
    pages_shape : tuple of int
        (num_pages, page_size, kv_num_heads, head_size) of the caches.
    num_threads : int, optional
        Threads that work at once, the caller's included; by default all CPUs this process may use.

    Raises
    ------
    RunnerError
        For anything outside the contract, see `contract.validate`.
    """
    require_pages(pages_shape, pages_shape[2])
    num_pages, page_size, kv_num_heads, head_size = pages_shape
    indices = cumulative_sequence_length, past_seqlens, block_table
    cos, sin = rotary_tables(cos_cache, sin_cache, head_size, block_table.size * page_size, np.dtype(np.float32))
    require_attributes(num_heads, kv_num_heads, scale, softcap, local_window_size)
    validate(*indices, num_rows, num_pages, page_size, len(cos), local_window_size)
    start, past, pages = (array.astype(np.int64, order="C") for array in indices)
    sequence = np.repeat(np.arange(past.size), np.diff(start))
    position = np.arange(sequence.size) - (start[:-1] - past)[sequence]
    window = local_window_size if local_window_size > 0 else np.iinfo(np.int32).max
    num_threads = num_threads or len(CPUS)
    tasks, splits, cost = make_tasks(start, past, num_heads // kv_num_heads, kv_num_heads, window, num_threads)
    return StepPlan(
        num_heads=num_heads,
        pages_shape=pages_shape,
        num_rows=num_rows,
        slots=pages[sequence, position // page_size] * page_size + position % page_size,
        block_table=pages,
        cos=cos[position],
        sin=sin[position],
        interleaved=bool(rotary_interleaved),
        tasks=tasks,
        splits=splits,
        scale=np.float32(scale or head_size**-0.5),
        softcap=np.float32(softcap),
        window=window,
        num_helpers=max(min(num_threads, len(tasks), cost // COST_PER_THREAD + 1) - 1, 0),
    )
