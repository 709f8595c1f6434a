"""Logits to token ids. Row by row: nothing drawn for a request depends on who shares its batch.

Filters act in vLLM's order (`vllm.v1.sample.sampler.Sampler`): temperature, min-p, top-k, top-p, each on what the
one before left, renormalised. Hugging Face Transformers puts min-p last, which differs only if top-p is on too.
Both keep every token that ties with the k-th; here equal logits rank by id, lowest first, so that top-k keeps k.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from contbatch.errors import InvalidRequestError, LogitsError
from contbatch.sampling_params import SamplingParams

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_SHARE = 2**18
"""Logits for which another thread is called: fewer are drawn from before it wakes up."""


def sample(
    logits: Floats,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    adjusted: Mapping[int, Floats] = MappingProxyType({}),
) -> tuple[Ids, dict[int, Exception]]:
    """Choose one token per row.

    Temperature 0 takes the largest logit, of equals the lowest id. Else the kept tokens divide [0, 1) by probability,
    in order of id, and a uniform number falls on one: unlike in order of probability, that seldom changes with logits.

    Parameters
    ----------
    logits : ndarray of float32, (num_rows, vocab_size)
        Left as it is. A token with logit -inf is never chosen.
    params, seeds, positions : sequences of num_rows
        How to choose; the request's seed; index of the token among its outputs. Seed and position alone decide the
        uniform number (see `uniforms`); greedy rows ignore them.
    adjusted : mapping of int to ndarray of float32, (vocab_size,)
        To be taken in place of rows (see `logits.adjust`).

    Returns
    -------
    token_ids : ndarray of int64, (num_rows,)
        -1 in failed rows.
    errors : dict of int to LogitsError
        Rows from which nothing can be chosen: their logits hold NaN or +inf, or are all -inf.

    Raises
    ------
    LogitsError
        Wrong type or shape.
    InvalidRequestError
        The seed of a sampled row is not an integer in [0, 2**128), or its position in [0, 2**64).
    """
    _check(logits, params, seeds, positions)
    sampled = [row for row, p in enumerate(params) if p.temperature > 0]
    if sampled:
        asked, vocab_size = np.empty((len(params), 5)), logits.shape[1]
        asked[:, 0], asked[:, 2] = [p.temperature for p in params], [p.top_p for p in params]
        asked[:, 1] = [p.top_k if p.top_k < vocab_size else 0 for p in params]
        asked[:, 3] = [p.min_p for p in params]
        asked[sampled, 4] = uniforms([seeds[row] for row in sampled], [positions[row] for row in sampled])
        token_ids = _drawn(logits, adjusted, asked)
        unsure = np.flatnonzero(token_ids < 0).tolist()
    else:
        token_ids, unsure = np.empty(len(logits), np.int64), list(range(len(logits)))
    errors = dict[int, Exception]()
    for row in unsure:
        values = adjusted.get(row, logits[row])
        token = token_ids[row] = values.argmax()  # of several the first, or the first NaN
        if not isfinite(largest := float(values[token])):
            errors[row] = LogitsError(f"row {row}: the largest logit must be finite, got {largest} at token {token}")
            token_ids[row] = -1
    return token_ids, errors


def _drawn(logits: Floats, adjusted: Mapping[int, Floats], asked: npt.NDArray[np.float64]) -> Ids:
    """Return the tokens that rows draw, see `draw.draw`, with the help of other threads."""
    from contbatch.draw import draw  # loads Numba
    from contbatch.plugins.paged_attention.helpers import CPUS, call_helper

    if logits.strides[1] != logits.itemsize:
        logits = np.ascontiguousarray(logits)
    rows = {row: np.ascontiguousarray(values) for row, values in adjusted.items()}
    addresses = address_of(logits) + logits.strides[0] * np.arange(len(logits))
    for row, values in rows.items():
        addresses[row] = address_of(values)
    token_ids, progress = np.empty(len(logits), np.int64), np.zeros(2, np.int64)
    work = progress, addresses, logits.shape[1], asked, token_ids

    def help_draw(*_owners: object) -> None:
        draw(*work, False)

    for _ in range(min(len(CPUS) - 1, logits.size // _SHARE)):
        # Named for helpers to hold: an interrupt could take them away from under one that is late.
        call_helper(help_draw, logits, rows)
    draw(*work, True)
    return token_ids


def address_of(values: Floats) -> int:
    """Return where an array begins, for machine code; the array must outlive its use there."""
    return int(values.__array_interface__["data"][0])


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return each request's uniform number in [0, 1) for its output token at a position.

    Equal to `np.random.Generator(np.random.Philox(key=seed, counter=position)).random()`: Philox is counter-based
    (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), so there is no state to keep or to lose.
    """
    from contbatch.draw import philox  # loads Numba

    _check_integers("seed", seeds, 128)
    _check_integers("position", positions, 64)
    keys = np.frombuffer(b"".join([int(seed).to_bytes(16, "little") for seed in seeds]), "<u8").reshape(-1, 2)
    drawn: npt.NDArray[np.uint64] = philox(keys, np.array(positions, np.uint64))
    return (drawn >> np.uint64(11)) * np.float64(2.0**-53)


def _check_integers(name: str, values: Sequence[int], bits: int) -> None:
    if {*map(type, values)} == {int} and min(values) >= 0 and max(values) < 2**bits:  # at the speed of C
        return
    for value in values:
        if not (isinstance(value, (int, np.integer)) and 0 <= value < 2**bits):
            raise InvalidRequestError(f"{name} must be an integer in [0, 2**{bits}), got {value!r}")


def _check(logits: Floats, params: Sequence[object], seeds: Sequence[int], positions: Sequence[int]) -> None:
    if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or logits.ndim != 2 or logits.shape[1] == 0:
        got = f"{logits.dtype} {logits.shape}" if isinstance(logits, np.ndarray) else type(logits).__name__
        raise LogitsError(f"logits must be a float32 array of (num_rows, vocab_size ≥ 1), got {got}")
    lengths = len(params), len(seeds), len(positions)
    if set(lengths) != {len(logits)}:
        raise LogitsError(f"{len(logits)} rows of logits need as many params, seeds and positions, got {lengths}")
