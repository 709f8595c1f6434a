"""Requests that decode, carried from step to step without being looked at: only what becomes of them has a date.

    step             17    18    19    20    21    22    23         page_size 4
    takes a page      A           B           A                     a calendar: A again at 25, B at 23
    ends                                            B               a heap
    sums of all      context + 2 each step, pages + 1 for each taken

So a step costs what arrives, ends and takes pages in it, not what goes on. Their tokens are caught up with when they end,
or when somebody has to look at them.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING

from contbatch.request import Request, RequestStatus
from contbatch.step import DecodeSums

if TYPE_CHECKING:
    from contbatch.scheduler import Scheduler

RUNNING = RequestStatus.RUNNING


@dataclass(slots=True, eq=False)
class _Decoder:
    request: Request
    number: int
    """Place among the running."""
    since: int
    """Step up to which its tokens are known."""
    page_at: int = 0
    """Step in which it takes its next page."""
    held_since: int = 0
    """Step in which it took its last page; 0 if it has taken none."""


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
    A step takes the pages of its decoders before it plans the others, with what is left of the token budget. That comes to
    the same for policies that promise it (`Policy.decodes`), if pages and budget suffice; `make_ready` sees to that.
    """

    def __init__(
        self, scheduler: "Scheduler", next_token: Callable[[Request], int], num_steps_alike: Callable[[Request], int]
    ) -> None:
        self.scheduler, self.next_token, self.num_steps_alike = scheduler, next_token, num_steps_alike
        self.on_land: Callable[[Request, int], object] = lambda _request, _step: None
        """Called with a request whose tokens are known again, and the step in which it took its last page, if any."""
        self.joined: list[Request] = []
        """Those carried from the next step on."""
        self._decoders: dict[Request, _Decoder] = {}  # in order of running
        self._ends: list[tuple[int, int, _Decoder]] = []  # a heap: before which step, place, who
        self._takes = defaultdict[int, list[_Decoder]](list)
        self._num_joined = self._context = self._num_pages = 0

    def __len__(self) -> int:
        return len(self._decoders)

    @property
    def sums(self) -> DecodeSums:
        """What the next step computes for them."""
        return DecodeSums(len(self._decoders), self._context, self._num_pages)

    @property
    def next_end(self) -> int:
        """Step before which the next of them may end."""
        return self._ends[0][0]

    def num_takes(self, num_steps: int) -> list[int]:
        """Count the pages that they take in each of the next steps, if nobody ends."""
        first, size, takes = self.scheduler.num_steps, self.scheduler.pool.page_size, self._takes
        counts = [len(takes[step]) if step in takes else 0 for step in range(first, first + num_steps)]
        for nth in range(size, num_steps):  # whoever takes one takes the next when it is full
            counts[nth] += counts[nth - size]
        return counts

    # ---- who is carried ------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Take over those at the head of the running who decode, but some if others do so behind them."""
        running, num = self.scheduler.running, 0
        if not running:
            return
        for request in running:
            if not self._may_join(request):
                break
            num += 1
            self._begin(_Decoder(request, self._num_joined, self.scheduler.num_steps))
            self._num_joined += 1
            self.joined.append(request)
        del running[:num]
        if any(_decodes(request) for request in running):
            self.release()

    def _may_join(self, request: Request) -> bool:
        alone = not request.children and request.parent is None
        return alone and _decodes(request) and len(self) + 1 < self.scheduler.max_num_batched_tokens

    def _begin(self, decoder: _Decoder) -> None:
        request, pool = decoder.request, self.scheduler.pool
        self._decoders[request] = decoder
        heappush(self._ends, (decoder.since + self.num_steps_alike(request), decoder.number, decoder))
        decoder.page_at = decoder.since + len(request.pages) * pool.page_size - request.num_computed_tokens
        self._takes[decoder.page_at].append(decoder)
        self._context += request.num_computed_tokens + 1
        self._num_pages += len(request.pages)

    def make_ready(self) -> None:
        """Release everybody if the next step may have too few pages or tokens, so that it is planned in full."""
        scheduler = self.scheduler
        (pages,), tokens = self.num_takes(1), 0
        for request in scheduler.running:
            pages += max(0, scheduler.pool.pages_for(request.num_tokens) - len(request.pages))
            tokens += request.num_uncomputed_tokens
        if pages > scheduler.pool.num_available:
            self.release()
        elif scheduler.policy.decodes != "first":  # then others come before them, and must leave enough of the budget
            room = scheduler.max_num_batched_tokens - len(self) - tokens
            for request in islice(scheduler.waiting, len(scheduler.free_seats)):
                room -= request.num_uncomputed_tokens
                if room <= 0:
                    break
            if room <= 0:
                self.release()

    def release(self) -> None:
        """Put everybody back among the running."""
        for decoder in self._decoders.values():
            self._catch_up(decoder)
            self.on_land(decoder.request, decoder.held_since)
        self.scheduler.running[:0] = self._decoders
        self._decoders.clear()
        self._ends.clear()
        self._takes.clear()
        self.joined.clear()
        self._context = self._num_pages = 0

    # ---- steps ---------------------------------------------------------------------------------------------------

    def take_pages(self, num_steps: int) -> None:
        """Take the pages that they need in the next steps."""
        first, pool, takes = self.scheduler.num_steps, self.scheduler.pool, self._takes
        for step in range(first, first + num_steps):
            if takers := takes.get(step):
                for decoder, page in zip(takers, pool.take(len(takers)), strict=True):
                    decoder.request.pages.append(page)
                    decoder.held_since, decoder.page_at = step, step + pool.page_size
                self._num_pages += len(takers)
                takes[step + pool.page_size] += takers
            takes.pop(step, None)

    def advance(self, num_steps: int) -> None:
        """Count steps taken, in the last of which somebody may end: they are put back, at the head of the running."""
        now = self.scheduler.num_steps
        self._context += num_steps * len(self)
        ended = []
        while self._ends and self.next_end <= now:
            *_, decoder = heappop(self._ends)
            self._catch_up(decoder)
            if decoder.request.is_finished:
                self._leave(decoder)
                ended.append(decoder.request)
            else:  # a stop token that does not count yet
                heappush(self._ends, (now + self.num_steps_alike(decoder.request), decoder.number, decoder))
        self.scheduler.running[:0] = ended

    def _catch_up(self, decoder: _Decoder) -> None:
        """Have a request make the tokens that it has made by now."""
        request, made = decoder.request, self.scheduler.num_steps - decoder.since
        if made:
            token = self.next_token(request)
            request.output_token_ids += [token] * (made - 1)
            request.take(self.next_token(request))
            request.num_computed_tokens += made
            decoder.since += made

    def _leave(self, decoder: _Decoder) -> None:
        request = decoder.request
        del self._decoders[request]
        self._takes[decoder.page_at].remove(decoder)
        self._context -= request.num_computed_tokens + 1
        self._num_pages -= len(request.pages)
        self.on_land(request, decoder.held_since)


def _decodes(request: Request) -> bool:
    """Whether a request has but its last token to compute."""
    computed = request.num_computed_tokens
    return request.status is RUNNING and request.num_prompt_tokens <= computed == request.num_tokens - 1
