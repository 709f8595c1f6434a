"""What remains of a step that was planned but never updated, because its runner failed or was interrupted."""

from typing import TYPE_CHECKING

from contbatch.policies.answers import rank_of
from contbatch.request import RequestStatus
from contbatch.step import SchedulerOutput

if TYPE_CHECKING:
    from contbatch.scheduler import Scheduler

RUNNING, SWAPPED, PREEMPTED = RequestStatus.RUNNING, RequestStatus.SWAPPED, RequestStatus.PREEMPTED


def abandon(step: SchedulerOutput, scheduler: "Scheduler") -> None:
    """Have all computed again that needs the page moves of a step that was never updated: which were done is unknown.

    Called once the step is planned, so those it moved run or wait.
    """
    for request in step.moved:
        if request.status is RUNNING:
            request.rank = rank_of(scheduler.policy, request)
            scheduler.vacate(request)
            scheduler.running.remove(request)
            request.num_preemptions += 1
            scheduler.waiting.add(request)
        elif request.status is SWAPPED:
            scheduler.swap_space.give_back(request.host_pages)
            request.num_swaps -= 1
        else:
            continue
        request.num_computed_tokens, request.status = 0, PREEMPTED
