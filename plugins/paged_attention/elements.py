"""Elements of pages inside Numba kernels: float32, uint16 holding the upper half of a float32 (bfloat16), or int8.

`load` and `store` choose by the type of the page element, so one kernel source serves all pages. An int8 row has a
scale, see int8.py, whose arithmetic `store_row` follows bit for bit.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# ruff: noqa: ARG001, ARG005 - an overload repeats the whole signature, whatever it uses

import numpy as np
from numba import njit, types
from numba.extending import overload

from contbatch.plugins.paged_attention.int8 import LARGEST, SMALLEST

ABSOLUTE, INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
ROUNDS = np.float32(12582912)
"""1.5·2²³: a smaller float32 that meets it is rounded to an integer, half to even, which then sits in the low bits."""

LEAST_CODE = np.float32(-128)


def load(element):
    """Page element → float32, without its scale; only inside jitted code."""
    raise NotImplementedError(f"load({element!r}) outside jitted code")


def wide(element):
    """Element of `qkv`, float32 or a uint16 holding bfloat16 → float32, the same number; only inside jitted code."""
    raise NotImplementedError(f"wide({element!r}) outside jitted code")


def store(value, like):
    """float32 → page element of the type of `like`, rounded to nearest even, NaN kept; only inside jitted code."""
    raise NotImplementedError(f"store({value!r}, {like!r}) outside jitted code")


def scaled(cache):
    """Whether elements have scales, known when a kernel is compiled; only inside jitted code."""
    raise NotImplementedError(f"scaled({cache!r}) outside jitted code")


@overload(scaled)
def _scaled(cache):
    return (lambda cache: True) if cache.dtype == types.int8 else (lambda cache: False)


@overload(wide)
def _wide(element):
    return (lambda element: load(element)) if element == types.uint16 else (lambda element: element)


@overload(load)
def _load(element):
    if element == types.uint16:
        return lambda element: np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)
    # Adding 0 keeps LLVM from calling memcpy for every row of a few hundred bytes.
    return lambda element: np.float32(element) + np.float32(0)


@overload(store)
def _store(value, like):
    if like != types.uint16:
        return lambda value, like: value

    def narrow(value, like):
        bits = np.float32(value).view(np.uint32)
        upper = bits >> np.uint32(16)
        # Half a unit may carry into the upper half; a NaN's payload could overflow so, it is only made quiet.
        rounded = np.uint32(bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
        return np.uint16(rounded if value == value else upper | np.uint32(0x40))

    return narrow


@njit(error_model="numpy")
def store_row(cache, scales, row, x):
    """cache[row] = x, see `wide`, and scales[row] if its elements need one."""
    target = cache[row]
    if not scaled(cache):
        for d in range(len(target)):
            target[d] = store(wide(x[d]), target[d])
        return
    highest = np.uint32(0)  # bits of absolute values sort as their numbers do, infinity and NaN last
    for d in range(len(target)):
        highest = max(highest, np.uint32(np.float32(wide(x[d])).view(np.uint32) & ABSOLUTE))
    scale = np.uint32(highest).view(np.float32) / LARGEST
    if highest >= INFINITE:
        scale = np.float32(np.nan)
    elif scale < SMALLEST:
        scale = np.float32(0)
    scales[row] = scale
    divisor = scale if scale > np.float32(0) else np.float32(np.inf)
    for d in range(len(target)):
        rounded = np.float32(wide(x[d]) / divisor + ROUNDS).view(np.uint32)
        target[d] = np.int8(rounded & np.uint32(0xFF)) if scale > np.float32(0) else np.int8(0)


@njit(error_model="numpy")
def write_row(output, token, column, head_size, mix, divisor):
    """Write mix / divisor, rounded as the output's elements are, to head_size of them from `column` of a row on.

    The output is its bytes, (num_rows, bytes of a row), the size of an element, and the distance between two codes: 4
    bytes are a float32, 2 a bfloat16, 1 is an int8 code, to nearest, half to even, of a NaN 0.
    """
    rows, size, step = output
    row = rows[token, column * size : (column + head_size) * size]
    if size == 4:
        floats = row.view(np.float32)
        for d in range(head_size):
            floats[d] = mix[d] / divisor
    elif size == 2:
        halves = row.view(np.uint16)
        for d in range(head_size):
            halves[d] = store(mix[d] / divisor, halves[d])
    else:
        for d in range(head_size):
            x = mix[d] / divisor / step
            x = LEAST_CODE if x < LEAST_CODE else LARGEST if x > LARGEST else x
            row[d] = np.int8(np.float32(x + ROUNDS).view(np.uint32) & np.uint32(0xFF))
