"""Keys and values in 8 bits: symmetric, one scale for each token and head; the executable spec of int8 pages.

Scales for each token are what KIVI (Liu et al. 2024) uses for values; keys are treated alike here, so that a page is
complete as soon as its tokens are, and never has to be rounded again.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

LARGEST = np.float32(127)
SMALLEST = np.float32(2.0**-126)
"""The smallest scale: below it float32 loses bits, or all of them where a runtime has switched them off."""


def quantize(x: ArrayLike) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round vectors to int8, to nearest, half to even.

    Parameters
    ----------
    x : array, (..., head_size)
        Taken as float32.

    Returns
    -------
    codes : int8 array, (..., head_size)
        Within ±127.
    scales : float32 array, (...)
        max |x| / 127: codes · scale is within scale / 2 of x, but for the rounding of float32. 0 where all of x is
        below 127 · 2⁻¹²⁶, NaN where any of it is infinite or NaN.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore"):
        scales = np.abs(x).max(axis=-1) / LARGEST
        scales = np.where(np.isfinite(scales), np.where(scales < SMALLEST, np.float32(0), scales), np.float32(np.nan))
        codes = np.rint(x / np.where(scales > 0, scales, np.float32(np.inf))[..., None])
    return np.where(scales[..., None] > 0, codes, 0).astype(np.int8), scales


def dequantize(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return codes · scale as float32: codes (..., head_size), scales (...)."""
    x: NDArray[np.float32] = codes * scales[..., None]
    return x
