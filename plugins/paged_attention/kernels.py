"""The op's Numba kernels for the CPU: `lead` by the caller, `attend` by any number of threads at once.

Flash attention (Dao et al. 2022) over pages (Kwon et al. 2023). Keys are taken in tiles of `TILE` positions counted
from position 0 of the sequence, whatever the page size, and every sum runs in the same order within a tile: the result
of a token depends on nothing but its own sequence, bit for bit.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import numpy as np
from numba import njit

from contbatch.plugins.paged_attention.block import (
    attend_block,
    borrow_scratch,
    borrow_sums,
    close_matrices,
    make_scratch,
    make_sums,
    open_matrices,
    write,
)
from contbatch.plugins.paged_attention.gather import EXACT, locate_first
from contbatch.plugins.paged_attention.intrinsics import TILE, atomic_add, borrowed
from contbatch.plugins.paged_attention.rotary import write_pages
from contbatch.plugins.paged_attention.tile import LOG2_E, ZERO, add_part

SOURCES = "35d2017893ba05fa"
"""Digest of the modules that are compiled into these kernels; a test compares it, and says what to write.

Numba's cache on disk looks at this file's content alone: the new digest makes it compile again after a change there.
"""
CLAIMED, FINISHED, WRITTEN, LEFT = range(4)
"""What threads tell each other through an int64 array: tasks claimed and finished, whether pages are written, and
whether the caller is gone."""
MANY_TASKS = 12
"""So many tasks left keep all threads busy even if each holds one more than it works on."""


@njit(nogil=True, cache=True, **EXACT)
def attend(
    progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output, num_heads,
    scale, softcap, window, interleaved, matrices, parts,
):  # fmt: skip
    """Work through the tasks not yet claimed, see `StepPlan.tasks`.

    `progress` counts them, see `CLAIMED`, `FINISHED` and `WRITTEN`. `matrices` is True or None: int8 pages by matrix
    instructions, or without. Its type decides, so each has machine code of its own.
    """
    head_size, group = key_cache.shape[3], num_heads // key_cache.shape[2]
    most_rows = group * ((tasks[:, 2] - tasks[:, 1]) * tasks[:, 4]).max()
    width = (head_size + TILE - 1) // TILE * TILE
    scratch = make_scratch(matrices, most_rows, key_cache.shape[2], head_size)
    _work(
        progress, tasks, qkv, (key_cache, value_cache, key_scales, value_scales), block_table, cos, sin, output, parts,
        (group, scale / softcap if softcap > ZERO else scale * LOG2_E, softcap, window, interleaved),
        matrices, scratch, make_sums(most_rows, width), make_sums(most_rows, width),
    )  # fmt: skip


@njit(**EXACT)
def _work(progress, tasks, qkv, caches, block_table, cos, sin, output, parts, options, matrices, scratch, span, sums):
    """Do as `attend` with everything at hand, so that all of it can be borrowed."""
    (page_size, kv_num_heads, head_size), tasks = caches[0].shape[1:], borrowed(tasks)
    keys, values = borrowed(caches[0]).reshape(-1, head_size), borrowed(caches[1]).reshape(-1, head_size)
    key_scales, value_scales = borrowed(caches[2]).reshape(-1), borrowed(caches[3]).reshape(-1)
    pages = page_size, kv_num_heads, keys, values, key_scales, value_scales
    block_table, output, parts = borrowed(block_table), borrowed(output), borrow_sums(parts)
    step = borrowed(qkv), block_table, borrowed(cos), borrowed(sin), options, matrices
    scratch, span, sums = borrow_scratch(matrices, scratch), borrow_sums(span), borrow_sums(sums)
    while not atomic_add(progress, WRITTEN, 0):
        pass
    open_matrices(matrices)
    turn, rows, num_tasks = 0, scratch[4], len(tasks)
    task = atomic_add(progress, CLAIMED, 1)
    if task < num_tasks:
        locate_first(rows[turn], tasks[task], block_table, page_size, kv_num_heads)
    while task < num_tasks:
        # Claimed ahead for its first tile to be fetched in time, unless another thread would go without.
        ahead = task + MANY_TASKS < num_tasks
        following = atomic_add(progress, CLAIMED, 1) if ahead else num_tasks
        next_task = tasks[following] if following < num_tasks else tasks[0, :0]
        turn = attend_block(tasks[task], next_task, turn, step, pages, output, parts, scratch, span, sums)
        atomic_add(progress, FINISHED, 1)
        if not ahead:
            following = atomic_add(progress, CLAIMED, 1)
            if following < num_tasks:
                locate_first(rows[turn], tasks[following], block_table, page_size, kv_num_heads)
        task = following
    close_matrices(matrices)


@njit(nogil=True, cache=True, **EXACT)
def combine(splits, parts, output, group, head_size):
    """Put the spans of split tasks together, see `StepPlan.splits`."""
    for split in range(len(splits)):
        kv_head, token, num_rows = splits[split, 0], splits[split, 1], splits[split, 2]
        first_part, num_spans = splits[split, 3], splits[split, 4]
        sums = make_sums(num_rows, parts[2].shape[1])
        for row in range(num_rows):
            for part in range(first_part + row, first_part + num_spans * num_rows, num_rows):
                add_part(sums[0], sums[1], sums[2], row, parts[0], parts[1], parts[2], part)
        write(num_rows, num_rows, group, sums, output, token, kv_head * group * head_size, head_size)


@njit(nogil=True, cache=True, **EXACT)
def lead(
    progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output, num_heads,
    scale, softcap, window, interleaved, matrices, parts, slots, splits, num_looks,
):  # fmt: skip
    """Store this step's keys and values, `attend`, wait for who helps, looking so many times, then `combine`.

    One call for all of it: after each the caller would have to wait for the interpreter's lock while a helper has it.
    Return whether it came to the end.
    """
    caches = key_cache, value_cache, key_scales, value_scales
    write_pages(qkv, caches, slots, cos, sin, interleaved, np.empty(key_cache.shape[3], np.float32))
    atomic_add(progress, WRITTEN, 1)
    attend(
        progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output,
        num_heads, scale, softcap, window, interleaved, matrices, parts,
    )  # fmt: skip
    finished = all_finished(progress, len(tasks), num_looks)
    if finished:
        combine(splits, parts, output, num_heads // key_cache.shape[2], key_cache.shape[3])
    atomic_add(progress, LEFT, 1)
    return finished


@njit(nogil=True, cache=True, **EXACT)
def follow(
    progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output, num_heads,
    scale, softcap, window, interleaved, matrices, parts,
):  # fmt: skip
    """Help `lead`, and stay until it has left: it shall get the interpreter's lock first."""
    attend(
        progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output,
        num_heads, scale, softcap, window, interleaved, matrices, parts,
    )  # fmt: skip
    while not atomic_add(progress, LEFT, 0):
        pass


@njit(nogil=True, cache=True, **EXACT)
def close(progress, num_tasks):
    """Let nobody claim a task any more; return how many have been claimed."""
    claimed = atomic_add(progress, CLAIMED, num_tasks)
    for reached in (WRITTEN, LEFT):  # those who wait for it shall see that there is nothing to do
        atomic_add(progress, reached, 1)
    return min(claimed, num_tasks)


@njit(nogil=True, cache=True, **EXACT)
def all_finished(progress, num_tasks, num_looks):
    """Whether all tasks are finished, looking so many times before saying no."""
    while num_looks and atomic_add(progress, FINISHED, 0) < num_tasks:
        num_looks -= 1
    return num_looks > 0
