"""The decision log: what the scheduler decided at every step, as rows of integers that can be replayed and compared.

A request is called by its number, its place in `DecisionLog.requests`; a row says what changed, never what stayed:

    step 4   plan       [[0, 1], [2, 9]]       the policy asked for 1 token of request 0, then 9 of request 2
             preempted  [1]
             admitted   [[2, 1, 0]]            request 2 sits on seat 1, 0 of its tokens in the prefix cache
             tables     [[2, 0, 7, 3]]         its page table from place 0 on: pages 7 and 3
             grants     [[0, 12, 1, 1], [2, 0, 5, 0]]      tokens 12..12 and sample one; tokens 0..4, no sample
             sampled    [[0, 42]]              what the runner made of it
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from contbatch.errors import SchedulerError
from contbatch.request import Request
from contbatch.scheduler import Scheduler
from contbatch.step import BINDING, SchedulerOutput

if TYPE_CHECKING:
    import pandas as pd

    from contbatch.log_diff import Difference
    from contbatch.replay import State

REASONS = ("length", "stop", "abort", "error")
SAMPLES, PADDING = 1, 2


@dataclass(slots=True)
class Decision:
    """One row: a step as it was planned, then what came of it. Planned anew after a crash, a step has two rows."""

    step: int
    now: float
    """Seconds on the engine's clock."""
    queued: list[int] = field(default_factory=list)
    """Requests that began to wait: arrived since the last row, or preempted in this one."""
    ranks: list[float] = field(default_factory=list)
    """The place among the waiting that the policy gave to each of `queued`."""
    plan: list[list[int]] = field(default_factory=list)
    """[request, tokens] that the policy asked for, as far as the step went."""
    preempted: list[int] = field(default_factory=list)
    admitted: list[list[int]] = field(default_factory=list)
    """[request, seat, tokens that it need not compute]."""
    restarted: list[int] = field(default_factory=list)
    """Requests that outgrew a contiguous run and begin again in another."""
    tables: list[list[int]] = field(default_factory=list)
    """[request, place, *pages]: its page table from that place on. Changes since the last row."""
    cached: list[int] = field(default_factory=list)
    """Pages that became cached since the last row: held by nobody, content kept."""
    uncached: list[int] = field(default_factory=list)
    free: int = 0
    """Free pages."""
    bound: list[int] = field(default_factory=list)
    """Limits that kept out something the plan asked for: places in `step.BINDING`."""
    grants: list[list[int]] = field(default_factory=list)
    """[request, start, tokens, flags]: `SAMPLES`, `PADDING` or 0."""
    sampled: list[list[int]] = field(default_factory=list)
    """[request, token]."""
    lost: list[int] = field(default_factory=list)
    """Requests whose grant came to nothing: the step crashed, or they were aborted while it ran."""
    left: list[list[int]] = field(default_factory=list)
    """[request, place in `REASONS`]: who left before the next row."""


@dataclass(slots=True)
class _Seated:
    """What the log knows of a request with a seat."""

    num_preemptions: int
    pages: list[int]
    computed: int


