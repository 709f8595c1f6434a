"""What the scheduler decided for one step."""

from dataclasses import dataclass, field
from typing import NamedTuple

from contbatch.request import Request


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
