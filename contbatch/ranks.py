"""How likely a token is among a row of logits, and which are the likeliest, in machine code. Loads Numba."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, call-arg, unreachable, attr-defined, var-annotated"

from math import log

import numpy as np
from numba import njit

from contbatch.cut import (
    ALL,
    FEW,
    INFINITE,
    LOG2_E,
    LOWEST,
    OPTIONS,
    block_at,
    key_of,
    look_at,
    low_cut,
    measure,
    room_for,
    search,
    value_of,
)
from contbatch.draw_blocks import BLOCK, LEAST_EXPONENT, TILE, at_least, float_at, lowest, ones

SOURCES = "1882ab79a249b824"
"""Digest of the modules that are compiled into this one, as `kernels.SOURCES`."""
MOST = FEW
"""More of the likeliest are found by sorting."""


@njit(cache=True, nogil=True, **OPTIONS)
def likelihoods(address, size, token, count):
    """Return how likely a token is, and the ids of the likeliest.

    Parameters
    ----------
    address, size : int
        Where the float32 logits begin, and how many there are.
    token, count : int
        A count is in 0..`MOST`.

    Returns
    -------
    tuple
        Logarithm of the sum of exponentials, NaN if the largest logit is not finite; rank of the token; ids of the
        `count` best finite logits, ascending: of equal ones the first are taken, and there may be fewer.
    """
    room, ids, scale = room_for(size), np.empty(count, np.int64), np.float32(LOG2_E)
    values, largest = look_at(address, size, room)
    if not abs(largest) < INFINITE:
        return np.nan, 0, ids[:0]
    mass, _ = measure(values, max(np.float32(largest + LEAST_EXPONENT / scale), LOWEST), largest, scale, True, ALL)
    return (
        largest + log(mass),
        _rank(values, float_at(address + 4 * token), token),
        ids[: _best(values, size, largest, room, ids)],
    )


@njit(**OPTIONS)
def _rank(values, logit, token):
    above, before = value_of(key_of(logit) + 1), 0
    for start in range(0, token, TILE):
        address = block_at(values, start // BLOCK) + 4 * (start % BLOCK)
        equals = at_least(address, logit) & ~at_least(address, above)
        if token - start < TILE:
            equals &= (np.uint64(1) << np.uint64(token - start)) - np.uint64(1)
        before += ones(equals)
    return 1 + before + measure(values, above, logit, np.float32(1), False, ALL)[1]


@njit(**OPTIONS)
def _best(values, size, largest, room, ids):
    """Write the ids of the best; return how many there are."""
    if not ids.size:
        return 0
    cut, equals, scale = low_cut(values, np.float64(ids.size)), size, np.float32(1)
    measured, count = measure(values, cut, largest, scale, False, ALL)
    if measured > ids.size:
        cut, equals, _ = search(values, size, cut, measured, count, np.float64(ids.size), False, largest, scale, room)
    above, found = value_of(key_of(cut) + 1), 0
    for group in range(0, values[4], TILE):
        reach = at_least(values[3] + 4 * group, cut)
        while reach:
            block = group + lowest(reach)
            for part in range(2):
                address = block_at(values, block) + 4 * TILE * part
                better, best = at_least(address, above), at_least(address, cut)
                while best:
                    place = lowest(best)
                    is_better = (better >> np.uint64(place)) & np.uint64(1)
                    if is_better or equals:
                        ids[found] = block * BLOCK + part * TILE + place
                        found += 1
                        equals -= 0 if is_better else 1
                    best &= best - np.uint64(1)
            reach &= reach - np.uint64(1)
    return found
