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


@dataclass(slots=True)
class SchedulerOutput:
    """One step: whose tokens to compute, and what changed on the way."""

    step: int
    grants: list[Grant] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
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
