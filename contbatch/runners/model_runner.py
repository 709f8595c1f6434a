"""The runner of a real model: pack a step, run the model, sample."""

from collections.abc import Mapping
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contbatch.engine import StepResult
from contbatch.errors import InvalidRequestError
from contbatch.inputs import pack
from contbatch.model import ModelConfig
from contbatch.request import Request
from contbatch.sampler import sample
from contbatch.step import SchedulerOutput


class PagedModel(Protocol):
    """A model and its KV pages on some device."""

    config: ModelConfig
    num_pages: int
    page_size: int

    def forward(self, inputs: Mapping[str, np.ndarray]) -> NDArray[np.float32]:
        """Run one step (the arrays of `contbatch.inputs.StepInputs`); return logits (num_logits, vocab_size)."""
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
        """Raise `InvalidRequestError` for a request whose token ids the model does not know."""
        if request.prompt_token_ids is None:
            raise InvalidRequestError(f"request {request.request_id!r} has only a length; a model needs token ids")
        limit = self.model.config.vocab_size
        ids = np.asarray(request.prompt_token_ids)
        if ids.dtype.kind not in "iu":
            raise InvalidRequestError(f"request {request.request_id!r}: token ids must be integers, got {ids.dtype}")
        if (bad := ids[(ids < 0) | (ids >= limit)]).size:
            raise InvalidRequestError(f"request {request.request_id!r}: token id {bad[0]} is not in [0, {limit})")

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Compute a step. A request whose logits are unusable gets an error of its own.

        Requests without a seed draw from the stream of their number of arrival, so a run repeats itself.
        """
        inputs = pack(step)
        began = perf_counter()
        logits = self.model.forward(inputs.feed())
        elapsed_s = perf_counter() - began
        rows = inputs.sampled
        seeds = [r.order if r.sampling.seed is None else r.sampling.seed for r in rows]
        ids, errors = sample(logits, [r.sampling for r in rows], seeds, [r.num_output_tokens for r in rows])
        tokens = {r.request_id: token for r, token in zip(rows, ids.tolist(), strict=True)}
        return StepResult(tokens, elapsed_s, {rows[row].request_id: error for row, error in errors.items()})

    def close(self) -> None:
        """Free model and pages; idempotent. Later use raises `RunnerError`."""
        self.model.close()

    def __enter__(self) -> "ModelRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
