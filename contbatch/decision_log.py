"""The decision log: what the scheduler decided at every step, as rows that can be replayed and compared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from contbatch.decision import MOVES, PADDING, REASONS, SAMPLES, Decision
from contbatch.errors import SchedulerError
from contbatch.request import Request, RequestStatus
from contbatch.scheduler import Scheduler
from contbatch.step import BINDING, SchedulerOutput

if TYPE_CHECKING:
    import pandas as pd

    from contbatch.log_check import State
    from contbatch.log_diff import Difference
FORKING = RequestStatus.FORKING


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
        self._unforked: set[Request] = set()  # of the live: further samples that do not wait yet
        self._swapped: dict[Request, list[int]] = {}  # their host pages
        self._cached: set[int] = set()
        self._running_step: list[tuple[Request, int, int]] = []  # request, computed after it, tokens made before it
        self._drawing: list[Request] = []  # further samples
        self._scheduler: ref[Scheduler] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_scheduler": None}  # a copy is of what is written: nobody goes on with it

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
            The log is empty, but the scheduler has run before with requests that still run; or the log tells of another
            scheduler, or was read from a file.
        """
        if not self.settings:
            self._open(scheduler, step)
        elif self._scheduler is None or self._scheduler() is not scheduler:
            what = f"this one holds {len(self.rows)} steps of {len(self.requests)} requests of another run"
            raise SchedulerError(f"a decision log is of one scheduler, and {what}: give each run a new DecisionLog()")
        self.end(())
        row = Decision(step.step, now, free=scheduler.pool.num_free)
        self._note_waiting(row, scheduler)
        self._note_seated(row, scheduler)
        self._note_moves(row, step)
        cached = set(scheduler.pool.cached_pages)
        row.cached, row.uncached = sorted(cached - self._cached), sorted(self._cached - cached)
        self._cached = cached
        row.plan = [[self._numbers[request], tokens] for request, tokens in step.plan]
        row.bound = [place for place, limit in enumerate(BINDING) if limit in step.bound]
        for request, start, num_tokens, samples, padding in step.grants:
            flags = SAMPLES * samples + PADDING * padding
            row.grants.append([self._numbers[request], start, num_tokens, flags])
            self._running_step.append((request, start + num_tokens, len(request.output_token_ids)))
        row.forked = [self._numbers[request] for request in step.forked]
        self._drawing = list(step.forked)
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
        drawn = [[self._numbers[r], r.output_token_ids[0]] for r in self._drawing if r.output_token_ids]
        if drawn:
            self.rows[-1].sampled += drawn
        self._running_step, self._drawing = [], []
        for request in left:
            if request in self._numbers:  # else it came and went between two steps
                reason = REASONS.index(request.finish_reason or "")
                self.rows[-1].left.append([self._numbers.pop(request), reason])
                self._seated.pop(request, None)
                self._swapped.pop(request, None)
                self._unforked.discard(request)

    def _open(self, scheduler: Scheduler, step: SchedulerOutput) -> None:
        if any(r.num_computed_tokens and r not in step.admitted for r in scheduler.requests.values()):
            raise SchedulerError("a decision log begins before the requests it tells of have run")
        pool, self._scheduler = scheduler.pool, ref(scheduler)
        self.settings = {
            "policy": repr(scheduler.policy),
            "layout": pool.layout,
            "num_pages": pool.num_pages,
            "page_size": pool.page_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "prefix_cache": scheduler.prefix_cache.enabled,
            "num_host_pages": scheduler.swap_space.num_pages,
        }

    def _note_waiting(self, row: Decision, scheduler: Scheduler) -> None:
        """Give numbers to those that arrived since the last row, the latest of the live; note who began to wait."""
        arrived: list[Request] = []
        for request in reversed(scheduler.requests.values()):
            if request in self._numbers:
                break
            arrived.append(request)
        for request in reversed(arrived):
            self._numbers[request] = len(self.requests)
            self.requests.append((request.request_id, request.arrival_time))
            if request.status is FORKING:
                self._unforked.add(request)
            else:
                self._queue(row, request)
        forked = [request for request in self._unforked if request.status is not FORKING]
        for request in sorted(forked, key=lambda r: r.order):
            self._unforked.remove(request)
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

    def _note_moves(self, row: Decision, step: SchedulerOutput) -> None:
        row.moves = [[MOVES.index(kind), source, target] for kind, source, target in step.moves]
        for request in dict.fromkeys((*self._swapped, *step.moved)):  # nobody else can have got or lost host pages
            if request.host_pages != self._swapped.get(request, []):
                row.host.append([self._numbers[request], *request.host_pages])
            self._swapped[request] = list(request.host_pages)
        self._swapped = {request: pages for request, pages in self._swapped.items() if pages}

    # ---- using it ------------------------------------------------------------------------------------------------

    def states(self) -> "Iterator[State]":
        """Replay the log: yield who sat, waited and held which pages while each step ran. No model, no scheduler.

        Raises
        ------
        DecisionLogError
            At the step that can't have happened after those before it.
        """
        from contbatch.log_check import replayed

        return replayed(self)

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
