"""The op's Numba kernels for the CPU: `lead` by the caller, `attend` by any number of threads at once.

Flash attention (Dao et al. 2022) over pages (Kwon et al. 2023). Keys are taken in tiles of `TILE` positions counted
from position 0 of the sequence, whatever the page size, and every sum runs in the same order within a tile: the result
of a token depends on nothing but its own sequence, bit for bit.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import numpy as np
from numba import njit

from contbatch.plugins.paged_attention.elements import store_row
from contbatch.plugins.paged_attention.gather import (
    EXACT,
    announce,
    gather_keys,
    gather_values,
    locate,
    locate_first,
)
from contbatch.plugins.paged_attention.intrinsics import TILE, atomic_add
from contbatch.plugins.paged_attention.tile import (
    LOG2_E,
    MASKED,
    ONE,
    ROWS_AT_ONCE,
    SPAN,
    ZERO,
    add_part,
    attend_tile,
    divide,
)

CLAIMED, FINISHED, WRITTEN, LEFT = range(4)
"""What threads tell each other through an int64 array: tasks claimed and finished, whether pages are written, and
whether the caller is gone."""
MANY_TASKS = 12
"""So many tasks left keep all threads busy even if each holds one more than it works on."""


@njit(**EXACT)
def _rotate(x, token, column, cos, sin, interleaved, factor, out, row, head_size):
    """out[row] = factor · (the head at x[token, column:], rotated by the token's cos and sin)."""
    half = cos.shape[1]
    if interleaved:
        for i in range(half):
            a, b = x[token, column + 2 * i], x[token, column + 2 * i + 1]
            out[row, 2 * i] = factor * (a * cos[token, i] - b * sin[token, i])
            out[row, 2 * i + 1] = factor * (b * cos[token, i] + a * sin[token, i])
    else:
        for i in range(half):
            a, b = x[token, column + i], x[token, column + half + i]
            out[row, i] = factor * (a * cos[token, i] - b * sin[token, i])
            out[row, half + i] = factor * (b * cos[token, i] + a * sin[token, i])
    for d in range(2 * half, head_size):
        out[row, d] = factor * x[token, column + d]


@njit(**EXACT)
def _write_pages(
    progress, qkv, key_cache, value_cache, key_scales, value_scales, slots, cos, sin, num_heads, interleaved
):
    """Rotate and store this step's keys, and store its values; token t goes to slot slots[t] of the pool."""
    kv_num_heads, head_size = key_cache.shape[2:]
    key_rows, value_rows = key_cache.reshape(-1, head_size), value_cache.reshape(-1, head_size)
    key = np.empty((1, head_size), np.float32)
    for t in range(len(slots)):
        for h in range(kv_num_heads):
            row, column = slots[t] * kv_num_heads + h, (num_heads + h) * head_size
            _rotate(qkv, t, column, cos, sin, interleaved, ONE, key, 0, head_size)
            store_row(key_rows, key_scales.reshape(-1), row, key[0], 0)
            store_row(value_rows, value_scales.reshape(-1), row, qkv[t], column + kv_num_heads * head_size)
    atomic_add(progress, WRITTEN, 1)


@njit(**EXACT)
def _put_away(num_rows, scratch, sums, parts, first_part):
    """Add the sums of a span to those of the task, or keep them in `parts` from first_part on; begin anew."""
    total, top, mix = scratch[4:]
    for row in range(num_rows):
        if first_part < 0:
            add_part(sums[0], sums[1], sums[2], row, total, top, mix, row)
        else:
            parts[0][first_part + row], parts[1][first_part + row] = total[row], top[row]
            parts[2][first_part + row] = mix[row]
    total[:num_rows], top[:num_rows], mix[:num_rows] = ZERO, MASKED, ZERO


@njit(**EXACT)
def _sums(num_rows, width):
    """Return, for so many rows, empty sums of weights and of values over 2 to the power of the second, the top."""
    return np.zeros(num_rows, np.float32), np.full(num_rows, MASKED), np.zeros((num_rows, width), np.float32)


@njit(nogil=True, cache=True, **EXACT)
def attend(
    progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output, num_heads,
    scale, softcap, window, interleaved, parts,
):  # fmt: skip
    """Work through the tasks not yet claimed, see `StepPlan.tasks`.

    `progress` counts them, see `CLAIMED`, `FINISHED` and `WRITTEN`.
    """
    page_size, kv_num_heads, head_size = key_cache.shape[1:]
    group, chunks = num_heads // kv_num_heads, (head_size + TILE - 1) // TILE
    most_rows = group * tasks[:, 3].max()
    query, rows = np.empty((most_rows, head_size), np.float32), np.empty(TILE, np.int64)
    keys, values = np.zeros((head_size, TILE), np.float32), np.zeros((chunks, TILE, TILE), np.float32)
    score, sums = np.empty((ROWS_AT_ONCE, TILE), np.float32), _sums(most_rows, chunks * TILE)
    total, top, mix = _sums(most_rows, chunks * TILE)
    scratch = query, keys, values, score, total, top, mix
    key_rows, value_rows = key_cache.reshape(-1, head_size), value_cache.reshape(-1, head_size)
    key_factors, value_factors = key_scales.reshape(-1, 1), value_scales.reshape(-1, 1)
    factor = scale / softcap if softcap > ZERO else scale * LOG2_E

    while not atomic_add(progress, WRITTEN, 0):
        pass
    task = atomic_add(progress, CLAIMED, 1)
    if task < len(tasks):
        locate_first(rows, tasks[task], block_table, page_size, kv_num_heads)
    while task < len(tasks):
        # Claimed ahead for its first tile to be fetched in time, unless another thread would go without.
        following = atomic_add(progress, CLAIMED, 1) if task + MANY_TASKS < len(tasks) else len(tasks)
        pages, kv_head, token = block_table[tasks[task, 0]], tasks[task, 1], tasks[task, 2]
        num_rows, position, part = group * tasks[task, 3], tasks[task, 4], tasks[task, 7]
        first, end, column = tasks[task, 5], tasks[task, 6], kv_head * group * head_size
        for row in range(num_rows):
            _rotate(
                qkv, token + row // group, column + row % group * head_size, cos, sin, interleaved, factor, query, row,
                head_size,
            )  # fmt: skip
        for base in range(first - first % TILE, end, TILE):
            count = min(TILE, end - base)
            gather_keys(keys, key_rows, key_factors[:, 0], rows, count)
            gather_values(values, value_rows, value_factors[:, 0], rows, count)
            if base + TILE < end:
                locate(
                    rows, base + TILE, base + TILE, min(base + 2 * TILE, end), pages, page_size, kv_num_heads, kv_head
                )
                announce(key_rows, value_rows, key_factors, value_factors, rows, min(TILE, end - base - TILE))
            elif following < len(tasks):
                tokens = locate_first(rows, tasks[following], block_table, page_size, kv_num_heads)
                announce(key_rows, value_rows, key_factors, value_factors, rows, tokens)
            attend_tile(num_rows, group, position, window, base, softcap, scratch)
            if (base + TILE) % SPAN == 0 or base + TILE >= end:
                _put_away(num_rows, scratch, sums, parts, part)
        if part < 0:
            _write(num_rows, group, sums, output, token, column, head_size)
        atomic_add(progress, FINISHED, 1)
        if following == len(tasks):
            following = atomic_add(progress, CLAIMED, 1)
            if following < len(tasks):
                locate_first(rows, tasks[following], block_table, page_size, kv_num_heads)
        task = following


@njit(**EXACT)
def _write(num_rows, group, sums, output, token, column, head_size):
    """Fill the output of a task's rows, and empty their sums."""
    for row in range(num_rows):
        divide(sums[2], row, sums[0][row], output, token + row // group, column + row % group * head_size, head_size)
    sums[0][:num_rows], sums[1][:num_rows], sums[2][:num_rows] = ZERO, MASKED, ZERO


@njit(nogil=True, cache=True, **EXACT)
def combine(splits, parts, output, group, head_size):
    """Put the spans of split tasks together, see `StepPlan.splits`."""
    for split in range(len(splits)):
        kv_head, token, num_rows = splits[split, 0], splits[split, 1], splits[split, 2]
        first_part, num_spans = splits[split, 3], splits[split, 4]
        sums = _sums(num_rows, parts[2].shape[1])
        for row in range(num_rows):
            for part in range(first_part + row, first_part + num_spans * num_rows, num_rows):
                add_part(sums[0], sums[1], sums[2], row, parts[0], parts[1], parts[2], part)
        _write(num_rows, group, sums, output, token, kv_head * group * head_size, head_size)


@njit(nogil=True, cache=True, **EXACT)
def lead(
    progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output, num_heads,
    scale, softcap, window, interleaved, parts, slots, splits, num_looks,
):  # fmt: skip
    """Store this step's keys and values, `attend`, wait for who helps, looking so many times, then `combine`.

    One call for all of it: after each the caller would have to wait for the interpreter's lock while a helper has it.
    Return whether it came to the end.
    """
    _write_pages(
        progress, qkv, key_cache, value_cache, key_scales, value_scales, slots, cos, sin, num_heads, interleaved
    )
    attend(
        progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output,
        num_heads, scale, softcap, window, interleaved, parts,
    )  # fmt: skip
    finished = all_finished(progress, len(tasks), num_looks)
    if finished:
        combine(splits, parts, output, num_heads // key_cache.shape[2], key_cache.shape[3])
    atomic_add(progress, LEFT, 1)
    return finished


@njit(nogil=True, cache=True, **EXACT)
def follow(
    progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output, num_heads,
    scale, softcap, window, interleaved, parts,
):  # fmt: skip
    """Help `lead`, and stay until it has left: it shall get the interpreter's lock first."""
    attend(
        progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output,
        num_heads, scale, softcap, window, interleaved, parts,
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
