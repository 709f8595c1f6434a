"""The runner of a model on a device that finds the largest logits itself: only where they don't do come whole rows."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contbatch.engine import StepResult
from contbatch.inputs import StepInputs, pack
from contbatch.logits import logprobs
from contbatch.logprob import Logprobs
from contbatch.runners.model_runner import ModelRunner, PagedModel, draw, score
from contbatch.step import SchedulerOutput
from contbatch.top_logits import TopLogits


class TopModel(PagedModel, Protocol):
    """A `PagedModel` whose logits can stay on the device."""

    def forward_top(self, inputs: Mapping[str, np.ndarray]) -> TopLogits:
        """Run one step, as `forward` does, and return the largest logits of each row."""
        ...

    def whole_rows(self, top: TopLogits, rows: Sequence[int]) -> NDArray[np.float32]:
        """Return all logits of some rows of the last step, float32 (len(rows), vocab_size)."""
        ...


class TopRunner(ModelRunner):
    """A `ModelRunner` with the same tokens, for less traffic: ids and values of the largest logits come back.

    Whole rows come for requests with penalties, biases, `min_tokens` to go, sampling without `top_k` where `min_p`
    does not narrow it down enough, prompt log-probabilities, more alternatives than the device finds, and where ties
    leave open which are the likeliest.
    Log-probabilities that the device computed differ from the host's by float32 rounding.
    """

    model: TopModel

    def __init__(self, model: TopModel) -> None:
        super().__init__(model)

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Compute a step: see `ModelRunner.execute`. `elapsed_s` includes the whole rows."""
        inputs = pack(step)
        began = perf_counter()
        if step.moves:
            self.model.move_pages(step.moves)
        top = self.model.forward_top(inputs.feed())
        rows = _untold(inputs, top)
        whole = dict(zip(rows, self.model.whole_rows(top, rows), strict=True))
        elapsed_s = perf_counter() - began
        tokens, errors = _draw(inputs, top, whole)

        def score_row(row: int, token: int, count: int) -> Logprobs:
            return logprobs(whole[row], token, count) if row in whole else top.logprobs(row, token, count)

        return StepResult(tokens, elapsed_s, errors, score(inputs, tokens, errors, score_row))


def _untold(inputs: StepInputs, top: TopLogits) -> list[int]:
    """Return the rows of logits that are needed as a whole."""
    first = len(inputs.logits_indices) - len(inputs.sampled)
    scored = [row for row in range(first) if not top.tells(row, None)]
    return scored + [row for row, request in enumerate(inputs.sampled, first) if not top.tells_next(row, request)]


def _draw(
    inputs: StepInputs, top: TopLogits, whole: Mapping[int, NDArray[np.float32]]
) -> tuple[dict[int | str, int], dict[int | str, Exception]]:
    first = len(inputs.logits_indices) - len(inputs.sampled)
    of_top = [(row, r) for row, r in enumerate(inputs.sampled, first) if row not in whole]
    of_whole = [(row, r) for row, r in enumerate(inputs.sampled, first) if row in whole]
    places, errors = draw(top.values[[row for row, _ in of_top]], [r for _, r in of_top])
    tokens = {r.request_id: int(top.ids[row, places[r.request_id]]) for row, r in of_top}
    if of_whole:
        drawn, failed = draw(np.stack([whole[row] for row, _ in of_whole]), [r for _, r in of_whole])
        tokens, errors = tokens | drawn, errors | failed
    return tokens, errors