class DecisionLog:
    """Rows of every step of one scheduler, from its first request on; `Engine` fills it.

    Two logs are equal if every number in them is: the same workload gives the same log. Who drives a scheduler without
    an engine calls `begin` after each `schedule` and `end` after each `update` or `abort`.
    """

    def __init__(self) -> None:
        self.settings: dict[str, int | str | bool] = {}
        """Policy and limits of the scheduler."""
        self.requests: list[tuple[int | str, float]] = []
        """Id and arrival time (seconds) of each request, by its number."""
        self.rows: list[Decision] = []
        self._numbers: dict[Request, int] = {}  # of the live
        self._seated: dict[Request, _Seated] = {}
        self._cached: set[int] = set()
        self._running_step: list[tuple[Request, int, int]] = []  # request, computed after it, tokens made before it

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DecisionLog):
            return NotImplemented
        return (self.settings, self.requests, self.rows) == (other.settings, other.requests, other.rows)

    __hash__ = None  # type: ignore[assignment]

    # ---- filling it ----------------------------------------------------------------------------------------------

    def begin(self, step: SchedulerOutput, scheduler: Scheduler, now: float) -> None:
        """Note a step just planned, which starts at `now` (seconds).

        Raises
        ------
        SchedulerError
            The log is empty, but the scheduler has run before with requests that still run.
        """
        self.end(())
        if not self.settings:
            self._open(scheduler, step)
        row = Decision(step.step, now, free=scheduler.pool.num_free)
        self._note_waiting(row, scheduler)
        self._note_seated(row, scheduler)
        cached = set(scheduler.pool.cached_pages)
        row.cached, row.uncached = sorted(cached - self._cached), sorted(self._cached - cached)
        self._cached = cached
        row.plan = [[self._numbers[request], tokens] for request, tokens in step.plan]
        row.bound = [place for place, limit in enumerate(BINDING) if limit in step.bound]
        for request, start, num_tokens, samples, padding in step.grants:
            flags = SAMPLES * samples + PADDING * padding
            row.grants.append([self._numbers[request], start, num_tokens, flags])
            self._running_step.append((request, start + num_tokens, len(request.output_token_ids)))
        self.rows.append(row)

    def end(self, left: Sequence[Request]) -> None:
        """Note what came of the last step, and that the requests in `left` have left since."""
        for request, computed, made in self._running_step:
            number = self._numbers[request]
            if len(request.output_token_ids) > made:
                self.rows[-1].sampled.append([number, request.output_token_ids[-1]])
            if request.num_computed_tokens != computed:
                self.rows[-1].lost.append(number)
            self._seated[request].computed = request.num_computed_tokens
        self._running_step = []
        for request in left:
            if request in self._numbers:  # else it came and went between two steps
                reason = REASONS.index(request.finish_reason or "")
                self.rows[-1].left.append([self._numbers.pop(request), reason])
                self._seated.pop(request, None)

    def _open(self, scheduler: Scheduler, step: SchedulerOutput) -> None:
        if any(r.num_computed_tokens and r not in step.admitted for r in scheduler.requests.values()):
            raise SchedulerError("a decision log begins before the requests it tells of have run")
        pool = scheduler.pool
        self.settings = {
            "policy": repr(scheduler.policy),
            "layout": pool.layout,
            "num_pages": pool.num_pages,
            "page_size": pool.page_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "prefix_cache": scheduler.prefix_cache.enabled,
        }

    def _note_waiting(self, row: Decision, scheduler: Scheduler) -> None:
        """Give numbers to those that arrived since the last row: the latest of the live."""
        arrived: list[Request] = []
        for request in reversed(scheduler.requests.values()):
            if request in self._numbers:
                break
            arrived.append(request)
        for request in reversed(arrived):
            self._numbers[request] = len(self.requests)
            self.requests.append((request.request_id, request.arrival_time))
            self._queue(row, request)

    def _queue(self, row: Decision, request: Request) -> None:
        row.queued.append(self._numbers[request])
        row.ranks.append(float(request.rank))

    def _note_seated(self, row: Decision, scheduler: Scheduler) -> None:
        """Note who lost a seat, who took one, and whose pages changed: compared with the last row, to miss nothing."""
        for request, known in list(self._seated.items()):
            if request.num_preemptions != known.num_preemptions:
                del self._seated[request]
                row.preempted.append(self._numbers[request])
                self._queue(row, request)
        for request in scheduler.running:
            number, computed, pages = self._numbers[request], request.num_computed_tokens, request.pages
            if request not in self._seated:
                self._seated[request] = _Seated(request.num_preemptions, [], computed)
                row.admitted.append([number, request.seat or 0, computed])
            elif computed < self._seated[request].computed:
                self._seated[request].computed = computed
                row.restarted.append(number)
            known = self._seated[request]
            if pages != known.pages:
                place = next(
                    (i for i, (old, new) in enumerate(zip(known.pages, pages, strict=False)) if old != new), None
                )
                place = min(len(known.pages), len(pages)) if place is None else place
                row.tables.append([number, place, *pages[place:]])
                known.pages = list(pages)

    # ---- using it ------------------------------------------------------------------------------------------------

    def states(self) -> "Iterator[State]":
        """Replay the log: yield who sat, waited and held which pages while each step ran. No model, no scheduler.

        Raises
        ------
        DecisionLogError
            At the step that can't have happened after those before it.
        """
        from contbatch.replay import replay

        return replay(self)

    def diff(self, other: "DecisionLog") -> "Difference | None":
        """Say where another log first decides otherwise, and how; None if they are equal."""
        from contbatch.log_diff import first_difference

        return first_difference(self, other)

    def frame(self) -> "pd.DataFrame":
        """Return the rows as a table, a column per field of `Decision`."""
        from contbatch.log_files import frame

        return frame(self)

    def save(self, path: str | Path) -> Path:
        """Write the log to a file named *.jsonl or *.parquet (which needs pyarrow), each row sealed by a checksum."""
        from contbatch.log_files import write

        return write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "DecisionLog":
        """Read a log from a file that `save` wrote; `DecisionLogError` if it was changed or cut, naming the step."""
        from contbatch.log_files import read

        return read(cls(), Path(path))
