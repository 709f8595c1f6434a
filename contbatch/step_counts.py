"""What the row of a step counts."""

from typing import Literal

from contbatch.request import RequestStatus
from contbatch.scheduler import Scheduler
from contbatch.step import SchedulerOutput

HELD = RequestStatus.HELD
MOVES: tuple[Literal["out", "in", "copy"], ...] = ("out", "in", "copy")


def count(
    step: SchedulerOutput, scheduler: Scheduler, prefill: int, decode: int, padded: int
) -> tuple[int, tuple[int, ...]]:
    """Count, while a step runs, live pages, and all others of `step_rows.COUNTS` but what is known when it is over.

    Parameters
    ----------
    step : SchedulerOutput
    scheduler : Scheduler
    prefill, decode, padded : int
        Tokens of each kind that the step's grants compute.
    """
    running, (carried, context) = scheduler.running, step.decoders
    held, computed = 0, context - carried
    for request in running:
        held += request.status is HELD
        computed += request.num_computed_tokens
    pool, bound, shape = scheduler.pool, step.bound, step.shape
    counts = (
        len(running) + carried,
        held,
        len(scheduler.waiting.requests),
        shape.num_seqs,
        shape.num_tokens,
        prefill,
        decode + carried,
        padded,
        len(step.admitted),
        len(step.preempted),
        step.num_cached_tokens,
        computed + prefill + decode + carried - pool.page_size * pool.num_shared,  # shared pages are full
        pool.num_cached,
        step.num_evictions,
        *([len(step.pages_moved(kind)) for kind in MOVES] if step.moves else (0, 0, 0)),
        len(step.restarted),
        "seats" in bound,
        "tokens" in bound,
        "pages" in bound,
        pool.page_size * pool.num_free if "fragmentation" in bound else 0,
        *shape[3:],
    )
    return pool.num_pages - pool.num_available, counts
