"""A decision log as a film: the first picture is an empty house, and every step says only what changes in it.

A change is three integers, (what, where, which):

    SEAT    seat, request that sits there from now on; NOBODY
    WORK    seat, what it does in this step: a place in `WORK_KINDS`
    PAGE    page, request that holds it alone; FREE, CACHED or SHARED
    ENTER   place in the queue, 4 · request + how it came there: a place in `QUEUE_KINDS`
    LEAVE   place in the queue, request
    TOKEN   request, token that it gets in this step
    GONE    request, how it left after the step before: a place in `decision.REASONS`
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contbatch.decision import PADDING, REASONS, SAMPLES, Decision
from contbatch.decision_log import DecisionLog
from contbatch.errors import DecisionLogError

SEAT, WORK, PAGE, ENTER, LEAVE, TOKEN, GONE = range(7)
NOBODY = FREE = -1
CACHED, SHARED = -2, -3
WORK_KINDS = ("none", "prompt", "decode", "held")
QUEUE_KINDS = ("new", "preempted", "swapped")


@dataclass(frozen=True)
class Film:
    """What a player needs of a log; memory grows with what happened, not with steps times pages."""

    settings: dict[str, Any]
    """Of the scheduler: see `DecisionLog.settings`."""
    requests: list[str]
    """Ids, by number."""
    now: NDArray[np.float64]
    """Seconds at which each step began: (num_steps,)."""
    bound: NDArray[np.uint8]
    """Limits that were binding in each step, a bit for each place in `step.BINDING`: (num_steps,)."""
    starts: NDArray[np.int32]
    """The changes of step i are starts[i] to starts[i + 1]: (num_steps + 1,)."""
    changes: NDArray[np.int32]
    """(num_changes, 3)."""

    @classmethod
    def of(cls, log: DecisionLog) -> "Film":
        """Make the film of a log.

        Raises
        ------
        DecisionLogError
            The log has no rows, or a row that can't follow on those before it; `DecisionLog.states` checks much more.
        """
        if not log.rows:
            raise DecisionLogError("the decision log has no step to show")
        camera, starts = _Camera(log), [0]
        for place, row in enumerate(log.rows):
            try:
                camera.shoot(place, row)
            except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
                raise DecisionLogError(
                    f"step {getattr(row, 'step', '?')} (row {place}): malformed: {error!r}"
                ) from error
            starts.append(len(camera.changes) // 3)
        return cls(
            dict(log.settings),
            [str(name) for name, _ in log.requests],
            np.array([row.now for row in log.rows]),
            np.array([sum(1 << place for place in row.bound) for row in log.rows], np.uint8),
            np.array(starts, np.int32),
            np.array(camera.changes, np.int32).reshape(-1, 3),
        )

    def __len__(self) -> int:
        return len(self.now)

    def tokens(self) -> list[int]:
        """Return the different tokens that were made, in order."""
        found: list[int] = np.unique(self.changes[self.changes[:, 0] == TOKEN, 2]).tolist()
        return found


class _Camera:
    """Follows a log row by row."""

    def __init__(self, log: DecisionLog) -> None:
        self.log = log
        self.changes: list[int] = []
        self._left: list[list[int]] = []
        self._seats: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self._holders: dict[int, set[int]] = {}
        self._touched: dict[int, None] = {}
        self._cached: set[int] = set()
        self._owners: dict[int, int] = {}
        self._queue: list[tuple[float, float, int]] = []
        self._keys: dict[int, tuple[float, float, int]] = {}
        self._work: dict[int, int] = {}
        self._made: set[int] = set()
        """Requests that have a token."""
        ended = {number for row in log.rows for number, reason in row.left if REASONS[reason] in ("length", "stop")}
        grants = ((n, place) for place, row in enumerate(log.rows) for n, _, _, flags in row.grants if flags != PADDING)
        self._last = {number: place for number, place in grants if number in ended}
        """The row of the last grant of each request that came to its end: later it only holds its seat."""

    def shoot(self, place: int, row: Decision) -> None:
        """Note what is different while a step runs from while the one before ran."""
        for number, reason in self._left:
            self._note(GONE, number, reason)
            if number in self._keys:
                self._leave_queue(number)
            self._vacate(number)
        for number in row.preempted:
            self._vacate(number)
        swapped = {number for number, *pages in row.host if pages}
        for number, rank in zip(row.queued, row.ranks, strict=True):
            self._enter_queue(number, rank, (number in row.preempted) + (number in swapped))
        for number, seat, _ in row.admitted:
            self._leave_queue(number)
            self._seats[number], self._tables[number] = seat, []
            self._note(SEAT, seat, number)
        for number, first, *pages in row.tables:
            self._let_go(number, first)
            self._tables[number] += pages
            for page in pages:
                self._holders.setdefault(page, set()).add(number)
            self._touched |= dict.fromkeys(pages)
        self._cached = (self._cached - set(row.uncached)) | set(row.cached)
        self._touched |= dict.fromkeys(row.uncached + row.cached)
        self._note_pages()
        self._note_work(place, row)
        for number, token in row.sampled:
            self._note(TOKEN, number, token)
            self._made.add(number)
        self._left = row.left

    def _note(self, what: int, where: int, which: int) -> None:
        self.changes += what, where, which

    def _enter_queue(self, number: int, rank: float, kind: int) -> None:
        key = self._keys[number] = rank, self.log.requests[number][1], number
        self._note(ENTER, bisect_left(self._queue, key), 4 * number + kind)
        insort(self._queue, key)

    def _leave_queue(self, number: int) -> None:
        place = bisect_left(self._queue, self._keys.pop(number))
        del self._queue[place]
        self._note(LEAVE, place, number)

    def _vacate(self, number: int) -> None:
        if number in self._seats:
            self._let_go(number, 0)
            del self._tables[number]
            self._note(SEAT, self._seats.pop(number), NOBODY)

    def _let_go(self, number: int, first: int) -> None:
        """Take a request off the pages in its table from a place on."""
        table = self._tables[number]
        for page in table[first:]:
            self._holders[page].discard(number)
            self._touched[page] = None
        del table[first:]

    def _note_pages(self) -> None:
        for page in self._touched:
            holders = self._holders.get(page, ())
            owner = SHARED if len(holders) > 1 else next(iter(holders), CACHED if page in self._cached else FREE)
            if owner != self._owners.get(page, FREE):
                self._owners[page] = owner
                self._note(PAGE, page, owner)
        self._touched.clear()

    def _note_work(self, place: int, row: Decision) -> None:
        doing = {
            number: 2 if n == 1 and flags == SAMPLES and number in self._made else 1
            for number, _, n, flags in row.grants
        }
        for number, seat in self._seats.items():
            is_held = place > self._last.get(number, place)
            kind = 3 if is_held else doing.get(number, 0)
            if kind != self._work.get(seat, 0):
                self._work[seat] = kind
                self._note(WORK, seat, kind)
        for seat in self._work.keys() - set(self._seats.values()):
            del self._work[seat]
            self._note(WORK, seat, 0)
