"""What query rows take from a tile of keys and values. See `kernels.SOURCES`."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import numpy as np
from numba import njit

from contbatch.plugins.paged_attention.elements import scaled
from contbatch.plugins.paged_attention.gather import EXACT, INNER, announce, gather_keys, gather_scales, gather_values
from contbatch.plugins.paged_attention.intrinsics import LANES, TILE, fma
from contbatch.plugins.paged_attention.products import (
    add_product,
    add_product_2,
    add_product_3,
    add_rows,
    add_rows_2,
    add_rows_3,
    add_rows_4,
    score_rows,
    score_rows_2,
    score_rows_3,
    score_rows_4,
)
from contbatch.plugins.paged_attention.softmax import exp_scores, mask_scores

SPAN = 8 * TILE
"""Positions, counted from 0 of the sequence, whose sums are one part: those of several are put together in their order.

Always, so that it makes no difference to any bit whether one thread takes in all spans of a sequence or each another.
"""
ROWS_AT_ONCE = 3
ROWS_AT_MOST = 4
"""Query rows of one token that `_attend_pages` takes: so many rows of sums stay in registers."""
PARTS = TILE // LANES + 1
"""Of the work on a tile for one kv head, after each of which a piece of the next tile is announced."""
KEYS, VALUES, NONE = 0, TILE, 2 * TILE
"""Where the scales of a tile's keys, those of its values, and ones begin."""
LOG2_E = np.float32(1.4426950408889634)
MASKED = np.float32(-np.inf)
LOWEST = np.finfo(np.float32).min
"""In place of -inf, from which nothing can be subtracted, when all scores so far are that."""
ZERO = np.float32(0)
ONE = np.float32(1)


@njit(**INNER)
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


@njit(**INNER)
def finish_scores(score, i, first, stop, softcap, scales):
    """Make products in score[i : i + TILE] scores to the base 2, -inf outside first..stop-1; return the highest."""
    highest = mask_scores(score, i, first, stop, scales, KEYS)
    if softcap > ZERO:
        for j in range(i + first, i + stop):
            e = exp2(np.float32(-2) * LOG2_E * abs(score[j]))
            tanh = (ONE - e) / (ONE + e)
            score[j] = softcap * LOG2_E * (tanh if score[j] > ZERO else -tanh)
        highest = mask_scores(score, i, first, stop, scales, NONE)
    return highest


@njit(**INNER)
def _weigh(score, i, first, stop, softcap, scales, top, total, output, row):
    """Online softmax: score[i + first : i + stop] (base 2) → weights, the rest → 0; a row shrinks when its top rises.

    Scores come without the scales of their keys, weights leave with those of their values.
    """
    highest = finish_scores(score, i, first, stop, softcap, scales)
    if highest > top[row]:
        shrink = exp2(top[row] - highest)
        top[row] = highest
        total[row] *= shrink
        values = output[row]
        for d in range(len(values)):
            values[d] *= shrink
    total[row] += exp_scores(score, i, max(top[row], LOWEST), scales, VALUES)


@njit(**EXACT)
def make_room(_num_rows, _num_heads, head_size):
    """Return room for a tile of keys, and of values."""
    chunks = (head_size + TILE - 1) // TILE
    return np.zeros((head_size, TILE), np.float32), np.zeros((chunks, TILE, TILE), np.float32)


@njit(**INNER)
def prepare(_num_heads, _num_rows, _query, _room):
    """Do nothing: queries are taken as they are."""


@njit(**INNER)
def attend_floats(heads, num_rows, group, position, window, base, count, softcap, pages, rows, ahead, scratch, span):
    """Let the query rows of a task, so many for each kv head, take in the tile of `count` keys at `base`.

    Keys and values are in these rows of the pages for the first head, and in those that follow for others.
    """
    _, _, keys, values, key_scales, value_scales = pages
    straight = num_rows == group <= ROWS_AT_MOST and keys.shape[1] % TILE == 0
    piece = (TILE + PARTS * heads - 1) // (PARTS * heads) if straight else TILE
    announced = 0
    for head in range(heads):
        row, head_keys, head_values = head * num_rows, keys[head:], values[head:]
        if scaled(keys):
            gather_scales(scratch[2], key_scales, value_scales, rows, head, count)
        if straight:
            announced = _attend_pages(
                row, group, position, window, base, softcap, head_keys, head_values, rows, scratch, span,
                pages, ahead, announced, piece,
            )  # fmt: skip
        else:
            announced = _announce(pages, ahead, announced, piece)
            gather_keys(scratch[3][0], head_keys, rows, count)
            gather_values(scratch[3][1], head_values, rows, count)
            _attend_tile(row, num_rows, group, position, window, base, softcap, scratch, span)
    announce(pages, ahead, announced, TILE)


