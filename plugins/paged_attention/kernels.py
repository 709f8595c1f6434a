"""The op's Numba kernels for the CPU: `write_pages`, then `attend` from any number of threads at once.

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
from contbatch.plugins.paged_attention.intrinsics import (
    TILE,
    add_product,
    add_product_2,
    add_product_3,
    atomic_add,
    row_max,
    row_sum,
)

CLAIMED, FINISHED, WRITTEN = range(3)
"""What threads tell each other through an int64 array: tasks claimed and finished, and whether pages are written."""
MANY_TASKS = 12
"""So many tasks left keep all threads busy even if each holds one more than it works on."""
ROWS_AT_ONCE = 3
LOG2_E = np.float32(1.4426950408889634)
MASKED = np.float32(-np.inf)
ZERO = np.float32(0)
ONE = np.float32(1)


@njit(**EXACT)
def exp2(x):
    """2**x for float32 x ≤ 0: exact at 0, within 1 ulp elsewhere, exactly 0 from about -126.5 down; NaN stays NaN."""
    x = np.float32(-127) if x < np.float32(-127) else x
    # Adding 1.5·2²³ rounds to an integer, which then sits in the low bits; a minimax polynomial takes the fraction.
    shifted = np.float32(x + np.float32(12582912))
    f = x - (shifted - np.float32(12582912))
    p = np.float32(1.5353362e-4)
    p = p * f + np.float32(1.33988739e-3)
    p = p * f + np.float32(9.61843692e-3)
    p = p * f + np.float32(5.55033237e-2)
    p = p * f + np.float32(0.240226477)
    p = p * f + np.float32(0.693147182)
    p = p * f + ONE
    return p * np.uint32((shifted.view(np.uint32) + np.uint32(127)) << np.uint32(23)).view(np.float32)


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


@njit(nogil=True, cache=True, **EXACT)
def write_pages(
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
def _weigh(score, first, stop, softcap, top, total, output, row):
    """Online softmax: score[first:stop] (base 2) → weights, the rest → 0; the row is rescaled when its top rises."""
    if softcap > ZERO:
        for j in range(TILE):
            e = exp2(np.float32(-2) * LOG2_E * abs(score[j]))
            tanh = (ONE - e) / (ONE + e)
            score[j] = softcap * LOG2_E * (tanh if score[j] > ZERO else -tanh)
    score[:first] = MASKED
    score[stop:] = MASKED
    highest = row_max(score, 0)
    if highest > top[row]:
        shrink = exp2(top[row] - highest)
        top[row] = highest
        total[row] *= shrink
        for d in range(output.shape[1]):
            output[row, d] *= shrink
    highest = top[row]
    for j in range(TILE):
        score[j] = exp2(score[j] - highest)
    total[row] += row_sum(score, 0)


@njit(**EXACT)
def _divide(mix, row, divisor, output, token, column, head_size):
    """output[token, column : column + head_size] = mix[row] / divisor."""
    for d in range(head_size):
        output[token, column + d] = mix[row, d] / divisor


@njit(**EXACT)
def _add_product(count, out, i, out_step, x, j, x_step, n, matrix, k):
    """Do as `add_product` for `count` rows, at most 3."""
    if count == 3:
        add_product_3(out, i, out_step, x, j, x_step, n, matrix, k)
    elif count == 2:
        add_product_2(out, i, out_step, x, j, x_step, n, matrix, k)
    else:
        add_product(out, i, out_step, x, j, x_step, n, matrix, k)


@njit(**EXACT)
def _attend_tile(num_rows, group, position, window, base, softcap, scratch):
    """Let the task's query rows take in the tile of keys at `base`."""
    query, keys, values, score, total, top, mix, _rows = scratch
    head_size, chunks = keys.shape[0], values.shape[0]
    width = chunks * TILE
    flat_score = score.reshape(-1)
    flat_query, flat_mix, flat_values = query.reshape(-1), mix.reshape(-1), values.reshape(-1, TILE)
    row = 0
    while row < num_rows:
        count = min(ROWS_AT_ONCE, group - row % group)  # rows of one token: they see the same keys
        last = position + row // group - base
        first, stop = max(0, last - window + 1), min(TILE, last + 1)
        if first < TILE and stop > 0:
            score[:count] = ZERO
            _add_product(count, flat_score, 0, TILE, flat_query, row * head_size, head_size, head_size, keys, 0)
            for i in range(count):
                _weigh(score[i], first, stop, softcap, top, total, mix, row + i)
            for c in range(chunks):
                _add_product(
                    count, flat_mix, row * width + c * TILE, width, flat_score, 0, TILE, stop, flat_values, c * TILE
                )
        row += count


