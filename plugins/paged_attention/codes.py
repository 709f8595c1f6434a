"""What query rows take from a tile of int8 pages by matrix instructions; tile.py does it without.

See `kernels.SOURCES`.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import numpy as np
from numba import njit

from contbatch.plugins.paged_attention.amx import ROWS, interleave, multiply_keys, multiply_values
from contbatch.plugins.paged_attention.digit_sums import add_values, put_scores
from contbatch.plugins.paged_attention.digits import split_queries, split_weights
from contbatch.plugins.paged_attention.gather import EXACT, INNER, announce, gather_scales
from contbatch.plugins.paged_attention.intrinsics import LANES, TILE, lines
from contbatch.plugins.paged_attention.tile import LOWEST, VALUES, exp2, finish_scores


@njit(**EXACT)
def make_code_room(num_rows, num_heads, head_size):
    """Return room for the digits of queries and their factors, those of weights and theirs, values, and sums."""
    chunks, num_blocks = head_size // TILE, num_rows // ROWS + num_heads
    digits, factors = lines(num_blocks * chunks * 1024), np.empty(ROWS * num_blocks, np.float32)
    weights, rates = lines(1024), np.empty((3, ROWS), np.float32)
    return digits, factors, weights, rates, lines(chunks * 4096), lines(5 * 1024), lines(chunks * 4096)


@njit(**INNER)
def prepare_codes(num_heads, num_rows, query, room):
    """Cut the rotated queries of a task, so many rows per kv head, into digits."""
    for head in range(num_heads):
        split_queries(query, head * num_rows, num_rows, room[0], head * _blocks(num_rows), room[1], room[3][0])


@njit(**INNER)
def _blocks(num_rows):
    return (num_rows + ROWS - 1) // ROWS


@njit(**INNER)
def _weigh(begin, end, see, softcap, scales, score, total, top, weights, rates):
    """Online softmax of rows of a block: products with keys → digits of weights, factors of these and of former sums.

    Step by step for all of them: a step's rows do not wait for each other.
    """
    group, position, window, first_row = see
    factors, shrinks, tops = rates
    for i in range(begin, end):
        last = position + (first_row + i) // group
        tops[i] = finish_scores(score, i * TILE, max(0, last - window + 1), min(TILE, last + 1), softcap, scales)
    for i in range(begin, end):
        highest = tops[i] if tops[i] > top[i] else top[i]
        tops[i] = max(highest, LOWEST)
        shrinks[i] = exp2(top[i] - tops[i])
        top[i] = highest
    for i in range(begin, end):
        last = position + (first_row + i) // group
        first, stop = max(0, last - window + 1), min(TILE, last + 1)
        total[i] = total[i] * shrinks[i] + split_weights(
            weights, factors, i, score, i * TILE, tops[i], scales, VALUES, first, stop
        )


@njit(**INNER)
def attend_codes(heads, num_rows, group, position, window, base, count, softcap, pages, rows, ahead, scratch, span):
    """Do as `tile.attend_floats`.

    Products take long but wait for nothing meanwhile: each is begun some work after its factors are stored, and some
    before its sums are needed.
    """
    _, _, keys, values, key_scales, value_scales = pages
    _, score, scales, (digits, factors, weights, rates, tiles, key_sums, value_sums), _ = scratch
    total, top, mix = span
    size = keys.shape[1]
    # Rows that see anything of it: later tokens see later keys.
    start, end = max(0, base - position) * group, min(num_rows, (TILE - 1 + base - position + window) * group)
    piece = (TILE + 4 * heads * _blocks(num_rows) - 1) // (4 * heads * _blocks(num_rows))
    announced = 0
    target, weighed, i = 0, 0, 0  # the weights that are to meet values: where, how many rows, first of a block
    for head in range(heads):
        gather_scales(scales, key_scales, value_scales, rows, head, count)
        for block in range(start - start % ROWS, end, ROWS):
            begin, stop_row = max(block, start), min(block + ROWS, end)
            number = head * _blocks(num_rows) + block // ROWS
            first = max(0, position + begin // group - base - window + 1)
            stop = min(TILE, position + (stop_row - 1) // group - base + 1)
            announce(pages, ahead, announced, piece)
            for k in range(first - first % LANES, stop, LANES):
                multiply_keys(key_sums, digits, number * size * 16, keys[head:], rows, k)
            if weighed:
                multiply_values(value_sums, weights, tiles, size)
            announce(pages, ahead, announced + piece, piece)
            if block <= start:
                interleave(tiles, values[head:], rows, (count + 3) // 4)
            add_values(mix, target, size, value_sums, rates[0], rates[1], i, weighed)
            announce(pages, ahead, announced + 2 * piece, piece)
            for k in range(first - first % LANES, stop, LANES):
                put_scores(score, key_sums, factors, number * ROWS, k)
            row = head * num_rows + block
            see = group, position - base, window, block
            _weigh(begin - block, stop_row - block, see, softcap, scales, score, total[row:], top[row:], weights, rates)
            announce(pages, ahead, announced + 3 * piece, piece)
            announced += 4 * piece
            target, weighed, i = (head * num_rows + begin) * size, stop_row - begin, begin - block
    if weighed:
        multiply_values(value_sums, weights, tiles, size)
    add_values(mix, target, size, value_sums, rates[0], rates[1], i, weighed)
