"""The op's Numba kernels for the CPU: `lead` by the caller, layer by layer, `follow` by any number of threads.

Flash attention (Dao et al. 2022) over pages (Kwon et al. 2023). Keys are taken in tiles of `TILE` positions counted
from position 0 of the sequence, whatever the page size, and every sum runs in the same order within a tile: the result
of a token depends on nothing but its own sequence, bit for bit.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, attr-defined"

import numpy as np
from numba import carray, njit

from contbatch.plugins.paged_attention.bell import await_count, make_bells, ring, wait
from contbatch.plugins.paged_attention.block import (
    attend_block,
    close_matrices,
    make_scratch,
    make_sums,
    open_matrices,
    write,
)
from contbatch.plugins.paged_attention.gather import EXACT, INNER, locate_first
from contbatch.plugins.paged_attention.intrinsics import TILE, atomic_add, pointer
from contbatch.plugins.paged_attention.rotary import write_pages
from contbatch.plugins.paged_attention.tile import LOG2_E, ZERO, add_part

SOURCES = "858bffcea345492e"
"""Digest of the modules that are compiled into these kernels; a test compares it, and says what to write.

Numba's cache on disk looks at this file's content alone: the new digest makes it compile again after a change there.
"""
CLAIMED, FINISHED, WRITING, WRITTEN, COUNTS = range(5)
"""What threads tell each other through a row of `COUNTS` int64 for each layer: tasks claimed and finished, tokens whose
keys and values are claimed, to be written, and written."""
TOKENS_AT_ONCE = 8
"""So many tokens a thread claims, to write their keys and values."""
MANY_TASKS = 12
"""So many tasks left keep all threads busy even if each holds one more than it works on."""


@njit(nogil=True, cache=True, **EXACT)
def attend(
    progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output, num_heads,
    scale, softcap, window, interleaved, matrices, parts, slots,
):  # fmt: skip
    """Write keys and values of tokens not yet claimed, then work through tasks not yet claimed, see `StepPlan`.

    `progress` counts both, see `COUNTS`. `output` is as in `write_row`. `matrices` is True or None: int8 pages by
    matrix instructions, or without. Its type decides, so each has machine code of its own.
    """
    head_size, group = key_cache.shape[3], num_heads // key_cache.shape[2]
    most_rows = group * ((tasks[:, 2] - tasks[:, 1]) * tasks[:, 4]).max()
    width = (head_size + TILE - 1) // TILE * TILE
    scratch = make_scratch(matrices, most_rows, key_cache.shape[2], head_size)
    _work(
        progress, tasks, qkv, (key_cache, value_cache, key_scales, value_scales), block_table, cos, sin, output, parts,
        (group, scale / softcap if softcap > ZERO else scale * LOG2_E, softcap, window, interleaved),
        matrices, scratch, make_sums(most_rows, width), make_sums(most_rows, width), slots,
    )  # fmt: skip


@njit(**INNER)
def _work(
    progress, tasks, qkv, caches, block_table, cos, sin, output, parts, options, matrices, scratch, span, sums, slots
):
    """Do as `attend` with everything at hand."""
    page_size, kv_num_heads, head_size = caches[0].shape[1:]
    keys, values = caches[0].reshape(-1, head_size), caches[1].reshape(-1, head_size)
    key_scales, value_scales = caches[2].reshape(-1), caches[3].reshape(-1)
    pages = page_size, kv_num_heads, keys, values, key_scales, value_scales
    step = qkv, block_table, cos, sin, options, matrices
    token = atomic_add(progress, WRITING, TOKENS_AT_ONCE)
    while token < len(slots):
        stop = min(token + TOKENS_AT_ONCE, len(slots))
        write_pages(token, stop, qkv, pages, slots, cos, sin, options[4], scratch[0][0])
        atomic_add(progress, WRITTEN, stop - token)
        token = atomic_add(progress, WRITING, TOKENS_AT_ONCE)
    await_count(progress, WRITTEN, len(slots))
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
def combine(splits, parts, output, step, group, num_heads, head_size):
    """Put the spans of split tasks together, see `StepPlan.splits`, into the bytes of an output with this step."""
    described = output, output.shape[1] // (num_heads * head_size), step
    for split in range(len(splits)):
        kv_head, token, num_rows = splits[split, 0], splits[split, 1], splits[split, 2]
        first_part, num_spans = splits[split, 3], splits[split, 4]
        sums = make_sums(num_rows, parts[2].shape[1])
        for row in range(num_rows):
            for part in range(first_part + row, first_part + num_spans * num_rows, num_rows):
                add_part(sums[0], sums[1], sums[2], row, parts[0], parts[1], parts[2], part)
        write(num_rows, num_rows, group, sums, described, token, kv_head * group * head_size, head_size)


@njit(nogil=True, cache=True, **EXACT)
def lead(
    layer, qkv, output, bells, progress, addresses, tasks, keys, values, key_scales, value_scales, block_table, cos,
    sin, num_heads, scale, softcap, window, interleaved, matrices, parts, slots, steps, splits, num_looks,
):  # fmt: skip
    """`attend` with who helps, wait for them, looking so many times, then `combine`.

    `output` is seen as bytes, (num_rows, bytes of a row), whose elements are what their size says: see `write_row`.
    One call for all of it, and not one word of Python with those who help: its lock would cost more than they save.
    Return whether it came to the end.
    """
    here = addresses[layer]
    here[0], here[1], here[2] = qkv.ctypes.data, output.ctypes.data, output.shape[1]
    ring(bells)
    key_cache, value_cache = keys[layer], values[layer]
    caches = key_cache, value_cache, key_scales[layer], value_scales[layer]
    head_size, step = key_cache.shape[3], steps[layer]
    described = output, output.shape[1] // (num_heads * head_size), step
    attend(
        progress[layer], tasks, qkv, *caches, block_table, cos, sin, described, num_heads, scale, softcap, window,
        interleaved, matrices, parts, slots,
    )  # fmt: skip
    finished = all_finished(progress[layer], len(tasks), num_looks)
    if finished:
        combine(splits, parts, output, step, num_heads // key_cache.shape[2], num_heads, head_size)
    return finished


@njit(nogil=True, cache=True, **EXACT)
def follow(
    bell, num_rows, like, progress, addresses, tasks, keys, values, key_scales, value_scales, block_table, cos, sin,
    num_heads, scale, softcap, window, interleaved, matrices, parts, slots, steps,
):  # fmt: skip
    """Help `lead` in one layer after the other, until all are done or the bell rings for none; qkv is `like` this."""
    head_size = keys.shape[4]
    for layer in range(len(progress)):
        wait(bell)
        if addresses[layer, 0] == 0:
            return
        if atomic_add(progress[layer], CLAIMED, 0) < len(tasks):  # else it comes late, and has nothing to do
            columns, row_bytes = (num_heads + 2 * keys.shape[3]) * head_size, addresses[layer, 2]
            qkv = carray(pointer(addresses[layer, 0]), (num_rows, columns), like.dtype)
            output = carray(pointer(addresses[layer, 1]), (num_rows, row_bytes), np.int8)
            described = output, row_bytes // (num_heads * head_size), steps[layer]
            attend(
                progress[layer], tasks, qkv, keys[layer], values[layer], key_scales[layer], value_scales[layer],
                block_table, cos, sin, described, num_heads, scale, softcap, window, interleaved, matrices, parts,
                slots,
            )  # fmt: skip


@njit(nogil=True, cache=True, **EXACT)
def open_bells(bells):
    """Do as `make_bells`."""
    make_bells(bells)


@njit(nogil=True, cache=True, **EXACT)
def dismiss(bells):
    """Let those who wait for these bells go; `lead` must not ring them any more."""
    ring(bells)


@njit(nogil=True, cache=True, **EXACT)
def close(progress, num_tasks, num_tokens):
    """Let nobody claim anything any more, wait for what is written; return how many tasks have been claimed."""
    claimed = atomic_add(progress, CLAIMED, num_tasks)
    await_count(progress, WRITTEN, min(atomic_add(progress, WRITING, num_tokens), num_tokens))
    atomic_add(progress, WRITTEN, num_tokens)  # those who wait for it shall see that there is nothing to do
    return min(claimed, num_tasks)


@njit(nogil=True, cache=True, **EXACT)
def all_finished(progress, num_tasks, num_looks):
    """Whether all tasks are finished, looking so many times before saying no."""
    while num_looks and atomic_add(progress, FINISHED, 0) < num_tasks:
        num_looks -= 1
    return num_looks > 0
