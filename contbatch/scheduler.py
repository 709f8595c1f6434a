"""The scheduler: before every step, who computes how many tokens; after it, who leaves.

There is no prefill phase and no decode phase. A request has `num_tokens` known tokens, `num_computed_tokens` of which
have their keys and values in pages; every step lets the second catch up with the first, and whoever has caught up
gets one more token. A prompt, a chunk of one, a decode and the recomputation after a preemption are the same thing.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappush
from typing import Literal

from contbatch.checks import is_key, require, require_counts
from contbatch.contiguous import make_pool
from contbatch.decoders import Decoders
from contbatch.errors import SchedulerError, StalledError
from contbatch.intake import Intake
from contbatch.logprob import Logprobs
from contbatch.lost_step import abandon
from contbatch.planner import Planner
from contbatch.policies import Policy
from contbatch.policies.answers import checked, rank_of
from contbatch.prefix_cache import PrefixCache
from contbatch.queue import WaitingQueue
from contbatch.request import Request, RequestStatus
from contbatch.runnable import require_fitting, require_forkable, require_unused
from contbatch.samples import live_samples, make_children, unforked
from contbatch.shared_context import find_shared_context
from contbatch.step import Grant, SchedulerOutput
from contbatch.swap_space import SwapSpace

MAX_SEATS = 1_000_000
FORKING, HELD, FINISHED = RequestStatus.FORKING, RequestStatus.HELD, RequestStatus.FINISHED


class Scheduler:
    """Requests in, steps out; pure Python over integers.

    Parameters
    ----------
    policy : Policy
        Deep-copied, so that one policy object can serve many runs.
    num_pages, page_size : int
        The page pool: pages, and tokens in each.
    layout : {"paged", "contiguous"}
        Whether a request's pages lie anywhere, or side by side in a run that is taken at admission (`ContiguousPool`).
    max_num_seqs, max_num_batched_tokens : int
        Seats, the most requests that run at a time; and the token budget of a step.
    max_model_len : int, optional
        Most tokens (prompt + output) of a request; unlimited if None.
    prefix_cache : bool
        Whether requests share the pages of a common prefix, also with those that have left.
    num_host_pages : int
        Pages in host memory to which those of preempted requests go while there is room; they are computed again else.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        num_pages: int,
        page_size: int = 16,
        layout: str = "paged",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        prefix_cache: bool = False,
        num_host_pages: int = 0,
    ) -> None:
        seats, budget = require_counts(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        require(seats <= MAX_SEATS, "max_num_seqs", seats, f"at most {MAX_SEATS}")
        [most] = require_counts(max_model_len=1 if max_model_len is None else max_model_len)
        self.policy = checked(policy)
        self.pool = make_pool(layout, num_pages, page_size, shared=prefix_cache)
        self.prefix_cache = PrefixCache(self.pool, prefix_cache)
        self.swap_space = SwapSpace(num_host_pages)
        self.max_num_seqs, self.max_num_batched_tokens = seats, budget
        self.max_model_len, self.waiting, self.running = max_model_len and most, WaitingQueue(), list[Request]()
        self.requests: dict[int | str, Request] = {}  # all live ones
        self.free_seats = list(range(seats))  # a heap: the lowest is taken first
        self.decoders: Decoders | None = None  # a simulation's, who run besides `running`
        self.released: list[Request] = []  # who left since `drain_released`
        self._num_added = self.num_steps = 0  # steps: those updated so far
        self._open_step: SchedulerOutput | None = None

    def __repr__(self) -> str:
        pages = f"{len(self.waiting)} waiting, {self.pool.num_available} of {self.pool.num_pages} pages free"
        return f"<Scheduler {self.policy!r}: {len(self.running)} running, {pages}>"

    # ---- requests come and go ------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Raise `InvalidRequestError` for a request that could never run here: it must not block those behind it."""
        require_unused(request, self)
        require_fitting(request, self)

    def add(self, request: Request, *, fits: bool = False) -> None:
        """Queue a request; `InvalidRequestError` if it can never run. That it `fits` is known if `validate` said so."""
        require_unused(request, self)
        if not fits:
            require_fitting(request, self)
        request.order = self._num_added
        self._num_added += request.sampling.num_samples
        request.rank = rank_of(self.policy, request)
        request.children = make_children(request)
        for sample in request.samples:
            self.requests[sample.request_id] = sample
        self.waiting.add(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Queue a request whose known tokens but the last are a live parent's, to begin from the parent's pages.

        A page that both go on writing is copied. The child of a parent that runs no more computes its tokens itself.
        """
        require_forkable(parent, child, self)
        self.add(child)
        if self.decoders:
            self.decoders.release()
        self.decoders = None  # for the child looks at its parent
        child.parent, child.num_forked_tokens = parent, child.num_tokens - 1

    def abort(self, request_id: int | str) -> None:
        """End a live request in whatever state it is, and its further samples; unknown ids are ignored."""
        if self.decoders:
            self.decoders.release()
        for request in live_samples(request_id, self.requests) if is_key(request_id) else ():
            if request.status is not FINISHED:  # with its parent
                self.fail(request, "abort", None)
        self._settle()

    @property
    def has_requests(self) -> bool:
        """Whether any request is live."""
        return bool(self.requests)

    def drain_released(self) -> list[Request]:
        """Return the requests that left since the last call, each exactly once."""
        released, self.released = self.released, []
        return released

    # ---- before a step -------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Plan the step that starts at `now` (seconds); calling it again without `update` plans the step anew.

        Raises
        ------
        PolicyError
            The plan names a foreign request, one request twice, or an impossible number of tokens.
        StalledError
            Requests are live but the plan computes nothing, or only padding.
        """
        if self._open_step is not None:
            abandon(self._open_step, self)
        if self.decoders is not None:
            self.decoders.make_ready()
        step = self._open_step = SchedulerOutput(self.num_steps)
        Planner(self, step).run(now)
        step.shared_context = find_shared_context(step.grants, self.pool)
        if not step.decoders.num_requests and self.requests and all(grant.padding for grant in step.grants):
            raise StalledError(f"the policy planned nothing of use: {self!r}")
        return step

    def vacate(self, request: Request) -> None:
        """Take seat and pages from a request that has them."""
        if request.seat is not None:
            self.pool.give_back(request.pages)
            heappush(self.free_seats, request.seat)
        request.pages, request.seat = [], None

    # ---- after a step --------------------------------------------------------------------------------------------

    def update(
        self,
        step: SchedulerOutput,
        tokens: Mapping[int | str, int],
        errors: Mapping[int | str, Exception] | None = None,
        on_token: Callable[[Request], bool] | None = None,
        scores: Mapping[int | str, Sequence[Logprobs]] | None = None,
    ) -> list[Request]:
        """Take in what a step computed; return those who left their seats.

        Parameters
        ----------
        step : SchedulerOutput
            The latest from `schedule`, computed by a runner.
        tokens, errors : mapping from request id
            The new token, or what went wrong, of every request whose grant samples. An error ends that request alone.
        on_token : callable, optional
            Called with a request after each of its new tokens; True ends it (a stop string), an exception fails it.
        scores : mapping from request id, optional
            Log-probabilities of the tokens that this step found out about, of those who want them.

        Raises
        ------
        SchedulerError
            The step is not the latest, was updated before, or a token is missing. Nothing has changed then.
        """
        if step is not self._open_step:
            raise SchedulerError(f"step {step.step} was updated before, or planned anew since")
        intake = Intake(self, step, tokens, errors or {}, scores or {}, on_token)
        self._open_step, self.num_steps = None, self.num_steps + 1
        try:
            intake.run()
        finally:  # on_token may have been interrupted
            self.prefix_cache.publish_step(step.grants)
            self._settle(1)
        return self.drain_released()

    def skip(self, grants: Sequence[Grant], num_steps: int) -> list[Request]:
        """Count decode steps that the requests have taken already, with the last one's grants; return who left then."""
        self.num_steps += num_steps
        if grants:
            self.prefix_cache.publish_step(grants)
        self._settle(num_steps)
        return self.drain_released()

    def _settle(self, num_steps: int = 0) -> None:
        """Move those carried on, and let the finished leave, if the policy lets them."""
        if self.decoders is not None:
            self.decoders.advance(num_steps)
        ended = [r for r in self.running if r.finish_reason is not None] if self.running else []
        if ended and self.policy.may_leave(tuple(self.running)):
            for request in ended:
                self.leave(request)
            self.running = [r for r in self.running if r.status is not FINISHED]
        else:
            for request in ended:
                request.status = HELD

    def leave(self, request: Request) -> None:
        """Take a request out of those that live; its place among the running or waiting is the caller's to clear."""
        step = self._open_step
        if self.prefix_cache.enabled and request.seat is not None and not (step and request in step.moved):
            self.prefix_cache.leave(request)
        self.vacate(request)
        if request.host_pages:
            self.swap_space.give_back(request.host_pages)
        request.status = FINISHED
        self.released.append(self.requests.pop(request.request_id))

    def fail(self, request: Request, reason: Literal["abort", "error"], error: Exception | None) -> None:
        """End a request at once, without waiting for its batch, and the children that have no token yet."""
        for child in unforked(request):
            self.fail(child, reason, error)
        if request.seat is not None:
            self.running.remove(request)
        elif request.status is not FORKING:
            self.waiting.remove([request])
        request.finish_reason, request.error = reason, error
        self.leave(request)
