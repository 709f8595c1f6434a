"""The common part of policies that take pages on demand, and so may have to preempt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from contbatch.checks import is_one_of, require, take_python_numbers
from contbatch.policies.policy import Policy
from contbatch.request import Request

Victim = Literal["lowest_rank", "latest_arrival", "lowest_priority", "fewest_tokens"]
VICTIMS: dict[str, Callable[[Request], tuple[float, ...]]] = {
    "latest_arrival": lambda r: (r.arrival_time, r.order),
    "lowest_priority": lambda r: (r.priority, r.arrival_time, r.order),
    "fewest_tokens": lambda r: (-r.num_computed_tokens, r.arrival_time, r.order),
}


@dataclass(frozen=True, repr=False)
class Preemptive(Policy):
    """A policy that takes pages for what is known at admission, then on demand; with a choice of whom to preempt.

    Parameters
    ----------
    victim : str
        "lowest_rank": whom the plan names last. "latest_arrival": as vLLM does it. "lowest_priority": the largest
        `Request.priority`, then the latest arrival. "fewest_tokens": whose recomputation is cheapest. Always among
        those that the plan ranks below whoever needs pages.
    """

    victim: Victim = field(default="lowest_rank", kw_only=True)

    def __post_init__(self) -> None:
        take_python_numbers(self)
        choices: tuple[str, ...] = get_args(Victim)
        require(is_one_of(self.victim, choices), "victim", self.victim, f"one of {', '.join(choices)}")

    def reserve(self, request: Request) -> int:  # noqa: D102
        # Else a prompt admitted for its first chunk would take the pages of older, decoding requests for its next.
        return request.num_tokens

    def choose_victim(self, candidates: Sequence[Request]) -> Request:  # noqa: D102
        return candidates[-1] if self.victim == "lowest_rank" else max(candidates, key=VICTIMS[self.victim])
