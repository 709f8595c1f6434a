"""No batching."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from contbatch.policies.policy import Plan, Policy, everything
from contbatch.request import Request


@dataclass(frozen=True, repr=False)
class OneAtATime(Policy):
    """One request after the other, each to its end: what a server without batching does."""

    steady = True

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        return everything(running or islice(waiting, 1))
