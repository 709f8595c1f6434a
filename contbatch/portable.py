"""Random numbers with the same bits on every platform and in every version of numpy.

Only two things are used whose bits are promised: raw integers of a PCG64 generator (numpy keeps these streams, NEP 19,
but not what `Generator` makes of them), and IEEE 754 addition, multiplication, division and square root, which round
alike everywhere. `log` and `exp` are built from these: those of a C library differ in the last bit between systems,
and one bit can turn one request length into another.

All draws are functions of a key, such as (seed, "arrivals"): there is no state, and the first k of n draws are the same
for every n ≥ k.
"""

import math
from operator import index

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Key = tuple[int | str, ...]

_LN2_HIGH = float.fromhex("0x1.62e42fefa3800p-1")
"""ln 2 without its last 11 bits, so that multiplying it with an exponent is exact."""
_LN2_LOW = float.fromhex("0x1.ef35793c76730p-45")
"""ln 2 - _LN2_HIGH."""


def log(x: Floats) -> Floats:
    """Natural logarithm of finite numbers > 0, good to about 2 units in the last place."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = np.where(low, 2 * mantissa, mantissa)
    exponent = (exponent - low).astype(np.float64)
    s = (mantissa - 1) / (mantissa + 1)  # |s| < 0.172, and log(mantissa) = 2 artanh(s)
    z = s * s
    series = np.zeros_like(z)
    for k in range(12, 0, -1):
        series = (series + 1 / (2 * k + 1)) * z
    result: Floats = exponent * _LN2_HIGH + (exponent * _LN2_LOW + (2 * s + 2 * s * series))
    return result


def exp(x: Floats) -> Floats:
    """Exponential of numbers in [-700, 700] (beyond, that of the bound), good to about 2 units in the last place."""
    x = np.clip(x, -700.0, 700.0)
    k = np.floor(x / (_LN2_HIGH + _LN2_LOW) + 0.5)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW  # |r| ≤ 0.347
    series = np.ones_like(r)
    for n in range(14, 0, -1):
        series = 1 + series * r / n
    return np.ldexp(series, k.astype(np.int64))


def integers(n: int, *key: int | str) -> NDArray[np.uint64]:
    """Draw n random integers of 64 bits."""
    entropy = [int.from_bytes(part.encode(), "little") if isinstance(part, str) else index(part) for part in key]
    raw: NDArray[np.uint64] = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(n)
    return raw


def uniforms(n: int, *key: int | str) -> Floats:
    """Draw n numbers in (0, 1): odd multiples of 2⁻⁵³, so that 0 and 1 are never among them."""
    return ((integers(n, *key) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def exponentials(n: int, *key: int | str) -> Floats:
    """Draw n exponential numbers of mean 1."""
    return -log(uniforms(n, *key))


def normals(n: int, *key: int | str) -> Floats:
    """Draw n standard normal numbers (Marsaglia's polar method, 1964)."""
    pairs = n + n // 2 + 16  # 1.27 n are needed on average
    while True:
        u, v = (2 * uniforms(2 * pairs, *key) - 1).reshape(pairs, 2).T
        s = u * u + v * v
        inside = s < 1
        u, s = u[inside], s[inside]
        if len(u) >= n:
            return (u * np.sqrt(-2 * log(s) / s))[:n]
        pairs *= 2


def gammas(n: int, shape: float, *key: int | str) -> Floats:
    """Draw n gamma numbers of this shape and scale 1 (Marsaglia and Tsang 2000)."""
    boosted = shape < 1
    d = (shape + 1 if boosted else shape) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    tries = n + n // 8 + 16  # more than 95 % are taken
    while True:
        z = normals(tries, *key, "normal")
        v = 1 + c * z
        positive = v > 0
        v = np.where(positive, v * v * v, 1.0)
        bound = 0.5 * z * z + d - d * v + d * log(v)
        taken = d * v[positive & (log(uniforms(tries, *key, "uniform")) < bound)]
        if len(taken) >= n:
            break
        tries *= 2
    taken = taken[:n]
    return taken * exp(log(uniforms(n, *key, "boost")) / shape) if boosted else taken
