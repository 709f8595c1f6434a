"""Decodes first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contbatch.policies.policy import Plan, decodes, everything, prefills
from contbatch.policies.preemptive import Preemptive
from contbatch.request import Request


@dataclass(frozen=True, repr=False)
class ChunkedPrefill(Preemptive):
    """Decoding requests go first and never stall; prompts fill what is left of the budget, in chunks.

    "Stall-free batching" of Sarathi-Serve (Agrawal et al., OSDI 2024, algorithm 3): all decodes, then the prompts that
    have begun, then new ones, up to the token budget. Also vLLM's present default. Simplified: the budget is a given
    number (`max_num_batched_tokens`), not derived from a limit on the time between tokens.
    """

    steady = True
    decodes = "first"

    def reserve(self, request: Request) -> int:  # noqa: ARG002, D102
        return 0  # pages chunk by chunk: decodes go first, so no prompt takes theirs

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        yield from decodes(running)
        yield from prefills(running)
        yield from everything(waiting)
