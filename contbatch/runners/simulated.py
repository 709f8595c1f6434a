"""A runner without a model: it predicts how long a step takes, and makes tokens that mean nothing."""

from contbatch.cost import CostModel, require_number
from contbatch.engine import StepResult
from contbatch.request import Request
from contbatch.step import SchedulerOutput


def next_token(request: Request) -> int:
    """Choose the token that makes the answer as long as `expected_output_tokens` says.

    The smallest stop token when that length is reached, if there is one; else the smallest token that is none.
    """
    stops = request.stop_ids
    if not stops:
        return 0
    if len(request.output_token_ids) + 1 >= request.expected_output_tokens:
        return min(stops)
    return next(token for token in range(len(stops) + 1) if token not in stops)


def num_steps_alike(request: Request) -> int:
    """Count the tokens up to the one that ends the answer, or tries to: all before it are the same."""
    made = len(request.output_token_ids)
    left = request.sampling.max_tokens - made
    return min(left, max(1, request.expected_output_tokens - made)) if request.stop_ids else left


class SimulatedRunner:
    """Takes the seconds that a cost model says; for `Engine`.

    Parameters
    ----------
    cost : CostModel
    page_size : int
        Tokens in a page, for the price of swapping it. Copies between pages of the device cost nothing here.
    """

    is_virtual = True

    def __init__(self, cost: CostModel, page_size: int = 16) -> None:
        self.cost, self.page_size = cost, page_size
        self.num_rows = 0
        """Rows of the last step."""

    def validate(self, request: Request) -> None:
        """Accept every request: lengths are the scheduler's to check."""

    def resize_seconds(self, num_rows: int) -> float:
        """Return the seconds that the next step takes longer because the last one had another number of rows."""
        if num_rows == self.num_rows:
            return 0.0
        least = getattr(self.cost, "min_rows", 1)
        if self.num_rows and max(num_rows, least) == max(self.num_rows, least):
            return 0.0
        return require_number(self.cost, "resize_s", getattr(self.cost, "resize_s", 0.0))

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Predict the step."""
        tokens = {request.request_id: next_token(request) for request, _, _, samples, _ in step.grants if samples}
        if step.forked:
            tokens |= {request.request_id: next_token(request) for request in step.forked}
        shape = step.shape
        elapsed_s = require_number(self.cost, "seconds", self.cost.seconds(shape))
        elapsed_s += self.resize_seconds(shape.num_tokens)
        self.num_rows = shape.num_tokens
        if step.moves:
            num_swapped = sum(move.kind != "copy" for move in step.moves)
            swap_s = self.cost.swap_seconds(num_swapped, self.page_size)
            elapsed_s += require_number(self.cost, "swap_seconds", swap_s)
        return StepResult(tokens, elapsed_s)
