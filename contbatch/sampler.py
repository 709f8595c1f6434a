"""Logits to token ids. Row by row: nothing drawn for a request depends on who shares its batch.

Filters act in vLLM's order (`vllm.v1.sample.sampler.Sampler`): temperature, min-p, top-k, top-p, each on what the
one before left, renormalised. Hugging Face Transformers puts min-p last, which differs only if top-p is on too.
Both keep every token that ties with the k-th; here equal logits rank by id, lowest first, so that top-k keeps k.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from contbatch.errors import InvalidRequestError, LogitsError
from contbatch.sampling_params import SamplingParams

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_FLOAT32 = np.finfo(np.float32)
_COLUMN = 32
"""Logits per column maximum in `top_k`: a pass over maxima is cheaper than a partition of the whole row."""


PART = 8 * 49152

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
    asked = np.zeros((len(params), 5))
    sampled = [row for row, p in enumerate(params) if p.temperature > 0]
    token_ids, errors = np.empty(len(logits), np.int64), dict[int, Exception]()
    if sampled:
        asked[sampled, :4] = [(p.temperature, p.top_k, p.top_p, p.min_p) for p in params if p.temperature > 0]
        asked[sampled, 4] = uniforms([seeds[i] for i in sampled], [positions[i] for i in sampled])
    from contbatch.draw import draw, help_draw
    from contbatch.plugins.paged_attention.helpers import CPUS, call_helper
    if logits.strides[1] != logits.itemsize:
        logits = np.ascontiguousarray(logits)
    addresses = logits.__array_interface__["data"][0] + np.arange(len(logits)) * logits.strides[0]
    for row, values in adjusted.items():
        addresses[row] = values.__array_interface__["data"][0]
    work = np.zeros(2, np.int64), addresses, logits.shape[1], asked, token_ids
    for _ in range(min(len(CPUS) - 1, logits.size // PART)):
        call_helper(help_draw, *work)
    draw(*work)
    for row in np.flatnonzero(token_ids < 0).tolist():
        values = adjusted.get(row, logits[row])
        token = int(values.argmax())  # of several the first, or the first NaN
        got = f"got {float(values[token])} at token {token}"
        errors[row] = LogitsError(f"row {row}: the largest logit must be finite, {got}")
    return token_ids, errors


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return each request's uniform number in [0, 1) for its output token at a position.

    Equal to `np.random.Generator(np.random.Philox(key=seed, counter=position)).random()`: Philox is counter-based
    (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), so there is no state to keep or to lose.
    """
    from contbatch.draw import philox  # loads Numba

    for seed, position in zip(seeds, positions, strict=True):
        for name, value, bits in (("seed", seed, 128), ("position", position, 64)):
            if not (isinstance(value, (int, np.integer)) and 0 <= value < 2**bits):
                raise InvalidRequestError(f"{name} must be an integer in [0, 2**{bits}), got {value!r}")
    keys = np.array([(int(seed) & (2**64 - 1), int(seed) >> 64) for seed in seeds], np.uint64).reshape(-1, 2)
    return (philox(keys, np.array(positions, np.uint64)) >> np.uint64(11)) * 2.0**-53


def _check(logits: Floats, params: Sequence[object], seeds: Sequence[int], positions: Sequence[int]) -> None:
    if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or logits.ndim != 2 or logits.shape[1] == 0:
        got = f"{logits.dtype} {logits.shape}" if isinstance(logits, np.ndarray) else type(logits).__name__
        raise LogitsError(f"logits must be a float32 array of (num_rows, vocab_size ≥ 1), got {got}")
    lengths = len(params), len(seeds), len(positions)
    if set(lengths) != {len(logits)}:
        raise LogitsError(f"{len(logits)} rows of logits need as many params, seeds and positions, got {lengths}")


def _best(values: Floats, count: int) -> Ids:
    """Return where the `count` largest values stand, ascending; of equal ones the first are taken."""
    cut = np.partition(values, values.size - count)[values.size - count]
    keep = np.flatnonzero(values >= cut)
    excess = keep.size - count
    return np.delete(keep, np.flatnonzero(values[keep] == cut)[-excess:]) if excess else keep


def top_k(row: Floats, k: int) -> Ids:
    """Return the ids of the k ≥ 1 best tokens, ascending: `_best`, in about half the time where k is small."""
    width = row.size // _COLUMN
    if k > width // 8:
        return _best(row, k)
    body, tail = row[: _COLUMN * width].reshape(_COLUMN, width), row[_COLUMN * width :]
    maxima = body.max(axis=0)
    # k columns reach the cut, so at least k logits do, and none of the k best is below it.
    cut = np.partition(maxima, width - k)[width - k]
    columns = np.flatnonzero(maxima >= cut)
    lines, places = np.nonzero(body[:, columns] >= cut)
    ids = np.concatenate([lines * width + columns[places], body.size + np.flatnonzero(tail >= cut)])
    return ids[_best(row[ids], k)]
