"""bfloat16 inside Numba kernels, as uint16 holding the upper half of a float32.

`load` and `store` choose by the type of the page element, so one kernel source serves float32 and bfloat16 pages.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# ruff: noqa: ARG001, ARG005 - an overload repeats the whole signature, whatever it uses

import numpy as np
from numba import types
from numba.extending import overload


def load(element):
    """Page element (float32, or uint16 holding bfloat16) → float32; only inside jitted code."""
    raise NotImplementedError(f"load({element!r}) outside jitted code")


def store(value, like):
    """float32 → page element of the type of `like`, rounded to nearest even, NaN kept; only inside jitted code."""
    raise NotImplementedError(f"store({value!r}, {like!r}) outside jitted code")


@overload(load)
def _load(element):
    if element == types.uint16:
        return lambda element: np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)
    # Adding 0 keeps LLVM from calling memcpy for every row of a few hundred bytes.
    return lambda element: element + np.float32(0)


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
