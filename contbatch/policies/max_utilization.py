"""TensorRT-LLM's bold one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contbatch.policies.policy import Plan, arrival_key, everything
from contbatch.policies.preemptive import Preemptive
from contbatch.request import Request


@dataclass(frozen=True, repr=False)
class MaxUtilization(Preemptive):
    """Fill the pool in every step, whatever the next one needs; when pages run out, pause the latest arrivals.

    MAX_UTILIZATION of TensorRT-LLM's capacity scheduler: requests in order of arrival, as many as fit this step; when
    a running one does not fit, the last that has started is paused and loses its pages. Simplified: a paused request
    does not pause younger ones to come back, and an admission leaves those running a page for their next token.
    """

    steady = True
    decodes = "aside"

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        yield from everything(sorted(running, key=arrival_key))
        yield from everything(waiting)
