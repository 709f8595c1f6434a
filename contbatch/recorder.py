"""Collects what happens while an engine runs."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pandas as pd

from contbatch.metrics import REQUEST_COLUMNS, SEGMENT_COLUMNS, STEP_COLUMNS, Result, request_row
from contbatch.request import Request, RequestStatus
from contbatch.scheduler import Scheduler
from contbatch.step import Grant, SchedulerOutput
from contbatch.step_shape import StepShape

PREEMPTED, SWAPPED, HELD = RequestStatus.PREEMPTED, RequestStatus.SWAPPED, RequestStatus.HELD


def _kind(grant: Grant) -> str:
    if grant.padding:
        return "held"
    return "decode" if grant.samples and grant.num_tokens == 1 and grant.request.output_token_ids else "prefill"


@dataclass(slots=True)
class _Live:
    """What is known of a request since it was first granted something."""

    admitted_s: float
    token_s: list[float] = field(default_factory=list)
    """When each output token was made."""
    kind: str = ""
    """Of the segment it is in, "" while it has no seat."""
    seat: int | None = None
    start_step: int = 0
    start_s: float = 0.0
    holds: list[tuple[int, int]] = field(default_factory=list)
    """(step, pages): how many pages it has held since when, since it took its seat."""
    stored: int = 0
    """Most tokens whose K/V it has had in them."""

    def hold(self, step: int, pages: int, stored: int) -> None:
        if not self.holds or self.holds[-1][1] != pages:
            self.holds.append((step, pages))
        self.stored = max(self.stored, stored)


class Recorder:
    """One row per step, per request that left, and per stretch of a seat; an interrupted step leaves no row.

    Parameters
    ----------
    release : "token" or "batch"
        Whether tokens reach clients as they are made, or when the request leaves its seat (see `Policy.release`).
    num_pages, page_size : int
        Of the pool.
    """

    def __init__(self, release: str, num_pages: int, page_size: int) -> None:
        self.release, self.num_pages, self.page_size = release, num_pages, page_size
        self._steps: list[tuple[float, ...]] = []
        self._requests: list[tuple[object, ...]] = []
        self._segments: list[tuple[object, ...]] = []
        self._token_s: dict[int | str, list[float]] = {}
        self._live: dict[int | str, _Live] = {}
        self._counts: tuple[int, ...] = ()
        self._unused: Counter[int] = Counter()
        """By step, how many more slots than in the step before are held and never filled; known when holders leave."""

    def begin(self, step: SchedulerOutput, scheduler: Scheduler, now: float) -> None:
        """Note who sits where while a step that starts at `now` runs."""
        for request in step.preempted:
            self._turn(request, "", step.step, now)
        tokens = {"prefill": 0, "decode": 0, "held": 0}
        for grant in step.grants:
            kind = _kind(grant)
            tokens[kind] += grant.num_tokens
            live = self._turn(grant.request, kind, step.step, now)
            live.hold(step.step, len(grant.request.pages), grant.start + grant.num_tokens)
        running = scheduler.running
        held = sum(r.status is HELD for r in running)
        pool = scheduler.pool
        computed = sum(r.num_computed_tokens for r in running) + step.num_tokens - tokens["held"]
        # Shared pages are full, and are in more page tables than one.
        kv_tokens = computed - pool.page_size * (sum(len(r.pages) for r in running) - pool.num_live)
        self._counts = (len(running), held, len(scheduler.waiting), len(step.grants), step.num_tokens, *tokens.values())
        self._counts += (len(step.admitted), len(step.preempted), step.num_cached_tokens, pool.num_live, kv_tokens)
        self._counts += (pool.num_cached, step.num_evictions)
        self._counts += tuple(len(step.pages_moved(kind)) for kind in ("out", "in", "copy"))
        self._counts += (len(step.restarted), *(limit in step.bound for limit in ("seats", "tokens", "pages")))
        self._counts += (pool.page_size * pool.num_free if "fragmentation" in step.bound else 0,)
        self._counts += StepShape.of(step.grants)[-3:]

    def end(self, step: SchedulerOutput, now: float, elapsed_s: float, host_s: float, left: list[Request]) -> None:
        """Record the step begun at `now`, after its update; the requests in `left` gave up their seats in it."""
        end_s = now + (elapsed_s + host_s)  # rounded as the engine's clock is
        sampled = 0
        for request, _, _, samples, _ in step.grants:
            if samples:
                sampled += self._note_tokens(request, end_s)
            if request.status is HELD:
                self._turn(request, "held", step.step + 1, end_s)
        for child in step.forked:
            if child.parent is not None and child.output_token_ids:  # its prompt was computed by the parent
                self._live[child.request_id] = _Live(self._live[child.parent.request_id].admitted_s)
                sampled += self._note_tokens(child, end_s)
        self._steps.append((step.step, now, elapsed_s, host_s, *self._counts, sampled, len(left)))
        self.leave(left, step.step + 1, end_s)

    def reject(self, request: Request) -> None:
        """Record a request that could never run."""
        self._requests.append(request_row(request, float("nan"), [], float("nan")))
        self._token_s[request.request_id] = []

    def leave(self, requests: list[Request], step: int, now: float) -> None:
        """Record requests that left at `now`, before step number `step`."""
        for request in requests:
            self._turn(request, "", step, now)
            self._note_tokens(request, now)
            live = self._live.pop(request.request_id)
            times = [now] * len(live.token_s) if self.release == "batch" else live.token_s
            made = live.token_s[-1] if times else float("nan")
            self._requests.append(request_row(request, live.admitted_s, times, made))
            self._token_s[request.request_id] = times

    def result(self) -> Result:
        """Return what has been recorded so far."""
        steps = pd.DataFrame(self._steps, columns=STEP_COLUMNS[:-1])
        unused = pd.Series(self._unused, dtype=int).sort_index().cumsum()
        steps["internal_slots"] = unused.reindex(steps.step, method="ffill", fill_value=0).to_numpy()
        return Result(
            requests=pd.DataFrame(self._requests, columns=REQUEST_COLUMNS),
            steps=steps,
            segments=pd.DataFrame(self._segments, columns=SEGMENT_COLUMNS),
            token_s=dict(self._token_s),
            num_pages=self.num_pages,
            page_size=self.page_size,
        )

    def _note_tokens(self, request: Request, now: float) -> int:
        """Note `now` for the tokens made since the last call (several if a step was interrupted); return how many."""
        times = self._live[request.request_id].token_s
        new = len(request.output_token_ids) - len(times)
        times += [now] * new
        return new

    def _turn(self, request: Request, kind: str, step: int, now: float) -> _Live:
        """End the segment a request is in, unless it goes on with the same kind of work, and begin the next."""
        name = request.request_id
        live = self._live.get(name)
        if live is None:
            live = self._live[name] = _Live(now if kind else float("nan"))
        if live.kind == kind and live.seat == request.seat:
            return live
        if live.kind and live.start_step < step:  # else of an interrupted step
            preempted = request.status in (PREEMPTED, SWAPPED)
            self._segments.append((name, live.seat, live.kind, live.start_step, step, live.start_s, now, preempted))
        live.kind, live.seat, live.start_step, live.start_s = kind, request.seat, step, now
        if not kind:
            self._settle(live, step)
        return live

    def _settle(self, live: _Live, step: int) -> None:
        """Count the slots that a request has held in vain, now that it gives up its pages before `step`."""
        for (start, pages), (end, _) in pairwise([*live.holds, (step, 0)]):
            unused = max(0, pages * self.page_size - live.stored)
            self._unused[start] += unused
            self._unused[end] -= unused
        live.holds, live.stored = [], 0
