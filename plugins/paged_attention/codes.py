"""What query rows take from a tile of int8 pages by matrix instructions: does as `tile.attend_tile`.

See `kernels.SOURCES`.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import numpy as np
from numba import njit

from contbatch.plugins.paged_attention.amx import (
    ROWS,
    add_values,
    interleave,
    multiply_keys,
    multiply_values,
    put_scores,
)
from contbatch.plugins.paged_attention.digits import split_queries, split_weights
from contbatch.plugins.paged_attention.gather import EXACT, gather_scales
from contbatch.plugins.paged_attention.intrinsics import LANES, TILE, borrowed, lines
from contbatch.plugins.paged_attention.tile import weigh


@njit(**EXACT)
def make_code_room(num_rows, num_heads, head_size):
    """Return room for the digits of queries and their factors, those of weights and theirs, values, and sums."""
    chunks, num_blocks = head_size // TILE, num_rows // ROWS + num_heads
    digits, factors = lines(num_blocks * chunks * 1024), np.empty(ROWS * num_blocks, np.float32)
    weights, weight_factors = lines(1024), np.empty(ROWS, np.float32)
    return digits, factors, weights, weight_factors, lines(chunks * 4096), lines(5 * 1024), lines(chunks * 4096)


@njit(**EXACT)
def borrow_code_room(room):
    """Do as `borrowed` for all of it."""
    digits, factors, weights, weight_factors, values, key_sums, value_sums = room
    digits, factors, weights, weight_factors = borrowed(digits), borrowed(factors), borrowed(weights), borrowed(weight_factors)
    return digits, factors, weights, weight_factors, borrowed(values), borrowed(key_sums), borrowed(value_sums)


@njit(**EXACT)
def prepare_codes(num_heads, num_rows, query, room):
    """Cut the rotated queries of a task, so many rows per kv head, into digits."""
    for head in range(num_heads):
        split_queries(query, head * num_rows, num_rows, room[0], head * _blocks(num_rows), room[1])


@njit(**EXACT)
def _blocks(num_rows):
    return (num_rows + ROWS - 1) // ROWS


@njit(**EXACT)
def attend_codes(heads, num_rows, group, position, window, base, count, softcap, pages, rows, scratch, span):
    """Do as `tile.attend`.

    Products take long but wait for nothing meanwhile: each is begun some work before its sums are needed.
    """
    _, _, keys, values, key_scales, value_scales = pages
    _, score, scales, (digits, factors, weights, weight_factors, tiles, key_sums, value_sums), _ = scratch
    total, top, mix = span
    size = keys.shape[1]
    # Rows that see anything of it: later tokens see later keys.
    start, end = max(0, base - position) * group, min(num_rows, (TILE - 1 + base - position + window) * group)
    target, begun, i = 0, 0, 0  # the products with values that are to be added: where, how many rows, first of a block
    for head in range(heads):
        gather_scales(scales, key_scales, value_scales, rows, head, count)
        for block in range(start - start % ROWS, end, ROWS):
            begin, stop_row = max(block, start), min(block + ROWS, end)
            number = head * _blocks(num_rows) + block // ROWS
            first = max(0, position + begin // group - base - window + 1)
            stop = min(TILE, position + (stop_row - 1) // group - base + 1)
            for k in range(first - first % LANES, stop, LANES):
                multiply_keys(key_sums, digits, number * size * 16, keys[head:], rows, k)
            if block <= start:
                interleave(tiles, values[head:], rows, (count + 3) // 4)
            add_values(mix, target, size, value_sums, weight_factors, i, begun)
            for k in range(first - first % LANES, stop, LANES):
                put_scores(score, key_sums, factors, number * ROWS, k)
            for row in range(begin, stop_row):
                last, i = position + row // group - base, row - block
                first, stop = max(0, last - window + 1), min(TILE, last + 1)
                weigh(score, i * TILE, first, stop, softcap, scales, top, total, mix, head * num_rows + row)
                weight_factors[i] = split_weights(weights, i, score, i * TILE, first, stop)
            multiply_values(value_sums, weights, tiles, size)
            target, begun, i = (head * num_rows + begin) * size, stop_row - begin, begin - block
    add_values(mix, target, size, value_sums, weight_factors, i, begun)
