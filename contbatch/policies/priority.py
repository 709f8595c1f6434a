"""Important requests first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import merge

from contbatch.checks import require
from contbatch.policies.policy import Plan, everything
from contbatch.policies.preemptive import Preemptive
from contbatch.request import Request


def _key(request: Request) -> tuple[float, float, int]:
    return request.priority, request.arrival_time, request.order


@dataclass(frozen=True, repr=False)
class Priority(Preemptive):
    """Smaller `Request.priority` first, running or waiting; equals by arrival. The unimportant may starve.

    As vLLM's "priority" scheduling: smaller numbers first, and whoever is least important is preempted when pages run
    out. Simplified: order holds within the token budget too, so an important prompt goes before other decodes.

    Parameters
    ----------
    preempt : bool
        Whether a waiting request also takes seat and pages from running ones of larger `priority` (as in vLLM since
        0.6.2, before its present scheduler); else it waits until somebody leaves.
    """

    steady = True

    preempt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.preempt, bool), "preempt", self.preempt, "True or False")

    def rank(self, request: Request) -> float:  # noqa: D102
        return request.priority

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        return everything(merge(sorted(running, key=_key), waiting, key=_key))

    def make_way(self, newcomer: Request, running: Sequence[Request]) -> Sequence[Request]:  # noqa: D102
        return sorted((r for r in running if self.preempt and r.priority > newcomer.priority), key=_key)
