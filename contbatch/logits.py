"""Logits before sampling: what a request adds, subtracts or forbids; and how likely its tokens were without that.

A row that asks for anything is copied and changed in vLLM's order (`vllm.v1.sample.sampler.Sampler.forward`): the bias,
the repetition penalty, then the frequency and presence penalties; temperature and filters come later, in `sampler`.
Everything follows from the request's tokens, so a preemption, a chunk or a neighbour changes nothing.
"""

from collections.abc import Sequence

import numpy as np

from contbatch.errors import LogitsError
from contbatch.logprob import Logprob, Logprobs
from contbatch.request import Request
from contbatch.sampler import Floats, address_of


def adjust(logits: Floats, requests: Sequence[Request]) -> dict[int, Floats]:
    """Apply bias, penalties and `min_tokens` to copies of the rows that ask for them.

    With logit l of a token, prompt and output as they are so far, and c the token's count in the output:

    - bias (OpenAI): l + bias;
    - repetition penalty r (CTRL, Keskar et al. 2019, section 4.1, in the form of vLLM and Transformers that also
      lowers negative logits): l / r if l > 0 else l * r, for tokens of prompt or output;
    - frequency penalty f and presence penalty p (OpenAI): l - f * c - p * (c > 0), output tokens only;
    - fewer output tokens than `min_tokens`: -inf for end-of-sequence and stop tokens, also with `ignore_eos`.

    Parameters
    ----------
    logits : ndarray of float32, (num_rows, vocab_size)
        Left as it is.
    requests : sequence of num_rows

    Returns
    -------
    dict of int to ndarray of float32, (vocab_size,)
        The changed copies, by row.
    """
    return {row: _adjusted(logits[row], r) for row, r in enumerate(requests) if not is_plain(r)}


def is_plain(request: Request) -> bool:
    """Whether `adjust` leaves the logits of a request's next token as they are."""
    p = request.sampling
    penalised = p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty
    return not (penalised or p.logit_bias or request.num_output_tokens < p.min_tokens)


def _adjusted(logits: Floats, request: Request) -> Floats:
    p, row, output = request.sampling, logits.copy(), request.output_token_ids
    with np.errstate(all="ignore"):  # +inf or NaN fails the request in `sample`
        if p.logit_bias:
            bias = dict(p.logit_bias)
            row[list(bias)] += np.array(list(bias.values()), np.float32)
        if p.repetition_penalty != 1:
            seen = np.array(request.token_ids(0, request.num_tokens), np.int64)
            # One that comes twice is given the same number twice.
            values = row[seen].astype(np.float64)
            row[seen] = np.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if output and (p.frequency_penalty or p.presence_penalty):
            tokens, counts = np.unique(output, return_counts=True)
            row[tokens] -= p.frequency_penalty * counts + p.presence_penalty
    if request.num_output_tokens < p.min_tokens:
        ends = {*p.stop_token_ids, *request.eos_token_ids}
        row[[token for token in ends if token < row.size]] = -np.inf
    return row


def logprobs(row: Floats, token: int, count: int, log_total: float | None = None) -> Logprobs:
    """Return the log-probability and rank of a token and of the `count` likeliest; a count of -1 means all.

    Parameters
    ----------
    row : ndarray of float32, (vocab_size,)
        Logits as the model made them. The exponentials are float32, their sum and the rest float64.
    log_total : float, optional
        The logarithm of the sum of their exponentials, where that is known.

    Raises
    ------
    LogitsError
        The row holds NaN or +inf, or is all -inf.
    """
    from contbatch.ranks import MOST, likelihoods  # loads Numba

    row = np.ascontiguousarray(row)
    total, rank, likeliest = likelihoods(address_of(row), row.size, token, count if 0 <= count <= MOST else 0)
    if np.isnan(total):
        raise LogitsError(f"the largest logit must be finite, got {row.max()}: token {token} has no probability")
    log_total = total if log_total is None else log_total
    found = {token: Logprob(float(row[token]) - log_total, rank)}
    count = min(count, row.size) if count >= 0 else row.size
    if len(likeliest) < count:
        likeliest = np.arange(row.size)
    likeliest = likeliest[np.argsort(-row[likeliest], kind="stable")[:count]]
    for rank, other in enumerate(likeliest.tolist(), 1):
        found.setdefault(other, Logprob(float(row[other]) - log_total, rank))
    return found
