"""One row's draw in machine code: filters, then the inverse of the cumulative distribution. Loads Numba.

Nothing is sorted: where a filter cuts is found digit by digit of the logits' bits, as in a radix sort.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import numpy as np
from numba import njit

BLOCK = 128
"""Weights whose sum and largest are kept."""
DIGITS = ((21, 11), (10, 11), (0, 10))
"""Where each digit of a number's 32 bits begins, and its width."""
ZERO, ONE = np.float32(0), np.float32(1)
SMALLEST = np.float32(-87)
"""Its exponential is the least that is computed; below it weights are 0."""
IN_ANY_ORDER = {"reassoc", "nnan", "nsz"}
"""The compiler may split a sum among the lanes of a vector: an order that hangs on the CPU, not on the numbers."""


@njit(cache=True, nogil=True, error_model="numpy")
def draw(logits, largest, temperature, top_p, min_p, u):
    """Return the place on which u in [0, 1) falls, of those that the filters keep.

    Parameters
    ----------
    logits : ndarray of float32, (num_tokens,)
        Contiguous.
    largest : float32
        The maximum, finite.
    temperature : float32
        > 0.
    top_p, min_p, u : float
        The filters are off at 1 and 0.
    """
    size = logits.size
    blocks = (size + BLOCK - 1) // BLOCK
    weights, sums, maxima = np.empty(size, np.float32), np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    bits, highest = weights.view(np.uint32), maxima.view(np.uint32)
    _weigh(logits, largest, ONE / temperature, weights)
    for block in range(blocks):
        start, stop = block * BLOCK, min(size, block * BLOCK + BLOCK)
        sums[block], highest[block] = _sum_from(ZERO, weights[start:stop]), _highest(bits[start:stop])
    if top_p == 1 and min_p == 0:
        block, rest = _fall(sums, u)
        return block * BLOCK + _fall(weights[block * BLOCK : block * BLOCK + BLOCK], rest)[0]
    floor = np.float32(min_p)
    if floor < min_p:
        floor = np.nextafter(floor, np.float32(2))
    elif min_p == 0:
        floor = _floor(weights, maxima, top_p * _total(sums))
    places = np.empty(size, np.int64)
    count = _above(floor, weights, maxima, places)
    if top_p < 1:
        total = _total(weights[places[:count]]) if min_p > 0 else _total(sums)
        count = _nucleus(logits, weights, places, count, top_p * total)
    return places[_fall(weights[places[:count]], u)[0]]


@njit(error_model="numpy")
def _exp(x):
    """e**x for float32 x ≤ 0, 0 below `SMALLEST`; after expf of Cephes (Moshier)."""
    near = x if x > SMALLEST else SMALLEST
    # Adding 1.5·2²³ rounds to an integer, which then sits in the low bits.
    shifted = np.float32(near * np.float32(1.44269504) + np.float32(12582912))
    n = shifted - np.float32(12582912)
    f = (near - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * f * f + f + ONE
    power = np.uint32((shifted.view(np.uint32) + np.uint32(127)) << np.uint32(23)).view(np.float32)
    return p * power if x >= SMALLEST else ZERO


@njit(error_model="numpy")
def _weigh(row, largest, scale, weights):
    for i in range(row.size):
        weights[i] = _exp((row[i] - largest) * scale)


@njit(error_model="numpy", fastmath=IN_ANY_ORDER)
def _sum_from(floor, weights):
    """Return the sum of the weights that are at least `floor`."""
    total = ZERO
    for i in range(weights.size):
        total += weights[i] if weights[i] >= floor else ZERO
    return total


@njit(error_model="numpy")
def _highest(bits):
    """Return the largest of some floats ≥ 0 by their bits: integers have a maximum of vectors."""
    top = np.uint32(0)
    for i in range(bits.size):
        top = max(top, bits[i])
    return top


@njit(error_model="numpy")
def _total(values):
    total = 0.0
    for value in values:
        total += value
    return total


@njit(error_model="numpy")
def _floor(weights, maxima, wanted):
    """Return a power of two such that the weights at least as large sum to `wanted`; 0 if there is none."""
    low, high = -127, 1
    while high - low > 1:
        middle, found = (low + high) // 2, 0.0
        floor = np.float32(2.0**middle)
        for block in range(maxima.size):
            if maxima[block] >= floor:
                found += _sum_from(floor, weights[block * BLOCK : block * BLOCK + BLOCK])
        # The margin is more than the order of a block's sum may change.
        low, high = (middle, high) if found > wanted * 1.00001 else (low, middle)
    return np.float32(2.0**low) if low > -127 else ZERO


@njit(error_model="numpy")
def _above(floor, weights, maxima, places):
    """Write where weights of at least `floor` stand, ascending; return how many."""
    count = 0
    for block in range(maxima.size):
        if maxima[block] >= floor:
            for i in range(block * BLOCK, min(weights.size, block * BLOCK + BLOCK)):
                places[count] = i
                count += weights[i] >= floor
    return count


@njit(error_model="numpy")
def _key(x):
    """Return an unsigned integer that is larger where float32 x is; both zeros have the same."""
    bits = np.float32(x + ZERO).view(np.uint32)
    return bits ^ (np.uint32(0xFFFFFFFF) if bits >> np.uint32(31) else np.uint32(0x80000000))


@njit(error_model="numpy")
def _nucleus(logits, weights, places, count, wanted):
    """Keep of places[:count] the fewest best-ranked whose weights reach `wanted`; return how many.

    They rank by logit, then by place.
    """
    counts, sums = np.empty(2048, np.int64), np.empty(2048, np.float64)
    reached, prefix, left = 0.0, np.uint64(0), count
    for first, width in DIGITS:
        counts[:], sums[:] = 0, 0.0
        for i in places[:count]:
            key = np.uint64(_key(logits[i]))
            if key >> np.uint64(first + width) == prefix:
                digit = (key >> np.uint64(first)) & np.uint64((1 << width) - 1)
                counts[digit] += 1
                sums[digit] += weights[i]
        cut = (1 << width) - 1
        while left > counts[cut] and reached + sums[cut] < wanted:
            left -= counts[cut]
            reached += sums[cut]
            cut -= 1
        left = counts[cut]
        prefix = (prefix << np.uint64(width)) + np.uint64(cut)
    found = 0
    for i in places[:count]:
        key = np.uint64(_key(logits[i]))
        last = key == prefix and reached < wanted
        if last:
            reached += weights[i]
        if last or key > prefix:
            places[found] = i
            found += 1
    return found


@njit(error_model="numpy")
def _fall(weights, u):
    """Return the index on which u falls, never one of weight 0, and how far into it u lies, in [0, 1)."""
    # Rounded or not, u times the total stays below the total: u is at most 1 - 2**-53.
    target, reached, i = u * _total(weights), 0.0, 0
    while reached + weights[i] <= target:
        reached += weights[i]
        i += 1
    after = reached + weights[i]
    return i, (target - reached) / (after - reached)
