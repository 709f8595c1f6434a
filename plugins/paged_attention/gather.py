"""Brings tiles of `TILE` keys and values from their pages. See `kernels.SOURCES`."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Any

from numba import njit

from contbatch.plugins.paged_attention.elements import load, scaled
from contbatch.plugins.paged_attention.intrinsics import LANES, TILE, prefetch, transpose

# Fused multiply-add is welcome; reassociation is not, it would make results depend on how a loop was vectorised.
EXACT: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy"}
INNER = EXACT | {"_nrt": False, "forceinline": True}
"""Of functions that make no arrays: without counts of references, whose upkeep took a third of the kernel's time, and
in one piece with who calls them, since an array is passed as up to nine arguments."""


@njit(**INNER)
def locate(rows, base, first, end, pages, page_size, kv_num_heads, kv_head):
    """rows[j] = row, in the pool seen as (slots · heads) rows, of position base + j clipped to first..end-1."""
    position = first
    while position < end:
        page = position // page_size
        stop = min(end, (page + 1) * page_size)
        offset = (pages[page] - page) * page_size
        for p in range(position, stop):
            rows[p - base] = (offset + p) * kv_num_heads + kv_head
        position = stop
    rows[: first - base] = rows[first - base]
    rows[end - base :] = rows[end - base - 1]


@njit(**INNER)
def locate_first(rows, task, block_table, page_size, kv_num_heads):
    """Do as `locate` for the first tile of a task and its first head; return how many rows it needs."""
    first, end = task[6], task[7]
    start = first - first % TILE
    locate(rows, start, first, min(start + TILE, end), block_table[task[0]], page_size, kv_num_heads, task[1])
    return min(TILE, end - start)


@njit(**INNER)
def gather_keys(keys, cache, rows, count):
    """keys[d, j] = cache[rows[j], d], as it is stored, for j < count, and some more."""
    head_size, step = cache.shape[1], 16 // cache.itemsize
    for j in range(0, count, LANES):
        for d in range(0, head_size - step + 1, step):
            transpose(keys, j, cache, d, rows)
        for d in range(head_size - head_size % step, head_size):
            for i in range(j, j + LANES):
                keys[d, i] = load(cache[rows[i], d])


@njit(**INNER)
def gather_values(values, cache, rows, count):
    """values[c, j] = cache[rows[j], c * TILE : (c + 1) * TILE], as it is stored, for j < count."""
    head_size = cache.shape[1]
    whole = head_size // TILE
    for j in range(count):
        row = rows[j]
        for c in range(whole):
            for d in range(TILE):
                values[c, j, d] = load(cache[row, c * TILE + d])
        for d in range(head_size - whole * TILE):
            values[whole, j, d] = load(cache[row, whole * TILE + d])


@njit(**INNER)
def gather_scales(scales, key_scales, value_scales, rows, head, count):
    """scales[j], scales[TILE + j] = the scale of the key, and of the value, in row rows[j] + head, for j < count."""
    for j in range(count):
        scales[j], scales[TILE + j] = key_scales[rows[j] + head], value_scales[rows[j] + head]


@njit(**INNER)
def announce(pages, ahead, first, num_rows):
    """Fetch keys and values of the next tile from memory, of so many of its rows, while the present one is worked on.

    A core can only wait for some lines at a time; who asks for more has to wait as well.
    """
    _, _, keys, values, key_scales, value_scales = pages
    rows, count, num_heads = ahead
    size = keys.shape[1]
    step = 128 if scaled(keys) else 64 // keys.itemsize  # of two lines of codes the other one comes along
    for j in range(first, min(first + num_rows, count)):
        row = rows[j]
        for i in range(row * size, (row + num_heads) * size, step):
            prefetch(keys, i)
            prefetch(values, i)
        if scaled(keys) and (j == 0 or row // 16 != rows[j - 1] // 16):
            prefetch(key_scales, row)
            prefetch(value_scales, row)