@njit(**INNER)
def _announce(pages, ahead, announced, piece):
    """Announce a piece of the next tile; return how many of its rows are announced."""
    announce(pages, ahead, announced, piece)
    return announced + piece


@njit(**INNER)
def _add_product(count, out, i, out_step, x, j, x_step, n, matrix, k):
    """Do as `add_product` for `count` rows, at most 3."""
    if count == 3:
        add_product_3(out, i, out_step, x, j, x_step, n, matrix, k)
    elif count == 2:
        add_product_2(out, i, out_step, x, j, x_step, n, matrix, k)
    else:
        add_product(out, i, out_step, x, j, x_step, n, matrix, k)


@njit(**INNER)
def _attend_tile(first_row, num_rows, group, position, window, base, softcap, scratch, span):
    """Let the query rows of a kv head, from first_row on, take in the tile of keys at `base`."""
    query, score, scales, (keys, values), _ = scratch
    total, top, mix = span
    head_size, chunks = keys.shape[0], values.shape[0]
    width = chunks * TILE
    row = 0
    while row < num_rows:
        count = min(ROWS_AT_ONCE, group - row % group)  # rows of one token: they see the same keys
        last = position + row // group - base
        first, stop = max(0, last - window + 1), min(TILE, last + 1)
        if first < TILE and stop > 0:
            score[: count * TILE] = ZERO
            _add_product(count, score, 0, TILE, query, (first_row + row) * head_size, head_size, head_size, keys, 0)
            for i in range(count):
                _weigh(score, i * TILE, first, stop, softcap, scales, top, total, mix, first_row + row + i)
            for c in range(chunks):
                _add_product(
                    count,
                    mix,
                    (first_row + row) * width + c * TILE,
                    width,
                    score,
                    0,
                    TILE,
                    stop,
                    values,
                    c * TILE,
                )
        row += count


@njit(**INNER)
def _score_rows(count, out, i, x, j, head_size, matrix, rows, k):
    """Do as `score_rows` for `count` rows, at most 4."""
    if count == 3:
        score_rows_3(out, i, TILE, x, j, head_size, matrix, rows, k)
    elif count == 4:
        score_rows_4(out, i, TILE, x, j, head_size, matrix, rows, k)
    elif count == 2:
        score_rows_2(out, i, TILE, x, j, head_size, matrix, rows, k)
    else:
        score_rows(out, i, TILE, x, j, head_size, matrix, rows, k)


@njit(**INNER)
def _add_rows(count, out, i, x, n, matrix, rows, column):
    """Do as `add_rows` for `count` rows, at most 4."""
    width = matrix.shape[1]
    if count == 3:
        add_rows_3(out, i, width, x, 0, TILE, n, matrix, rows, column)
    elif count == 4:
        add_rows_4(out, i, width, x, 0, TILE, n, matrix, rows, column)
    elif count == 2:
        add_rows_2(out, i, width, x, 0, TILE, n, matrix, rows, column)
    else:
        add_rows(out, i, width, x, 0, TILE, n, matrix, rows, column)


@njit(**INNER)
def _attend_pages(
    first_row, group, position, window, base, softcap, keys, values, rows, scratch, span, pages, ahead, announced, piece
):
    """Do as `_attend_tile` for the query rows of one token, with keys and values in these rows of their pages.

    The next tile is announced in pieces between the parts of the work, all of it at once would hold that up; return how
    many of its rows are.
    """
    query, score, scales, (total, top, mix) = scratch[0], scratch[1], scratch[2], span
    last, head_size = position - base, keys.shape[1]
    first, stop = max(0, last - window + 1), min(TILE, last + 1)
    start = first_row * head_size
    for k in range(0, stop, LANES):
        announced = _announce(pages, ahead, announced, piece)
        _score_rows(group, score, k, query, start, head_size, keys, rows, k)
    announced = _announce(pages, ahead, announced, piece)
    for i in range(group):
        _weigh(score, i * TILE, first, stop, softcap, scales, top, total, mix, first_row + i)
    for column in range(0, head_size, TILE):
        _add_rows(group, mix, start + column, score, stop, values, rows, column)
    return announced


@njit(**INNER)
def add_part(total, top, mix, row, totals, tops, mixes, part):
    """Add part `part` to the sums of `row`: totals[part] of weights, mixes[part] of values, both over 2**tops[part]."""
    if totals[part] == ZERO:  # it saw no key; a NaN is not left out
        return
    highest = max(top[row], tops[part])
    old, new = exp2(top[row] - highest), exp2(tops[part] - highest)
    top[row] = highest
    total[row] = fma(total[row], old, totals[part] * new)
    into, values = mix[row], mixes[part]
    for d in range(len(into)):
        into[d] = fma(into[d], old, values[d] * new)
