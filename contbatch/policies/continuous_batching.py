"""Prompts first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from contbatch.policies.policy import Plan, decodes, everything, prefills
from contbatch.policies.preemptive import Preemptive
from contbatch.request import Request


@dataclass(frozen=True, repr=False)
class ContinuousBatching(Preemptive):
    """Iteration-level scheduling with pages on demand: whoever finished leaves, whoever waits joins, at every step.

    Prompts go first (as in the first vLLM), so a long prompt can stall the decoding requests of its step when the
    budget binds. First come, first served. Orca (Yu et al., OSDI 2022) for the iteration level, vLLM (Kwon et al.,
    SOSP 2023) for the pages. Simplified: the first vLLM computed prompts and decodes in separate steps; here decodes
    take what prompts leave of the budget, and a prompt over the budget is chunked rather than refused.
    """

    steady = True
    decodes = "aside"

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        return chain(prefills(running), everything(waiting), decodes(running))
