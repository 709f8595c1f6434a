"""Short requests first."""

import random
from dataclasses import dataclass
from math import exp
from typing import Literal, get_args

from contbatch.checks import is_int, is_one_of, is_real, require
from contbatch.policies.chunked_prefill import ChunkedPrefill
from contbatch.request import Request

Length = Literal["prompt", "output", "prediction"]
LENGTHS: tuple[str, ...] = get_args(Length)


@dataclass(frozen=True, repr=False)
class ShortestJobFirst(ChunkedPrefill):
    """Admit the shortest waiting request first, which minimises the mean wait; long ones may starve.

    By a known output length this is the oracle that predictors approach (Fu et al., "Efficient LLM Scheduling by
    Learning to Rank", NeurIPS 2024). Running requests are not interrupted; they go as in `ChunkedPrefill`.

    Parameters
    ----------
    by : str
        "prompt": prompt tokens. "output": output tokens to come, of `Request.expected_output_tokens`. "prediction":
        the same, times exp(error · z) with z from a standard normal distribution.
    error : float
        Of the prediction, ≥ 0: the standard deviation of its logarithm; 0 is the oracle.
    seed : int
        Draws z together with the request's id: a request gets the same prediction whenever and wherever it runs.
    """

    steady = True
    decodes = "first"

    by: Length = "prompt"
    error: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_one_of(self.by, LENGTHS), "by", self.by, f"one of {', '.join(LENGTHS)}")
        require(is_real(self.error) and self.error >= 0, "error", self.error, "a finite number ≥ 0")
        require(is_int(self.seed), "seed", self.seed, "an integer")

    def rank(self, request: Request) -> float:  # noqa: D102
        if self.by == "prompt":
            return request.num_prompt_tokens
        expected: float = request.expected_output_tokens
        if self.by == "prediction":
            expected *= exp(self.error * random.Random(f"{self.seed}:{request.request_id!r}").gauss())
        return expected - request.num_output_tokens