@njit(nogil=True, cache=True, **EXACT)
def attend(
    progress, tasks, qkv, key_cache, value_cache, key_scales, value_scales, block_table, cos, sin, output, num_heads,
    scale, softcap, window, interleaved,
):  # fmt: skip
    """Work through the tasks not yet claimed: (sequence, kv head, first token, tokens, position of the first token).

    `progress` counts them, see `CLAIMED`, `FINISHED` and `WRITTEN`.
    """
    page_size, kv_num_heads, head_size = key_cache.shape[1:]
    group, chunks = num_heads // kv_num_heads, (head_size + TILE - 1) // TILE
    most_rows = group * tasks[:, 3].max()
    query, mix = np.empty((most_rows, head_size), np.float32), np.empty((most_rows, chunks * TILE), np.float32)
    total, top = np.empty(most_rows, np.float32), np.empty(most_rows, np.float32)
    keys, values = np.zeros((head_size, TILE), np.float32), np.zeros((chunks, TILE, TILE), np.float32)
    score, rows = np.empty((ROWS_AT_ONCE, TILE), np.float32), np.empty(TILE, np.int64)
    scratch = query, keys, values, score, total, top, mix, rows
    key_rows, value_rows = key_cache.reshape(-1, head_size), value_cache.reshape(-1, head_size)
    key_factors, value_factors = key_scales.reshape(-1, 1), value_scales.reshape(-1, 1)
    factor = scale / softcap if softcap > ZERO else scale * LOG2_E

    while not atomic_add(progress, WRITTEN, 0):
        pass
    task = atomic_add(progress, CLAIMED, 1)
    if task < len(tasks):
        locate_first(rows, tasks[task], block_table, window, page_size, kv_num_heads)
    while task < len(tasks):
        # Claimed ahead for its first tile to be fetched in time, unless another thread would go without.
        following = atomic_add(progress, CLAIMED, 1) if task + MANY_TASKS < len(tasks) else len(tasks)
        pages, kv_head, token = block_table[tasks[task, 0]], tasks[task, 1], tasks[task, 2]
        num_rows, position = group * tasks[task, 3], tasks[task, 4]
        column = kv_head * group * head_size
        for row in range(num_rows):
            _rotate(
                qkv, token + row // group, column + row % group * head_size, cos, sin, interleaved, factor, query, row,
                head_size,
            )  # fmt: skip
        total[:num_rows], top[:num_rows], mix[:num_rows] = ZERO, MASKED, ZERO
        first, end = max(0, position - window + 1), position + tasks[task, 3]
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
                tokens = locate_first(rows, tasks[following], block_table, window, page_size, kv_num_heads)
                announce(key_rows, value_rows, key_factors, value_factors, rows, tokens)
            _attend_tile(num_rows, group, position, window, base, softcap, scratch)
        for row in range(num_rows):
            _divide(mix, row, total[row], output, token + row // group, column + row % group * head_size, head_size)
        atomic_add(progress, FINISHED, 1)
        if following == len(tasks):
            following = atomic_add(progress, CLAIMED, 1)
            if following < len(tasks):
                locate_first(rows, tasks[following], block_table, window, page_size, kv_num_heads)
        task = following


@njit(nogil=True, cache=True, **EXACT)
def close(progress, num_tasks):
    """Let nobody claim a task any more; return how many have been claimed."""
    claimed = atomic_add(progress, CLAIMED, num_tasks)
    atomic_add(progress, WRITTEN, 1)  # those who wait for it shall see that there is nothing to do
    return min(claimed, num_tasks)


@njit(nogil=True, cache=True, **EXACT)
def all_finished(progress, num_tasks, num_looks):
    """Whether all tasks are finished, looking so many times before saying no."""
    while num_looks and atomic_add(progress, FINISHED, 0) < num_tasks:
        num_looks -= 1
    return num_looks > 0
