"""Iteration-level scheduling with contiguous memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

from contbatch.checks import is_one_of, require, take_counts
from contbatch.policies.policy import Plan, Policy, everything
from contbatch.request import Request

Reservation = Literal["max_tokens", "max", "power_of_two", "oracle"]
RESERVATIONS: tuple[str, ...] = get_args(Reservation)


@dataclass(frozen=True, repr=False)
class Orca(Policy):
    """Iteration-level scheduling that reserves the memory of the whole request at admission, so it never preempts.

    First come, first served at every iteration (Yu et al., OSDI 2022, section 4.2), without pipeline stages. With the
    scheduler's `layout="contiguous"` and `page_size=1` memory is that of the paper; if paged, only reserved alike.

    Parameters
    ----------
    reservation : str
        Of the output, besides the prompt. "max_tokens": what the request may make, as in Orca's paper. The others are
        the baselines of vLLM's paper (Kwon et al., SOSP 2023, section 6.1): "max": the model's longest sequence.
        "power_of_two": the expected output rounded up to a power of two. "oracle": the expected output
        (`Request.expected_output_tokens`; a request that makes more takes pages on demand and may be preempted, or
        begins again in a longer run).
    max_model_len : int
        The longest sequence, prompt and output, in tokens; bounds "max" and "power_of_two".
    """

    steady = True
    decodes = "first"
    reservation: Reservation = "max_tokens"
    max_model_len: int = 2048

    def __post_init__(self) -> None:
        require(is_one_of(self.reservation, RESERVATIONS), "reservation", self.reservation, f"one of {RESERVATIONS}")
        take_counts(self, "max_model_len")

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        return chain(everything(running), everything(waiting))

    def reserve(self, request: Request) -> int:  # noqa: D102
        prompt, expected = request.num_prompt_tokens, request.expected_output_tokens
        if self.reservation == "max":
            return max(self.max_model_len, request.max_kv_tokens)
        if self.reservation == "power_of_two":
            rounded = prompt + (1 << (expected - 1).bit_length()) - 1
            return max(min(rounded, self.max_model_len), prompt + expected - 1)
        return prompt + expected - 1 if self.reservation == "oracle" else request.max_kv_tokens
