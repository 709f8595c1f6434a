"""Requests that decode, carried from step to step without being looked at: only what becomes of them has a date.

    pages            A takes one in steps 17, 33, 49 …, B in 20, 36 …: with pages of 16 tokens, sixteen counters will do
    ends             a heap: who may end before which step
    sums of all      context + 1 for each of them in each step, pages + 1 for each taken

So a step costs what arrives and ends in it, not what goes on. Tokens are caught up with when a request ends, or when
somebody has to look at it; until then its pages are counted only (`PagePool.num_promised`).
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, cycle, islice
from typing import TYPE_CHECKING

from contbatch.request import Request, RequestStatus
from contbatch.step import DecodeSums

if TYPE_CHECKING:
    from contbatch.scheduler import Scheduler

RUNNING = RequestStatus.RUNNING


@dataclass(slots=True, eq=False)
class _Decoder:
    request: Request
    since: int
    """Step up to which its tokens are known."""
    bucket: int
    """Steps, modulo the page size, in which it takes a page; -1 if it needs none before it may end."""


class Decoders:
    """The first of a scheduler's running requests, as long as they decode; its `running` are the others.

    Parameters
    ----------
    scheduler : Scheduler
    next_token : callable
        Returns the next token of a request: the same for as many steps as `num_steps_alike` says.
    num_steps_alike : callable
        Counts a request's tokens up to one that may be its last.

    Notes
    -----
    A step takes the pages of its decoders before it plans the others, with what is left of the token budget. That comes
    to the same for policies that promise it (`Policy.decodes`), if pages and budget suffice: see `make_ready`.
    """

    def __init__(
        self, scheduler: "Scheduler", next_token: Callable[[Request], int], num_steps_alike: Callable[[Request], int]
    ) -> None:
        self.scheduler, self.next_token, self.num_steps_alike = scheduler, next_token, num_steps_alike
        self.on_land: Callable[[Request, int, int], object] = lambda *_: None
        """Called with a request whose tokens are known again, its number of pages, and the step in which it took the
        last of them, 0 if it took none."""
        self.joined: list[Request] = []
        """Those carried from the next step on."""
        self.carried: dict[Request, _Decoder] = {}  # in order of running
        self._ends: list[tuple[int, int, _Decoder]] = []  # a heap: before which step, place, who
        self._num_takes = [0] * scheduler.pool.page_size
        """By step modulo the page size: who takes a page."""
        self._num_joined = 0
        self.context = 0
        """Positions that they read in the next step."""
        self._ready_until = 0
        """Step before which they have the pages for all steps."""
        self._is_due = False
        """Whether somebody has to be looked at before the next step."""

    def __len__(self) -> int:
        return len(self.carried)

    @property
    def next_end(self) -> int:
        """Step before which the next of them may end."""
        return self._ends[0][0]

    # ---- who is carried ------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Take over those at the head of the running who decode; nobody, if others do so behind them."""
        if self._is_due or self._ready_until > self.scheduler.num_steps:  # of a step that came to nothing
            self.release()
        if not (running := self.scheduler.running):
            return
        num = 0
        for request in running:
            if not self._join(request):
                break
            num += 1
        del running[:num]
        if running and any(_decodes(request) for request in running):
            self.release()

    def _join(self, request: Request) -> bool:
        """Carry a request from now on, if it decodes and is like most."""
        if request.children or request.parent is not None or not _decodes(request):
            return False
        scheduler, size, computed = self.scheduler, self.scheduler.pool.page_size, request.num_computed_tokens
        steps, room = self.num_steps_alike(request), len(request.pages) * size - computed
        if len(self.carried) + 1 >= scheduler.max_num_batched_tokens or size <= room < steps:
            return False
        now, bucket = scheduler.num_steps, -1
        if room < steps:
            bucket = (now + room) % size
            self._num_takes[bucket] += 1
        decoder = self.carried[request] = _Decoder(request, now, bucket)
        self._num_joined += 1
        heappush(self._ends, (now + steps, self._num_joined, decoder))
        self.context += computed + 1
        self.joined.append(request)
        return True

    def make_ready(self) -> None:
        """Release everybody if the next step may have too few pages or tokens, so that it is planned in full."""
        if not self.carried:
            return
        scheduler, pool, now = self.scheduler, self.scheduler.pool, self.scheduler.num_steps
        if self._is_due or self._ready_until > now:
            self.release()
        pages, tokens = self._num_takes[now % pool.page_size], 0
        for request in scheduler.running:
            pages += max(0, pool.pages_for(request.num_tokens) - len(request.pages))
            tokens += request.num_uncomputed_tokens
        if pages > pool.num_available:
            self.release()
        elif scheduler.policy.decodes != "first":  # then others come before them, and must leave enough of the budget
            room = scheduler.max_num_batched_tokens - len(self.carried) - tokens
            for request in islice(scheduler.waiting.requests, len(scheduler.free_seats)):
                room -= request.num_uncomputed_tokens
                if room <= 0:
                    break
            if room <= 0:
                self.release()

    def release(self) -> None:
        """Put everybody back among the running."""
        pool = self.scheduler.pool
        for decoder in self.carried.values():
            request, missing = decoder.request, self._catch_up(decoder)
            pool.num_promised -= missing
            request.pages += pool.take(missing)
            num_pages = len(request.pages)
            self.on_land(request, num_pages, self._last_take(request, num_pages) if missing else 0)
        self.scheduler.running[:0] = self.carried
        self.carried.clear()
        self._ends.clear()
        self.joined.clear()
        self._num_takes = [0] * pool.page_size
        self.context = self._ready_until = 0
        self._is_due = False

    # ---- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> DecodeSums:
        """Take the pages that they need in the next step; return what it computes for them."""
        pool, now = self.scheduler.pool, self.scheduler.num_steps
        pool.num_promised += self._num_takes[now % pool.page_size]
        self._ready_until = now + 1
        return DecodeSums(len(self.carried), self.context)

    def take_pages(self, num_steps: int) -> list[int]:
        """Take, that is count, the pages that they need in the next steps, up to the first that does not find all free.

        Nobody ends in these steps but the last. Returns the live pages after each of them.
        """
        pool, now = self.scheduler.pool, self.scheduler.num_steps
        place, before = now % pool.page_size, pool.num_pages - pool.num_available
        takes = islice(cycle(self._num_takes), place, place + num_steps)
        live = list(accumulate(takes, initial=before))
        if live[-1] > pool.num_pages:
            del live[bisect_right(live, pool.num_pages) :]
        pool.num_promised += live[-1] - before
        self._ready_until = now + len(live) - 1
        return live[1:]

    def advance(self, num_steps: int) -> None:
        """Count steps taken, in the last of which somebody may end: they are put back, at the head of the running."""
        self.context += num_steps * len(self.carried)
        num_ended, now, ends = 0, self.scheduler.num_steps, self._ends
        while ends and ends[0][0] <= now:
            decoder = heappop(ends)[-1]
            missing = self._catch_up(decoder)
            if decoder.request.finish_reason is not None:
                self._leave(decoder, missing, num_ended)
                num_ended += 1
            else:  # a stop token that does not count yet
                self._is_due = True

    def _leave(self, decoder: _Decoder, missing: int, place: int) -> None:
        """Put a finished request back; pages that were only counted it need not take any more."""
        request, scheduler = decoder.request, self.scheduler
        num_pages = len(request.pages) + missing
        last_take = self._last_take(request, num_pages) if missing else 0
        self.on_land(request, num_pages, last_take)  # first: it may be interrupted
        del self.carried[request]
        scheduler.running.insert(place, request)
        scheduler.pool.num_promised -= missing
        self.context -= request.num_computed_tokens + 1
        if decoder.bucket >= 0:
            self._num_takes[decoder.bucket] -= 1

    def _catch_up(self, decoder: _Decoder) -> int:
        """Have a request make the tokens that it has made by now; return how many pages were counted for it."""
        request, now = decoder.request, self.scheduler.num_steps
        if made := now - decoder.since:
            if made > 1:
                request.output_token_ids += [self.next_token(request)] * (made - 1)
            request.take(self.next_token(request))
            request.num_computed_tokens += made
            decoder.since = now
        if decoder.bucket < 0:
            return 0
        computed = request.num_computed_tokens + max(0, self._ready_until - now)  # of a step that came to nothing
        return max(0, -(-computed // self.scheduler.pool.page_size) - len(request.pages))

    def _last_take(self, request: Request, num_pages: int) -> int:
        """Return the step in which a request took the last of its pages."""
        return self.scheduler.num_steps - request.num_computed_tokens + (num_pages - 1) * self.scheduler.pool.page_size


def _decodes(request: Request) -> bool:
    """Whether a request has but its last token to compute."""
    made = len(request.output_token_ids)
    left = request.num_prompt_tokens + made - request.num_computed_tokens
    return left == 1 and made > 0 and request.status is RUNNING
