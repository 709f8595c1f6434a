"""What the scheduler decided for one step."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from contbatch.errors import SchedulerError
from contbatch.request import Request, RequestStatus


class Grant(NamedTuple):
    """What one request computes in a step: tokens start .. start + num_tokens - 1 of its prompt and output."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether this catches up with all known tokens, so that a new one is sampled."""
    padding: bool
    """A finished row computed again for nothing (static batching with `pad`)."""


BINDING = ("seats", "tokens", "pages", "fragmentation")
"""Limits that may bind: seats, the token budget, pages, and (with "pages") pages that are free but not side by side."""


@dataclass(slots=True)
class SchedulerOutput:
    """One step: whose tokens to compute, and what changed on the way."""

    step: int
    grants: list[Grant] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    restarted: list[Request] = field(default_factory=list)
    """Running requests that outgrew their contiguous run: they begin again in a longer one."""
    plan: list[tuple[Request, int]] = field(default_factory=list)
    """What the policy asked for, in its order, as far as the step went: requests and tokens."""
    bound: set[str] = field(default_factory=set)
    """The limits that kept something the plan asked for out of this step, see `BINDING`."""
    num_tokens: int = 0
    """Tokens computed, ≤ max_num_batched_tokens."""
    num_cached_tokens: int = 0
    """Tokens of those admitted that the prefix cache held; they are not among `num_tokens`."""
    num_evictions: int = 0
    """Cached pages taken for other content."""

    def require_results(self, tokens: Collection[int | str], errors: Collection[int | str]) -> None:
        """Raise `SchedulerError` unless every running request that samples has a token or an error."""
        for request, _, _, samples, _ in self.grants:
            name = request.request_id
            if samples and name not in tokens and name not in errors and request.status is RequestStatus.RUNNING:
                raise SchedulerError(f"step {self.step} brought no token and no error for request {name!r}")
