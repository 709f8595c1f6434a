"""Collects what happens while an engine runs."""

from collections.abc import Iterable
from itertools import pairwise

from contbatch.life import Life, TokenTimes
from contbatch.metrics import Result
from contbatch.request import Request, RequestStatus
from contbatch.request_rows import RequestRows
from contbatch.scheduler import Scheduler
from contbatch.segment_rows import SegmentRows
from contbatch.step import SchedulerOutput
from contbatch.step_counts import count
from contbatch.step_ends import StepEnds
from contbatch.step_rows import StepRows
from contbatch.stretch import Stretch
from contbatch.unused_slots import UnusedSlots

NAN = float("nan")
KEPT = 65_536
"""Ends of steps, about, before they are noted for everybody."""
HELD = RequestStatus.HELD


class Recorder:
    """One row per step, per request that left, and per stretch of a seat; an interrupted step leaves no row.

    Parameters
    ----------
    release : "token" or "batch"
        Whether tokens reach clients as they are made, or when the request leaves its seat (see `Policy.release`).
    num_pages, page_size : int
        Of the pool.
    detail : bool
        Whether to keep what grows with steps and tokens: without it there are no times of tokens and no segments, and
        a row of steps sums up many (`StepRows`).
    """

    def __init__(self, release: str, num_pages: int, page_size: int, detail: bool = True) -> None:
        self.release, self.num_pages, self.page_size, self.detail = release, num_pages, page_size, detail
        self._steps = StepRows(detail)
        self._requests = RequestRows()
        self._segments = SegmentRows()
        self._token_s: dict[int | str, list[float]] = {}
        self._token_ids: dict[int | str, list[int]] = {}
        self._live: dict[int | str, Life] = {}
        self._ends = StepEnds()  # of steps with somebody carried
        self._counts: tuple[int, ...] = ()
        self._num_live_pages = 0
        self._end_s = NAN
        self._unused = UnusedSlots(page_size)

    def begin(self, step: SchedulerOutput, scheduler: Scheduler, now: float) -> None:
        """Note who sits where while a step that starts at `now` runs."""
        if scheduler.decoders is not None:
            self.begin_carried(scheduler.decoders.joined, step.step, now)
        for request in step.preempted:
            if live := self._live.get(request.request_id):
                if self.detail:
                    self._segments.add(request, live, step.step, now)
                self._unused.add(live.holds, live.stored, step.step)
                live.kind, live.seat, live.holds, live.stored = "", None, [], 0
        prefill = decode = held = 0
        for request, start, num_tokens, samples, padding in step.grants:
            if padding:
                kind, held = "held", held + num_tokens
            elif samples and num_tokens == 1 and request.output_token_ids:
                kind, decode = "decode", decode + 1
            else:
                kind, prefill = "prefill", prefill + num_tokens
            live = self._turn(request, kind, step.step, now)
            if self.detail:
                live.hold(step.step, len(request.pages), start + num_tokens)
        self._num_live_pages, self._counts = count(step, scheduler, prefill, decode, held)

    def begin_alike(self, step: SchedulerOutput, scheduler: Scheduler, now: float) -> None:
        """Do the same for the first of several steps in which everybody decodes, or is padding; see `end_alike`."""
        padded = 0
        for request, _, _, _, padding in step.grants:
            padded += padding
            kind = "held" if padding else "decode"
            if self._live[request.request_id].kind != kind:
                self._turn(request, kind, step.step, now)
        self._num_live_pages, self._counts = count(step, scheduler, 0, len(step.grants) - padded, padded)

    def begin_carried(self, joined: list[Request], step: int, now: float) -> None:
        """Note, and clear, who is carried from this step on, rather than listed; see `end_carried`."""
        for request in joined:
            self._turn(request, "decode", step, now).carried_since = len(self._ends.ends)
        joined.clear()

    def land(self, request: Request, num_pages: int, held_since: int) -> None:
        """Note that a request is carried no longer, who has so many pages, since that step if it took any meanwhile.

        If it is finished, it leaves with the step that is being taken, and the time of its last token is noted then.
        """
        if (live := self._live.get(request.request_id)) is None or live.carried_since is None:
            return
        if self.detail:
            # Pages held before the last was taken are full: none of their slots is held in vain.
            live.hold(held_since, num_pages, request.num_computed_tokens)
        if request.finish_reason is None:
            self._note_carried(live)
            live.carried_since = None

    def _note_ends(self, start: float, ends: list[float]) -> None:
        """Note when steps ended in which somebody is carried; and, lest this grows, whose tokens came with them."""
        if len(self._ends.ends) >= KEPT:
            for live in self._live.values():
                if live.carried_since is not None:
                    self._note_carried(live)
                    live.carried_since = 0
            self._ends.clear()
        self._ends.add(start, ends)

    def _note_carried(self, live: Life) -> None:
        if live.carried_since is not None and live.carried_since < len(self._ends.ends):
            live.made.add(*self._ends.since(live.carried_since))

    def end(self, step: SchedulerOutput, now: float, elapsed_s: float, host_s: float, left: list[Request]) -> None:
        """Record the step begun at `now`, after its update; the requests in `left` gave up their seats in it."""
        end_s = now + (elapsed_s + host_s)  # rounded as the engine's clock is
        if sampled := step.decoders.num_requests:
            self._note_ends(now, [end_s])
        for request, _, _, samples, _ in step.grants:
            if samples:
                sampled += self._note_tokens(request, self._live[request.request_id].made, end_s)
            if request.status is HELD:
                self._turn(request, "held", step.step + 1, end_s)
        for child in step.forked:
            if child.parent is not None and child.output_token_ids:  # its prompt was computed by the parent
                began, made = self._live[child.parent.request_id].admitted_s, TokenTimes([] if self.detail else None)
                self._live[child.request_id] = Life(began, made)
                sampled += self._note_tokens(child, made, end_s)
        self._end_s = end_s
        stretch = Stretch(now, [elapsed_s], [end_s], [self._num_live_pages])
        self._steps.add(step.step, stretch, host_s, self._counts, sampled, len(left))
        if left:
            self.leave(left, step.step + 1, end_s)

    def end_alike(
        self, step: SchedulerOutput, stretch: Stretch, taken: Iterable[tuple[int, Request, int]], left: list[Request]
    ) -> None:
        """Record a begun step and those after it that decode the same requests, after their update.

        Parameters
        ----------
        step : SchedulerOutput
            The first of them.
        stretch : Stretch
        taken : iterable of (step, request, pages)
            How many pages a request has from one of the steps on: number of the step from 0 on.
        left : list of Request
            Those that gave up their seats in the last of them.
        """
        ends, num_steps, decoded = stretch.ends, len(stretch.ends), 0
        last = step.step + num_steps
        self._end_s = ends[-1]
        longest = max((b - a for a, b in pairwise(ends)), default=0.0)
        for request, start, _, samples, _ in step.grants:
            live = self._live[request.request_id]
            if samples:
                decoded += 1
                live.made.add(ends, longest)
                live.stored = max(live.stored, start + num_steps)
            if request.status is HELD:
                self._turn(request, "held", last, ends[-1])
        if self.detail:
            for nth, request, pages in taken:
                self._live[request.request_id].hold(step.step + nth, pages, 0)
        self._steps.add(step.step, stretch, 0.0, self._counts, decoded, len(left), growth=decoded)
        self.leave(left, last, ends[-1])

    def end_carried(
        self, first: int, stretch: Stretch, counts: tuple[int, int, int, bool], left: list[Request]
    ) -> None:
        """Record steps from number `first` on in which all who run are carried, after their update.

        `counts` are those of `StepRows.add_carried`.
        """
        ends = stretch.ends
        self._end_s = ends[-1]
        self._note_ends(stretch.start, ends)
        self._steps.add_carried(first, stretch, counts, len(left))
        if left:
            self.leave(left, first + len(ends), ends[-1])

    def reject(self, request: Request) -> None:
        """Record a request that could never run."""
        self._requests.add(request, NAN, TokenTimes(None))
        if self.detail:
            self._token_s[request.request_id], self._token_ids[request.request_id] = [], []

    def leave(self, requests: list[Request], step: int, now: float) -> None:
        """Record requests that left at `now`, before step number `step`."""
        in_batch = self.release == "batch"
        for request in requests:
            name = request.request_id
            live = self._live.pop(name, None) or Life(NAN, TokenTimes([] if self.detail else None))
            made = live.made
            if live.carried_since is None:
                self._note_tokens(request, made, now)
            else:
                self._note_carried(live)
            self._requests.add(request, live.admitted_s, made, now if in_batch else None)
            if made.each is not None:
                self._token_s[name] = [now] * made.count if in_batch else made.each
                self._token_ids[name] = request.output_token_ids
                self._unused.add(live.holds, live.stored, step)
                self._segments.add(request, live, step, now)

    def result(self) -> Result:
        """Return what has been recorded so far."""
        steps = self._steps.frame()
        if self.detail:
            steps["internal_slots"] = self._unused.of(steps.step.to_numpy())
        return Result(
            requests=self._requests.frame(),
            steps=steps,
            segments=self._segments.frame(),
            token_s=dict(self._token_s),
            token_ids=dict(self._token_ids),
            num_pages=self.num_pages,
            page_size=self.page_size,
            end_s=self._end_s,
            detail=self.detail,
        )

    def _note_tokens(self, request: Request, made: TokenTimes, now: float) -> int:
        """Note `now` for the tokens made since the last call (several if a step was interrupted); return how many."""
        new = len(request.output_token_ids) - made.count
        if new:
            made.add([now] * new, 0.0)
        return new

    def _turn(self, request: Request, kind: str, step: int, now: float) -> Life:
        """End the segment a request is in, unless it goes on with the same kind of work, and begin the next."""
        live = self._live.get(request.request_id)
        if live is None:
            made = TokenTimes([] if self.detail else None)
            live = self._live[request.request_id] = Life(now, made, kind, request.seat, step, now)
            return live
        if live.kind == kind and live.seat == request.seat:
            return live
        if self.detail:
            self._segments.add(request, live, step, now)
        live.kind, live.seat, live.start_step, live.start_s = kind, request.seat, step, now
        return live
