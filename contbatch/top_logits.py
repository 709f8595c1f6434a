"""The largest logits of each row, where the others stay on a device: enough for most requests."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contbatch.logits import is_plain, logprobs
from contbatch.logprob import Logprobs
from contbatch.request import Request

_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TopLogits:
    """The k largest logits of each row; by id, so that what stands first among equals does so in the whole row too."""

    ids: NDArray[np.int64]
    """(num_rows, k) ascending in each row"""
    values: NDArray[np.float32]
    """(num_rows, k)"""
    log_total: NDArray[np.float32]
    """(num_rows,) logarithm of the sum of the exponentials of the whole row"""
    vocab_size: int

    @classmethod
    def sorted_by_id(
        cls, ids: NDArray[np.int32], values: NDArray[np.float32], log_total: NDArray[np.float32], vocab_size: int
    ) -> "TopLogits":
        """Make one of ids and values that stand in any order."""
        order = np.argsort(ids, axis=1)
        sorted_ids = np.take_along_axis(ids, order, 1).astype(np.int64)
        return cls(sorted_ids, np.take_along_axis(values, order, 1), log_total.copy(), vocab_size)

    def tells(self, row: int, count: int | None) -> bool:
        """Whether a row's `count` likeliest tokens, None being all, are surely among those here.

        Of tokens that tie with the least logit here, a device may have left out any: only those above it are sure. A
        row whose total is not finite holds NaN or infinity: the whole row is needed to say what is wrong with it.
        """
        if not np.isfinite(self.log_total[row]):
            return False
        values = self.values[row]
        return values.size == self.vocab_size or (count is not None and np.sum(values > values.min()) >= count)

    def tells_next(self, row: int, request: Request) -> bool:
        """Whether a row here is enough for a request's next token and the log-probabilities it wants."""
        p, count = request.sampling, likeliest_needed(request)
        if count is None and is_plain(request) and p.logprobs != -1 and p.min_p > 0:
            # Where min-p drops the least logit here, what a device left out goes too. A margin for the host's rounding.
            with np.errstate(over="ignore", invalid="ignore"):  # minus infinity is small enough; NaN isn't
                below = (self.values[row].min() - self.values[row].max()) / max(p.temperature, float(_FLOAT32.tiny))
            count = max(1, p.logprobs or 0) if np.exp(below) < p.min_p * (1 - 1e-5) else None
        return self.tells(row, count)

    def logprobs(self, row: int, token: int, count: int) -> Logprobs:
        """Do as `contbatch.logits.logprobs` for a token and likeliest ones of which `tells` is true.

        They differ by the rounding of `log_total`, which a device computes in float32.
        """
        ids = self.ids[row]
        found = logprobs(self.values[row], int(np.searchsorted(ids, token)), count, float(self.log_total[row]))
        return {int(ids[place]): logprob for place, logprob in found.items()}


def likeliest_needed(request: Request) -> int | None:
    """Return how many of the likeliest tokens decide on a request's next one and its log-probabilities; None: all.

    Greedy choice needs one, top-k sampling k: min-p and top-p act on what top-k leaves. Everything that changes logits
    or draws from all of them needs all; what min-p alone leaves hangs on the logits, see `TopLogits.tells_next`.
    """
    p = request.sampling
    if not is_plain(request) or p.logprobs == -1 or (p.temperature > 0 and p.top_k < 1):
        return None
    return max(p.top_k if p.temperature > 0 else 1, p.logprobs or 0)
