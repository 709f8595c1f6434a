"""The runner of a real model: pack a step, run the model, sample."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contbatch.checks import require
from contbatch.engine import StepResult
from contbatch.errors import InvalidRequestError, LogitsError
from contbatch.inputs import StepInputs, pack
from contbatch.logits import adjust, logprobs
from contbatch.logprob import Logprobs
from contbatch.model import ModelConfig
from contbatch.request import Request
from contbatch.sampler import sample
from contbatch.step import PageMove, SchedulerOutput


class PagedModel(Protocol):
    """A model and its KV pages on some device."""

    config: ModelConfig
    num_pages: int
    page_size: int
    num_host_pages: int

    def forward(self, inputs: Mapping[str, np.ndarray]) -> NDArray[np.float32]:
        """Run one step and keep its keys and values.

        Parameters
        ----------
        inputs : mapping
            input_ids, cumulative_sequence_length, past_seqlens, block_table, logits_indices; shapes and dtypes as in
            `contbatch.inputs.StepInputs`.

        Returns
        -------
        ndarray
            Logits, float32 (num_logits, vocab_size).

        Raises
        ------
        RunnerError
            After `close`; for an array that is missing or of another type, a token id outside the vocabulary, a row
            outside the step, or anything that the operator's contract forbids, such as a page outside the pool. The
            pages are as before then.
        """
        ...

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Move the content of pages, one after the other; `RunnerError`, and nothing moved, for a page it hasn't."""
        ...

    def close(self) -> None:
        """Free model and pages; idempotent."""
        ...


class ModelRunner:
    """Runs steps on a model that it owns; `elapsed_s` is the measured time of the model alone.

    Usable as a context manager. Several can live side by side in one process, each with its own pages.
    """

    is_virtual = False

    def __init__(self, model: PagedModel) -> None:
        self.model = model

    def validate(self, request: Request) -> None:
        """Raise `InvalidRequestError` for a request that names token ids, or counts of them, beyond the vocabulary."""
        if request.prompt_token_ids is None:
            raise InvalidRequestError(f"request {request.request_id!r} has only a length; a model needs token ids")
        limit = self.model.config.vocab_size
        try:
            ids = np.asarray(request.prompt_token_ids)
        except ValueError:  # a list of several lengths in it
            ids = np.zeros(0, object)
        if ids.dtype.kind not in "iu":
            raise InvalidRequestError(f"request {request.request_id!r}: token ids must be integers, got {ids.dtype}")
        if (bad := ids[(ids < 0) | (ids >= limit)]).size:
            raise InvalidRequestError(f"request {request.request_id!r}: token id {bad[0]} is not in [0, {limit})")
        p = request.sampling
        whose = f"of request {request.request_id!r}"
        for name, tokens in (("logit_bias", dict(p.logit_bias)), ("stop_token_ids", p.stop_token_ids)):
            for token in tokens:
                require(token < limit, f"a token id in {name} {whose}", token, f"in [0, {limit})")
        for name, count in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
            require(count is None or count <= limit, f"{name} {whose}", count, f"at most the vocabulary's {limit}")

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Compute a step. A request of which any wanted logits are unusable gets an error of its own.

        Requests without a seed draw from the stream of their number of arrival, so a run repeats itself; the further
        samples of a prompt from streams of their own. `elapsed_s` includes the step's page moves.
        """
        inputs = pack(step)
        began = perf_counter()
        if step.moves:
            self.model.move_pages(step.moves)
        logits = self.model.forward(inputs.feed())
        elapsed_s = perf_counter() - began
        tokens, errors = draw(logits[len(logits) - len(inputs.sampled) :], inputs.sampled)
        scores = score(inputs, tokens, errors, lambda row, *wanted: logprobs(logits[row], *wanted))
        return StepResult(tokens, elapsed_s, errors, scores)

    def close(self) -> None:
        """Free model and pages; idempotent. Later use raises `RunnerError`."""
        self.model.close()

    def __enter__(self) -> "ModelRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def draw(
    logits: NDArray[np.float32], requests: Sequence[Request]
) -> tuple[dict[int | str, int], dict[int | str, Exception]]:
    """Choose the next token of each request from its row of logits; tokens and errors by request id."""
    seeds = [(r.order if r.sampling.seed is None else r.sampling.seed) + (r.sample_index << 64) for r in requests]
    params, positions = [r.sampling for r in requests], [r.num_output_tokens for r in requests]
    ids, failed = sample(logits, params, seeds, positions, adjust(logits, requests))
    tokens = {r.request_id: token for r, token in zip(requests, ids.tolist(), strict=True)}
    return tokens, {requests[row].request_id: error for row, error in failed.items()}


def score(
    inputs: StepInputs,
    tokens: Mapping[int | str, int],
    errors: dict[int | str, Exception],
    score_row: Callable[[int, int, int], Logprobs],
) -> dict[int | str, list[Logprobs]]:
    """Score prompt tokens and `tokens` where wanted; those whose logits are unusable get into `errors` instead.

    `score_row` is given a row of logits, a token and how many alternatives are wanted.
    """
    told: list[tuple[Request, int, int | None]] = []
    """Of each row of logits: whose token it tells of, which one, and how many alternatives are wanted."""
    for request, positions in inputs.scored:
        following = request.token_ids(positions.start + 1, positions.stop + 1)
        told += [(request, token, request.sampling.prompt_logprobs) for token in following]
    told += [(request, tokens[request.request_id], request.sampling.logprobs) for request in inputs.sampled]
    scores: dict[int | str, list[Logprobs]] = {}
    for row, (request, token, count) in enumerate(told):
        if count is None or request.request_id in errors:
            continue
        try:
            scores.setdefault(request.request_id, []).append(score_row(row, token, count))
        except LogitsError as error:
            errors[request.request_id] = error
    return scores
