"""What query rows take from a tile of keys and values. After a change here touch kernels.py, see intrinsics."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import numpy as np
from numba import njit

from contbatch.plugins.paged_attention.gather import EXACT
from contbatch.plugins.paged_attention.intrinsics import (
    TILE,
    add_product,
    add_product_2,
    add_product_3,
    row_max,
    row_sum,
)

SPAN = 8 * TILE
"""Positions, counted from 0 of the sequence, whose sums are one part: those of several are put together in their order.

Always, so that it makes no difference to any bit whether one thread takes in all spans of a sequence or each another.
"""
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
def _add_product(count, out, i, out_step, x, j, x_step, n, matrix, k):
    """Do as `add_product` for `count` rows, at most 3."""
    if count == 3:
        add_product_3(out, i, out_step, x, j, x_step, n, matrix, k)
    elif count == 2:
        add_product_2(out, i, out_step, x, j, x_step, n, matrix, k)
    else:
        add_product(out, i, out_step, x, j, x_step, n, matrix, k)


@njit(**EXACT)
def attend_tile(num_rows, group, position, window, base, softcap, scratch):
    """Let the task's query rows take in the tile of keys at `base`."""
    query, keys, values, score, total, top, mix = scratch
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


@njit(**EXACT)
def add_part(total, top, mix, row, totals, tops, mixes, part):
    """Add part `part` to the sums of `row`: totals[part] of weights, mixes[part] of values, both over 2**tops[part]."""
    if totals[part] == ZERO:  # it saw no key; a NaN is not left out
        return
    highest = max(top[row], tops[part])
    old, new = exp2(top[row] - highest), exp2(tops[part] - highest)
    top[row] = highest
    total[row] = total[row] * old + totals[part] * new
    for d in range(mix.shape[1]):
        mix[row, d] = mix[row, d] * old + mixes[part, d] * new


@njit(**EXACT)
def divide(mix, row, divisor, output, token, column, head_size):
    """output[token, column : column + head_size] = mix[row] / divisor."""
    for d in range(head_size):
        output[token, column + d] = mix[row, d] / divisor
