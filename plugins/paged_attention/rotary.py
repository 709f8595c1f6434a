"""Rotates heads, and stores a step's keys and values. See `kernels.SOURCES`."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import numpy as np
from numba import njit

from contbatch.plugins.paged_attention.elements import store_row, wide
from contbatch.plugins.paged_attention.gather import INNER
from contbatch.plugins.paged_attention.intrinsics import fma


@njit(**INNER)
def rotate(x, cos, sin, interleaved, factor, out):
    """Fill out with factor · (the head x, see `wide`, rotated by its token's cos and sin).

    Which of two products is rounded before their sum is said here: left to the compiler, code just compiled and code
    from Numba's cache gave different bits.
    """
    half = len(cos)
    if interleaved:
        for i in range(half):
            a, b = wide(x[2 * i]), wide(x[2 * i + 1])
            out[2 * i] = factor * fma(a, cos[i], -(b * sin[i]))
            out[2 * i + 1] = factor * fma(b, cos[i], a * sin[i])
    else:
        low, high, left, right = x[:half], x[half : 2 * half], out[:half], out[half : 2 * half]
        for i in range(half):
            a, b = wide(low[i]), wide(high[i])
            left[i] = factor * fma(a, cos[i], -(b * sin[i]))
            right[i] = factor * fma(b, cos[i], a * sin[i])
    for d in range(2 * half, len(out)):
        out[d] = factor * wide(x[d])


@njit(**INNER)
def write_pages(first, stop, qkv, pages, slots, cos, sin, interleaved, key):
    """Rotate and store keys of tokens first..stop-1, and store their values; token t goes to slot slots[t] of the pool.

    `pages` are as in `kernels._work`, `key` is a float32 head to work in.
    """
    _, kv_num_heads, keys, values, key_scales, value_scales = pages
    head_size = keys.shape[1]
    width = kv_num_heads * head_size
    for t in range(first, stop):
        packed = qkv[t, qkv.shape[1] - 2 * width :]
        for head in range(kv_num_heads):
            row, begin = slots[t] * kv_num_heads + head, head * head_size
            rotate(packed[begin : begin + head_size], cos[t], sin[t], interleaved, np.float32(1), key)
            store_row(keys, key_scales, row, key)
            store_row(values, value_scales, row, packed[width + begin : width + begin + head_size])
