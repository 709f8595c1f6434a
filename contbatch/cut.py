"""Finds where a filter cuts a row of logits; only inside jitted code. See `draw.SOURCES`.

Nothing is sorted. What lies above a cut is measured in registers, without the blocks whose peak lies below; the cut is
found by bisection, soon among a few logits only.

Values are (address of the first block, whole blocks, address of what follows them as a block of its own, address of the
peaks of all blocks, how many peaks); weights are 2**((logit - largest) · scale).
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, call-arg, unreachable, attr-defined, var-annotated"

from math import ceil
from typing import Any

import numpy as np
from numba import njit

from contbatch.draw_blocks import BLOCK, TILE, at_least, float_at, lowest, mass, ones, peak, weight

FEW = 1024
"""So many logits are looked at apart from the others."""
INFINITE, LOWEST, LOG2_E = np.float32(np.inf), np.finfo(np.float32).min, np.log2(np.e)
OPTIONS: dict[str, Any] = {"error_model": "numpy"}
NARROWINGS = 12
"""Probes between logits; later ones halve what is left of the numbers that are float32."""
ALL, SOME = np.uint64(2**64 - 1), np.uint64(0x0001000100010001)
"""Of TILE blocks each, or a sixteenth: enough to guess a cut among many logits."""
GUESSES, MARGIN = 16, 0.02
"""Halvings for a guess, and how far, as a share of what there is, the guesses lie from what is wanted."""


@njit(**OPTIONS)
def key_of(x):
    """Return an integer that is larger where float32 x is; both zeros have the same."""
    bits = np.int64(np.float32(x + np.float32(0)).view(np.int32))
    return bits if bits >= 0 else np.int64(-0x80000000) - bits


@njit(**OPTIONS)
def value_of(key):
    """Return the float32 of a key."""
    return np.int32(key if key >= 0 else np.int64(-0x80000000) - key).view(np.float32)


@njit(**OPTIONS)
def address_of(array):
    """Return where an array begins."""
    return np.int64(array.ctypes.data)


@njit(**OPTIONS)
def block_at(values, block):
    """Return the address of a block."""
    return values[0] + 4 * BLOCK * block if block < values[1] else values[2]


@njit(**OPTIONS)
def room_for(size):
    """Return room for the peaks of so many logits, their last block, `FEW` and a block more, and the peaks of these."""
    blocks = (size + BLOCK - 1) // BLOCK
    peaks, tail = np.empty((blocks + TILE - 1) // TILE * TILE, np.float32), np.empty(BLOCK, np.float32)
    peaks[:], tail[:] = -INFINITE, -INFINITE
    return peaks, tail, np.empty(FEW + BLOCK, np.float32), np.empty(TILE, np.float32)


@njit(**OPTIONS)
def look_at(address, size, room):
    """Return as values the logits at an address, and the largest, or NaN if one is: then there are no peaks."""
    peaks, tail, whole, largest = room[0], room[1], size // BLOCK, -INFINITE
    for i in range(whole * BLOCK, size):
        tail[i - whole * BLOCK] = float_at(address + 4 * i)
    values = address, whole, address_of(tail), address_of(peaks), peaks.size
    for block in range((size + BLOCK - 1) // BLOCK):
        peaks[block] = peak(block_at(values, block))
        if not peaks[block] <= largest:
            largest = peaks[block]
            if largest != largest:
                break
    return values, largest


@njit(**OPTIONS)
def measure(values, cut, largest, scale, by_mass, blocks):
    """Return the weights, or else the number, of logits ≥ `cut`, and the number; a cut is finite.

    Of every TILE blocks those count that have a bit in `blocks`.
    """
    total, count = 0.0, 0
    for group in range(0, values[4], TILE):
        reach = at_least(values[3] + 4 * group, cut) & blocks
        while reach:
            address = block_at(values, group + lowest(reach))
            count += ones(at_least(address, cut)) + ones(at_least(address + 4 * TILE, cut))
            if by_mass:
                total += mass(address, largest, scale, cut)
            reach &= reach - np.uint64(1)
    return (total if by_mass else np.float64(count)), count


@njit(**OPTIONS)
def low_cut(values, top_k):
    """Return a cut that keeps at least top_k logits, by the peaks alone."""
    low, high = key_of(LOWEST), key_of(INFINITE)
    while high - low > 1:
        key, count = low + (high - low) // 2, 0
        for group in range(0, values[4], TILE):
            count += ones(at_least(values[3] + 4 * group, value_of(key)))
        if count >= top_k:
            low = key
        else:
            high = key
    return value_of(low)


@njit(**OPTIONS)
def _gather(values, low, high, few, peaks):
    """Write the logits in low..high, without `high`, into `few`; return them as values, and how many."""
    count = 0
    for group in range(0, values[4], TILE):
        reach = at_least(values[3] + 4 * group, low)
        while reach:
            address = block_at(values, group + lowest(reach))
            for part in range(2):
                start = address + 4 * TILE * part
                between = at_least(start, low) & ~at_least(start, high)
                while between:
                    few[count] = float_at(start + 4 * lowest(between))
                    count += 1
                    between &= between - np.uint64(1)
            reach &= reach - np.uint64(1)
    blocks = (count + BLOCK - 1) // BLOCK
    few[count : blocks * BLOCK] = -INFINITE
    peaks[:] = -INFINITE
    for block in range(blocks):
        peaks[block] = peak(address_of(few) + 4 * BLOCK * block)
    return (address_of(few), blocks, np.int64(0), address_of(peaks), peaks.size), count


@njit(**OPTIONS)
def _probe(low, high, excess, missing, tries):
    """Return a key between two others: where the weights might be cut, if they lie as on a line between."""
    if excess > 0 and tries < NARROWINGS:
        share = min(max(excess / (excess + missing), 0.125), 0.875)
        start, end = np.float64(value_of(low)), np.float64(value_of(high))
        key = key_of(np.float32(start + (end - start) * share))
        if low < key < high:
            return key
    return low + (high - low) // 2


@njit(**OPTIONS)
def _guess(values, low, high, share, largest, scale, by_mass):
    """Return the key above which some blocks have about this share of what they have between two others."""
    beyond, _ = measure(values, value_of(high), largest, scale, by_mass, SOME)
    between, _ = measure(values, value_of(low), largest, scale, by_mass, SOME)
    wanted = beyond + (between - beyond) * share
    for _ in range(GUESSES):
        key = low + (high - low) // 2
        found, _ = measure(values, value_of(key), largest, scale, by_mass, SOME)
        low, high = (key, high) if found >= wanted else (low, key)
    return low


@njit(**OPTIONS)
def search(values, size, low, measured, count, wanted, by_mass, largest, scale, room):
    """Return the cut such that what lies above it measures less than `wanted`, together with it no less.

    Parameters
    ----------
    values, size
        The logits, and how many there are.
    low, measured, count
        A bound of the cut, finite, what the logits ≥ it measure, at least `wanted`, and their number.
    room
        See `room_for`.

    Returns
    -------
    tuple
        The cut, how many of its equals to keep, and how many there are.
    """
    low, high, reached, above = key_of(low), key_of(largest) + 1, 0.0, 0
    apart, apart_count = 0.0, 0
    tries, distance, grows, hints = np.int64(0), 2.0, by_mass, 2
    while high - low > 1:
        if count - above <= FEW and 4 * (count - above) <= size:
            values, size = _gather(values, value_of(low), value_of(high), room[2], room[3])
            apart, apart_count, hints = reached, above, 0
        key = low
        grows = grows and above <= 4 * FEW
        if grows:
            key = key_of(np.float32(largest - distance / scale))
            distance *= 2
            grows = key > low
        if not grows and hints > 0 and count - above > 4 * FEW:
            share = (wanted - reached) / (measured - reached) + (MARGIN if hints == 1 else -MARGIN)
            key = _guess(values, low, high, share, largest, scale, by_mass)
            hints -= 1
        if not low < key < high:
            key = _probe(low, high, measured - wanted if by_mass else 0.0, wanted - reached, tries)
            tries += 1
        found, number = measure(values, value_of(key), largest, scale, by_mass, ALL)
        found, number = found + apart, number + apart_count
        if found >= wanted:
            low, measured, count, grows = key, found, number, False
        else:
            high, reached, above = key, found, number
    cut, needed = value_of(low), wanted - reached
    if by_mass:
        needed /= weight(cut, largest, scale)
    return cut, min(max(ceil(min(needed, np.float64(count))), 1), count - above), count - above
