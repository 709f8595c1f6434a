"""The op on numpy pages in place, for a runner that calls it once per layer: `plan_step`, then `paged_attention`."""

import functools
import os
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from contbatch.errors import RunnerError
from contbatch.plugins.paged_attention.amx_permission import may_use_matrices
from contbatch.plugins.paged_attention.contract import (
    require_array,
    require_attributes,
    require_pages,
    require_scales,
    rotary_tables,
    validate,
)
from contbatch.plugins.paged_attention.kernels import all_finished, close, combine, follow, lead
from contbatch.plugins.paged_attention.tasks import make_tasks
from contbatch.plugins.paged_attention.tile import TILE

FLOAT32, BFLOAT16_BITS, INT8 = np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.int8)
NO_SCALES = np.empty((0, 0, 0), np.float32)
Pages = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""A layer's keys, values, and the scales of both: `NO_SCALES` unless they are int8."""
LOOKS = 1000
"""How often to look whether the others are done before letting other threads of the machine run."""
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
    cos, sin = rotary_tables(cos_cache, sin_cache, head_size, block_table.size * page_size, FLOAT32)
    require_attributes(num_heads, kv_num_heads, scale, softcap, local_window_size)
    validate(*indices, num_rows, num_pages, page_size, len(cos), local_window_size)
    start, past, pages = (array.astype(np.int64, order="C") for array in indices)
    sequence = np.repeat(np.arange(past.size), np.diff(start))
    position = np.arange(sequence.size) - (start[:-1] - past)[sequence]
    window = local_window_size if local_window_size > 0 else np.iinfo(np.int32).max
    num_threads = num_threads or len(_CPUS)
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
        num_helpers=min(num_threads, len(tasks), cost // COST_PER_THREAD + 1) - 1,
    )


def paged_attention(
    plan: StepPlan,
    qkv: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    output: np.ndarray,
    key_scales: np.ndarray | None = None,
    value_scales: np.ndarray | None = None,
) -> None:
    """One layer: store this step's K/V in its pages, then fill `output`; safe to call from several threads at once.

    Parameters
    ----------
    plan : StepPlan
    qkv : float32 array
        (num_rows, (num_heads + 2·kv_num_heads)·head_size).
    key_cache, value_cache : array
        `plan.pages_shape`, updated in place: float32, uint16 holding bfloat16, or int8.
    output : float32 array
        (num_rows, num_heads·head_size), overwritten; rows of padding become zero.
    key_scales, value_scales : float32 array
        (num_pages, page_size, kv_num_heads), with int8 caches only and updated as they are, see `int8.quantize`.

    Raises
    ------
    RunnerError
        For a wrong shape, dtype or memory layout; nothing is written then.
    """
    _, _, kv_num_heads, head_size = plan.pages_shape
    require_array("qkv", qkv, (plan.num_rows, (plan.num_heads + 2 * kv_num_heads) * head_size), FLOAT32)
    require_array("output", output, (plan.num_rows, plan.num_heads * head_size), FLOAT32)
    require_array("key_cache", key_cache, plan.pages_shape, FLOAT32, BFLOAT16_BITS, INT8)
    require_array("value_cache", value_cache, plan.pages_shape, key_cache.dtype)
    scales = require_scales(key_cache, key_scales, value_scales)
    key_scales, value_scales = scales or (NO_SCALES, NO_SCALES)
    arrays = {"qkv": qkv, "key_cache": key_cache, "value_cache": value_cache, "output": output}
    for name, array in (arrays | {"key_scales": key_scales, "value_scales": value_scales}).items():
        if not array.flags.carray:
            raise RunnerError(f"PagedAttention: {name} must be C-contiguous and writable, got strides {array.strides}")
    attend_layer(plan, qkv, output, (key_cache, value_cache, key_scales, value_scales))


def attend_layer(plan: StepPlan, qkv: np.ndarray, output: np.ndarray, pages: Pages) -> None:
    """Do as `paged_attention` with arrays that are as they should be: nothing is checked."""
    if plan.num_rows > plan.slots.size:
        output[plan.slots.size :] = 0
    if not plan.slots.size:
        return
    progress, num_tasks = np.zeros(4, np.int64), len(plan.tasks)
    parts = _parts(plan.splits, plan.pages_shape[3]) if len(plan.splits) else _NO_PARTS
    work: tuple[Any, ...] = (
        progress, plan.tasks, qkv, *pages, plan.block_table, plan.cos, plan.sin, output, plan.num_heads, plan.scale,
        plan.softcap, plan.window, plan.interleaved, _matrices(pages[0]), parts,
    )  # fmt: skip
    finished = False
    try:
        for _ in range(plan.num_helpers):  # they wake up while pages are written
            _jobs(os.getpid()).put(work)
        finished = lead(*work, plan.slots, plan.splits, LOOKS)
    finally:  # after an interrupt too, helpers must be done with the arrays
        if not finished:
            claimed = close(progress, num_tasks)
            while not all_finished(progress, claimed, LOOKS):
                time.sleep(0)
    if not finished:
        combine(plan.splits, parts, output, plan.num_heads // plan.pages_shape[2], plan.pages_shape[3])


def _matrices(cache: np.ndarray) -> bool | None:
    """Return `matrices` of the kernels."""
    return True if cache.dtype == INT8 and cache.shape[3] % TILE == 0 and may_use_matrices() else None


def _parts(splits: np.ndarray, head_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make room for the sums of split tasks: of weights, their tops, and of values."""
    num_parts = int((splits[:, 2] * splits[:, 4]).sum())
    total, top = np.empty((2, num_parts), np.float32)
    return total, top, np.empty((num_parts, -(-head_size // TILE) * TILE), np.float32)


_NO_PARTS = _parts(np.empty((0, 5), np.int64), TILE)
_CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
"""CPUs that this process may use, asked before a runtime such as OpenVINO pins the calling thread to one of them."""


@functools.cache
def _jobs(_pid: int) -> SimpleQueue[tuple[Any, ...]]:
    """Return the queue of the threads that help a caller; a forked child needs its own.

    A helper that comes late finds all tasks claimed, so nobody waits for it: a pool of futures took 60 µs a layer more.
    """
    jobs: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    for i in range(max(1, len(_CPUS) - 1)):
        threading.Thread(target=_help, args=[jobs], name=f"paged_attention-{i}", daemon=True).start()
    return jobs


def _help(jobs: SimpleQueue[tuple[Any, ...]]) -> None:
    if hasattr(os, "sched_setaffinity"):  # it is born with the affinity of its caller, whose CPU it should leave alone
        os.sched_setaffinity(0, _CPUS)
    while True:
        follow(*jobs.get())
