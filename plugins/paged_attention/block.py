"""One task: the query rows of a block of tokens take in their keys. See `kernels.SOURCES`."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import numpy as np
from numba import njit

from contbatch.plugins.paged_attention.elements import scaled
from contbatch.plugins.paged_attention.gather import (
    EXACT,
    announce,
    gather_keys,
    gather_scales,
    gather_values,
    locate,
    locate_first,
)
from contbatch.plugins.paged_attention.intrinsics import TILE, borrowed
from contbatch.plugins.paged_attention.rotary import rotate
from contbatch.plugins.paged_attention.tile import (
    MASKED,
    ROWS_AT_MOST,
    SPAN,
    ZERO,
    add_part,
    attend_pages,
    attend_tile,
    divide,
)


@njit(**EXACT)
def make_sums(num_rows, width):
    """Return, for so many rows, empty sums of weights and of values over 2 to the power of the second, the top."""
    return np.zeros(num_rows, np.float32), np.full(num_rows, MASKED), np.zeros((num_rows, width), np.float32)


@njit(**EXACT)
def make_scratch(num_rows, head_size):
    """Return what `attend_block` works in: queries, scores, scales, a tile of keys, of values, and rows twice."""
    chunks = (head_size + TILE - 1) // TILE
    query, score = np.empty((num_rows, head_size), np.float32), np.empty((ROWS_AT_MOST, TILE), np.float32)
    keys, values = np.zeros((head_size, TILE), np.float32), np.zeros((chunks, TILE, TILE), np.float32)
    return query, score, np.ones(3 * TILE, np.float32), keys, values, np.empty((2, TILE), np.int64)


@njit(**EXACT)
def attend_block(task, following, turn, step, pages, output, parts, scratch, span, sums):
    """Work on a task, whose first tile is in rows[turn] of scratch; return where the first of the following is.

    `span` and `sums` are empty sums, and are left so. See `kernels._work` for `step` and `pages`.
    """
    qkv, block_table, cos, sin, (group, factor, softcap, window, interleaved) = step
    _, _, keys, values, key_scales, value_scales = pages
    query, scales, rows, head_size = scratch[0], scratch[2], scratch[5], keys.shape[1]
    first_head, heads, token, num_rows = task[1], task[2] - task[1], task[3], group * task[4]
    position, first, end, part, column = task[5], task[6], task[7], task[8], first_head * group * head_size
    straight = num_rows == group <= ROWS_AT_MOST and head_size % TILE == 0
    whole = part < 0 and first // SPAN == (end - 1) // SPAN
    for row in range(heads * num_rows):
        t, start = token + row % num_rows // group, column + (row // num_rows * group + row % group) * head_size
        rotate(qkv[t, start : start + head_size], cos[t], sin[t], interleaved, factor, query[row])
    for base in range(first - first % TILE, end, TILE):
        here, count = rows[turn], min(TILE, end - base)
        _look_ahead(rows[1 - turn], task, base + TILE, following, block_table, pages)
        for head in range(heads):
            if scaled(keys):
                gather_scales(scales, key_scales, value_scales, here, head, count)
            row, head_keys, head_values = head * num_rows, keys[head:], values[head:]
            if straight:
                attend_pages(row, group, position, window, base, softcap, head_keys, head_values, here, scratch, span)
            else:
                gather_keys(scratch[3], head_keys, here, count)
                gather_values(scratch[4], head_values, here, count)
                attend_tile(row, num_rows, group, position, window, base, softcap, scratch, span)
        turn = 1 - turn
        if not whole and ((base + TILE) % SPAN == 0 or base + TILE >= end):
            _put_away(heads * num_rows, span, sums, parts, part)
    if part < 0:
        write(heads * num_rows, num_rows, group, span if whole else sums, output, token, column, head_size)
    return turn


@njit(**EXACT)
def _look_ahead(rows, task, base, following, block_table, pages):
    """Locate the tile at `base`, or the first of the following task, and ask for it to be fetched from memory."""
    page_size, kv_num_heads, keys, values, key_scales, value_scales = pages
    if base < task[7]:
        end, heads = min(base + TILE, task[7]), task[2] - task[1]
        locate(rows, base, base, end, block_table[task[0]], page_size, kv_num_heads, task[1])
        announce(keys, values, key_scales, value_scales, rows, end - base, heads)
    elif len(following):
        count = locate_first(rows, following, block_table, page_size, kv_num_heads)
        announce(keys, values, key_scales, value_scales, rows, count, following[2] - following[1])


@njit(**EXACT)
def _put_away(num_rows, span, sums, parts, first_part):
    """Add the sums of a span to those of the task, or keep them in `parts` from first_part on; begin anew."""
    total, top, mix = span
    for row in range(num_rows):
        if first_part < 0:
            add_part(sums[0], sums[1], sums[2], row, total, top, mix, row)
        else:
            parts[0][first_part + row], parts[1][first_part + row] = total[row], top[row]
            parts[2][first_part + row] = mix[row]
    total[:num_rows], top[:num_rows], mix[:num_rows] = ZERO, MASKED, ZERO


@njit(**EXACT)
def write(num_rows, per_head, group, sums, output, token, column, head_size):
    """Fill the output of a task's rows, so many per kv head, and empty their sums."""
    total, top, mix = sums
    for row in range(num_rows):
        t, start = token + row % per_head // group, column + (row // per_head * group + row % group) * head_size
        divide(mix[row], total[row], output[t, start : start + head_size])
    total[:num_rows], top[:num_rows], mix[:num_rows] = ZERO, MASKED, ZERO


@njit(**EXACT)
def borrow_scratch(scratch):
    """Do as `borrowed` for all of it."""
    query, score, scales, keys, values, rows = scratch
    return borrowed(query), borrowed(score), borrowed(scales), borrowed(keys), borrowed(values), borrowed(rows)


@njit(**EXACT)
def borrow_sums(sums):
    """Do as `borrowed` for all three."""
    return borrowed(sums[0]), borrowed(sums[1]), borrowed(sums[2])
