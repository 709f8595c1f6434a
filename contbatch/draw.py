"""The draws of a step in machine code: filters, then the inverse of the cumulative distribution. Loads Numba.

Filters keep what lies above a logit, the cut, and the first of its equals: see `cut`.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, call-arg, unreachable, attr-defined, var-annotated"

from math import log

import numpy as np
from numba import njit

from contbatch.cut import (
    ALL,
    INFINITE,
    LOG2_E,
    LOWEST,
    OPTIONS,
    address_of,
    block_at,
    key_of,
    look_at,
    low_cut,
    measure,
    room_for,
    search,
    value_of,
)
from contbatch.draw_blocks import (
    BLOCK,
    LEAST_EXPONENT,
    TILE,
    at_least,
    float_at,
    give_way,
    high_product,
    lowest,
    mass,
    ones,
    weigh,
    weight,
)
from contbatch.plugins.paged_attention.intrinsics import atomic_add

SOURCES = "1882ab79a249b824"
"""Digest of the modules that are compiled into this one, as `kernels.SOURCES`."""
TINY = float(np.finfo(np.float32).tiny)
CLAIMED, FINISHED = 0, 1


@njit(cache=True, nogil=True, **OPTIONS)
def draw(progress, addresses, size, asked, tokens, leads):
    """Fill `tokens`, together with other threads that have the same arguments; who `leads` waits for them.

    Parameters
    ----------
    progress : ndarray of int64, (2,)
        Zeros: rows claimed, rows finished.
    addresses : ndarray of int64, (num_rows,)
        Where each row of `size` float32 logits begins.
    size : int
    asked : ndarray of float64, (num_rows, 5)
        Temperature (0: take the first of the largest), top_k (0: off), top_p (1: off), min_p (0: off), u in [0, 1).
    tokens : ndarray of int64, (num_rows,)
        The place on which u falls, of those that the filters keep; -1 if the largest logit is not finite.
    """
    if atomic_add(progress, CLAIMED, 0) < len(tokens):
        _draw_rows(progress, addresses, size, asked, tokens)
    while leads and atomic_add(progress, FINISHED, 0) < len(tokens):
        give_way()


@njit(**OPTIONS)
def _draw_rows(progress, addresses, size, asked, tokens):
    # Before a row is claimed: there may be no memory, and who leads would wait for it.
    room, blocks = room_for(size), (size + BLOCK - 1) // BLOCK
    scratch = np.empty(BLOCK, np.float32), np.empty(blocks, np.float32), np.empty(blocks, np.int64)
    row = atomic_add(progress, CLAIMED, 1)
    while row < len(tokens):  # who comes late may find nothing left, of the rows neither
        values, largest = look_at(addresses[row], size, room)
        if not abs(largest) < INFINITE:
            tokens[row] = -1
        elif asked[row, 0] > 0:
            tokens[row] = _draw(values, size, largest, asked[row], room, scratch)
        else:
            tokens[row] = _last(values, largest, np.int64(1))
        atomic_add(progress, FINISHED, 1)
        row = atomic_add(progress, CLAIMED, 1)


@njit(**OPTIONS)
def _draw(values, size, largest, asked, room, scratch):
    """Return the place on which u falls."""
    temperature, top_k, top_p, min_p, u = asked[0], asked[1], asked[2], asked[3], asked[4]
    temperature = min(max(temperature, TINY), 1 / TINY)
    scale = np.float32(LOG2_E / temperature)
    # Nor is anything kept that lies so far below that the difference is no float32.
    bound = max(np.float64(LOWEST), largest + max(LEAST_EXPONENT / scale, np.float64(LOWEST)))
    if min_p > 0:
        bound = max(bound, largest + temperature * log(min_p))
    cut, kept, equals = np.float32(bound), np.int64(0), np.int64(0)
    if cut < bound:
        cut = value_of(key_of(cut) + 1)
    for by_mass in (False, True):  # a constant would have all of it compiled twice
        if top_p == 1 if by_mass else not 0 < top_k < size:
            continue
        low = cut if by_mass else max(cut, low_cut(values, top_k))
        measured, count = measure(values, low, largest, scale, by_mass, ALL)
        if kept < equals:
            measured, _ = measure(values, value_of(key_of(cut) + 1), largest, scale, by_mass, ALL)
            measured += kept * weight(cut, largest, scale)
        wanted = top_p * measured if by_mass else top_k
        if measured >= wanted:
            most = kept if kept < equals else count
            found, kept, equals = search(values, size, low, measured, count, wanted, by_mass, largest, scale, room)
            kept = min(kept, most) if found == cut else kept
            cut = found
    return _fall(values, cut, _last(values, cut, kept) if kept < equals else size, largest, scale, u, scratch)


@njit(**OPTIONS)
def _last(values, cut, kept):
    """Return the place of the last of so many logits that equal the cut."""
    above = value_of(key_of(cut) + 1)
    for group in range(0, values[4], TILE):
        reach = at_least(values[3] + 4 * group, cut)
        while reach:
            block = group + lowest(reach)
            for part in range(2):
                start = block_at(values, block) + 4 * TILE * part
                same = at_least(start, cut) & ~at_least(start, above)
                count = ones(same)
                if count >= kept:
                    for _ in range(kept - 1):
                        same &= same - np.uint64(1)
                    return block * BLOCK + TILE * part + lowest(same)
                kept -= count
            reach &= reach - np.uint64(1)
    return -1


@njit(**OPTIONS)
def _fall(values, cut, last, largest, scale, u, scratch):
    """Return the place on which u falls, of the logits above the cut and its equals up to the place `last`."""
    weights, sums, blocks = scratch
    above, count, total = value_of(key_of(cut) + 1), 0, 0.0
    for group in range(0, values[4], TILE):
        reach = at_least(values[3] + 4 * group, cut)
        while reach:
            block = group + lowest(reach)
            if block * BLOCK <= last < block * BLOCK + BLOCK:
                _weigh(values, block, cut, last, largest, scale, weights)
                sums[count] = _total(weights)
            else:
                sums[count] = mass(block_at(values, block), largest, scale, above if last < block * BLOCK else cut)
            blocks[count] = block
            total += sums[count]
            count += 1
            reach &= reach - np.uint64(1)
    # Rounded or not, u times a total stays below the total: u is at most 1 - 2**-53.
    i, rest = _index(sums, u * total)
    _weigh(values, blocks[i], cut, last, largest, scale, weights)
    return blocks[i] * BLOCK + _index(weights, rest * _total(weights))[0]


@njit(**OPTIONS)
def _weigh(values, block, cut, last, largest, scale, weights):
    """Write the weights of a block, 0 for what is not kept."""
    start = block_at(values, block)
    weigh(start, largest, scale, address_of(weights))
    for i in range(BLOCK):
        logit = float_at(start + 4 * i)
        if logit < cut or (logit == cut and block * BLOCK + i > last):
            weights[i] = 0


@njit(**OPTIONS)
def _total(weights):
    total = 0.0
    for value in weights:
        total += value
    return total


@njit(**OPTIONS)
def _index(weights, target):
    """Return the index at which the sum exceeds `target`, which is below it all, and how far into it that is, < 1."""
    reached, i = 0.0, 0
    while reached + weights[i] <= target:
        reached += weights[i]
        i += 1
    after = reached + weights[i]
    return i, (target - reached) / (after - reached)


@njit(cache=True, **OPTIONS)
def philox(keys, counters):
    """Return the first 64 bits that Philox 4×64-10 draws, NumPy's way: (n, 2) keys, (n,) counters, all uint64."""
    drawn = np.empty(len(counters), np.uint64)
    m0, m1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
    for i in range(len(counters)):
        a, c, d = counters[i] + np.uint64(1), np.uint64(0), np.uint64(0)
        b = np.uint64(a == np.uint64(0))
        key, other = keys[i, 0], keys[i, 1]
        for _ in range(10):
            a, b, c, d = high_product(m1, c) ^ b ^ key, m1 * c, high_product(m0, a) ^ d ^ other, m0 * a
            key += np.uint64(0x9E3779B97F4A7C15)
            other += np.uint64(0xBB67AE8584CAA73B)
        drawn[i] = a
    return drawn
