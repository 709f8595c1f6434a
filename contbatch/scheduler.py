"""The scheduler: before every step, who computes how many tokens; after it, who leaves.

There is no prefill phase and no decode phase. A request has `num_tokens` known tokens, `num_computed_tokens` of which
have their keys and values in pages; every step lets the second catch up with the first, and whoever has caught up
gets one more token. A prompt, a chunk of one, a decode and the recomputation after a preemption are the same thing.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from heapq import heappush
from itertools import count
from typing import Literal

from contbatch.checks import require_counts
from contbatch.contiguous import make_pool
from contbatch.errors import InvalidRequestError, PolicyError, SchedulerError, StalledError
from contbatch.logprob import Logprobs
from contbatch.planner import Planner
from contbatch.policies import Policy
from contbatch.policies.answers import rank_of, reserve_of
from contbatch.prefix_cache import PrefixCache
from contbatch.queue import WaitingQueue
from contbatch.request import Request, RequestStatus
from contbatch.step import SchedulerOutput

WAITING, RUNNING, PREEMPTED, HELD, FINISHED = RequestStatus


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
    ) -> None:
        require_counts(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        require_counts(max_model_len=1 if max_model_len is None else max_model_len)
        if not isinstance(policy, Policy):
            raise PolicyError(f"policy must be an instance of Policy, got {policy!r}")
        self.policy = copy.deepcopy(policy)
        self.pool = make_pool(layout, num_pages, page_size, shared=prefix_cache)
        self.prefix_cache = PrefixCache(self.pool, prefix_cache)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.requests: dict[int | str, Request] = {}  # all live ones
        self.free_seats = list(range(max_num_seqs))  # a heap: the lowest is taken first
        self._released: list[Request] = []
        self._orders = count()
        self.num_steps = 0  # updated so far
        self._open_step: SchedulerOutput | None = None

    # ---- requests come and go ------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Raise `InvalidRequestError` for a request that could never run here: it must not block those behind it."""
        if request.request_id in self.requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use by a live request")
        if request.order >= 0 or request.is_finished:
            raise InvalidRequestError(f"{request!r} has been added or rejected before; make a new Request")
        prompt, output = request.num_prompt_tokens, request.sampling.max_tokens
        what = f"request {request.request_id!r}: {prompt} prompt + {output} output tokens"
        if self.max_model_len is not None and prompt + output > self.max_model_len:
            raise InvalidRequestError(f"{what} = {prompt + output} exceed max_model_len {self.max_model_len}")
        need = self.pool.pages_for(max(request.max_kv_tokens, reserve_of(self.policy, request)))
        if need > self.pool.num_pages:
            have = f"the pool has {self.pool.num_pages}: it can never run"
            raise InvalidRequestError(f"{what} need {need} pages of {self.pool.page_size} tokens, {have}")

    def add(self, request: Request) -> None:
        """Queue a request; `InvalidRequestError` if it can never run."""
        self.validate(request)
        request.order = next(self._orders)
        request.rank = rank_of(self.policy, request)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort(self, request_id: int | str) -> None:
        """End a live request in whatever state it is and free what it holds; unknown ids are ignored."""
        if request_id in self.requests:
            self._fail(self.requests[request_id], "abort", None)
            self._settle()

    @property
    def has_requests(self) -> bool:
        """Whether any request is live."""
        return bool(self.requests)

    def drain_released(self) -> list[Request]:
        """Return the requests that left since the last call, each exactly once."""
        released, self._released = self._released, []
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
        self._open_step = None
        step = SchedulerOutput(self.num_steps)
        try:
            Planner(self, step).run(now)
        finally:  # whatever a policy raises, those admitted or preempted so far have changed sides
            self._move(step)
        if self.requests and all(grant.padding for grant in step.grants):
            raise StalledError(
                f"{self.policy!r} planned nothing of use while {len(self.waiting)} requests wait and "
                f"{len(self.running)} run ({self.pool.num_available} of {self.pool.num_pages} pages free)"
            )
        self._open_step = step
        return step

    def vacate(self, request: Request) -> None:
        """Take seat and pages from a request that has them."""
        if request.seat is not None:
            self.pool.give_back(request.pages)
            heappush(self.free_seats, request.seat)
        request.pages, request.seat = [], None

    def _move(self, step: SchedulerOutput) -> None:
        if step.admitted:
            self.waiting.remove(step.admitted)
            self.running += step.admitted
        if step.preempted:
            self.running = [r for r in self.running if r.status is not PREEMPTED]
            for request in step.preempted:
                self.waiting.add(request)

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
        errors, scores = errors or {}, scores or {}
        if step is not self._open_step:
            raise SchedulerError(f"step {step.step} was updated before, or planned anew since")
        step.require_results(tokens, errors)
        self._open_step = None
        self.num_steps += 1
        try:
            for request, start, num_tokens, samples, _ in step.grants:
                if request.status is not RUNNING:  # aborted while the step ran, or padding
                    continue
                request.num_computed_tokens = start + num_tokens
                request.scores += scores.get(request.request_id, ())
                if request.request_id in errors:
                    self._fail(request, "error", errors[request.request_id])
                elif samples:
                    self._append(request, tokens[request.request_id], on_token)
        finally:  # on_token may have been interrupted
            self.prefix_cache.publish_step(step.grants)
            self._settle()
        return self.drain_released()

    def _append(self, request: Request, token: int, on_token: Callable[[Request], bool] | None) -> None:
        request.take(token)
        if on_token is None:
            return
        try:  # a user's callback: it may raise or be interrupted, abort this request or others
            if on_token(request) and request.status is RUNNING:
                request.finish_reason = "stop"
        except Exception as error:
            if request.status is RUNNING:
                self._fail(request, "error", error)

    def _settle(self) -> None:
        """Let the finished leave, if the policy lets them."""
        ended = [r for r in self.running if r.finish_reason is not None]
        if not ended:
            return
        if self.policy.may_leave(tuple(self.running)):
            for request in ended:
                self._leave(request)
            self.running = [r for r in self.running if r.status is not FINISHED]
        else:
            for request in ended:
                request.status = HELD

    def _leave(self, request: Request) -> None:
        self.prefix_cache.leave(request)
        self.vacate(request)
        request.status = FINISHED
        del self.requests[request.request_id]
        self._released.append(request)

    def _fail(self, request: Request, reason: Literal["abort", "error"], error: Exception | None) -> None:
        """End a request at once, without waiting for its batch."""
        if request.seat is None:
            self.waiting.remove([request])
        else:
            self.running.remove(request)
        request.finish_reason, request.error = reason, error
        self._leave(request)
