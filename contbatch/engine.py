"""The engine: a loop of schedule, execute, update, and a clock that moves by what a step took."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from contbatch.arriving import Arriving
from contbatch.checks import is_key, require, require_type
from contbatch.decision_log import DecisionLog
from contbatch.engine_run import OnFinish, Run, Watch
from contbatch.errors import DecisionLogError, InvalidRequestError, RunnerError
from contbatch.interrupts import interrupts_held_back
from contbatch.logprob import Logprobs
from contbatch.metrics import Result
from contbatch.recorder import Recorder
from contbatch.request import Request
from contbatch.scheduler import Scheduler
from contbatch.step import SchedulerOutput

if TYPE_CHECKING:
    from contbatch.fast_forward import FastForward


@dataclass(slots=True)
class StepResult:
    """What a runner made of a step."""

    tokens: Mapping[int | str, int]
    """The sampled token by request id, for every grant that samples and everybody forked."""
    elapsed_s: float
    """Seconds the step took: predicted by a simulation, measured by a real runner."""
    errors: Mapping[int | str, Exception] = field(default_factory=dict)
    """What went wrong by request id, in place of a token."""
    scores: Mapping[int | str, Sequence[Logprobs]] = field(default_factory=dict)
    """Log-probabilities by request id: of prompt tokens not scored before, then of the sampled token, where wanted."""


class Runner(Protocol):
    """Turns a scheduled step into tokens."""

    is_virtual: bool
    """True if `elapsed_s` is predicted; the host time of a step then does not count."""

    def validate(self, request: Request) -> None:
        """Raise `InvalidRequestError` for a request that this runner can never compute."""
        ...

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Do the step's page moves in their order, then compute it; raise only if the whole step is lost.

        Who has children in `step.forked` draws a token for each of them too, from the same logits.
        """
        ...


class Engine:
    """Drives one scheduler and one runner over requests that arrive in time.

    The clock `now` (seconds) is the sum of the steps' times; an idle engine jumps to the next arrival. Nothing sleeps.

    Parameters
    ----------
    scheduler : Scheduler
    runner : Runner
    on_token : callable, optional
        Called with a request after each new token; True ends the request (a stop string), an exception fails it.
    log : DecisionLog, optional
        Told every decision, for as long as the engine lives.
    fast_forward : FastForward, optional
        Has `run` skip the planning of steps that can be told beforehand; not together with `on_token`.
    detail : bool
        Whether results keep a row of every step and the time of every token (see `Recorder`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        on_token: Callable[[Request], bool] | None = None,
        log: DecisionLog | None = None,
        fast_forward: "FastForward | None" = None,
        detail: bool = True,
    ) -> None:
        require_type("scheduler", scheduler, Scheduler)
        require(callable(getattr(runner, "execute", None)), "runner", runner, "a Runner")
        require(on_token is None or callable(on_token), "on_token", on_token, "None or callable")
        require(log is None or isinstance(log, DecisionLog), "log", log, "None or a DecisionLog", DecisionLogError)
        self.scheduler, self.runner, self.on_token, self.log = scheduler, runner, on_token, log
        self.fast_forward, self.detail, self.now = fast_forward, detail, 0.0
        self.forget()
        self._arriving, self._is_stepping = Arriving(), False

    def forget(self) -> None:
        """Drop the rows recorded so far."""
        pool, decoders = self.scheduler.pool, self.scheduler.decoders
        if decoders:
            decoders.release()
        self.recorder = Recorder(self.scheduler.policy.release, pool.num_pages, pool.page_size, self.detail)

    def add(self, request: Request, *, listed: bool = False) -> None:
        """Take a request in at its arrival time (or now, if that has passed); those `listed` go first among equals.

        Raises
        ------
        InvalidRequestError
            It can never run here, or its id is in use.
        """
        self.scheduler.validate(request)
        self.runner.validate(request)
        self._arriving.add(request, listed)
        if request.arrival_time <= self.now:
            self._take_arrivals()

    def reject(self, request: Request, error: InvalidRequestError) -> None:
        """End a request that `add` refused, with a row; raise the error if it is in use or was used before."""
        if request.order >= 0 or request.is_finished or request is self._arriving.by_id.get(request.request_id):
            raise error  # its state is not a new run's to change
        request.finish_reason, request.error = "rejected", error
        self.recorder.reject(request)

    def abort(self, request_id: int | str) -> None:
        """End a request in any state; unknown ids are ignored."""
        if is_key(request_id) and (request := self._arriving.by_id.get(request_id)) is not None:
            request_id = request.request_id  # before it arrives a further sample can't end without the others
            self._arriving.remove(request)
            self.scheduler.add(request)
        self.scheduler.abort(request_id)
        if not self._is_stepping:  # else, as in on_token, it leaves with the step
            self._record_left()

    @property
    def has_requests(self) -> bool:
        """Whether any request is live or yet to arrive."""
        return bool(self.scheduler.requests) or bool(self._arriving)

    def step(self) -> list[Request]:
        """Run one step, at the next arrival if nobody is live; return the requests that left.

        An exception of the runner (or an interrupt) leaves the engine as it was before the step: it can go on.
        """
        if not self.has_requests:
            return []
        if not self.scheduler.has_requests:
            self.now = self.next_start()
        self._take_arrivals()
        return self._step_or_leave()

    def _step_or_leave(self) -> list[Request]:
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False
            if self.scheduler.released:  # nobody, unless the step was interrupted
                self._record_left()

    def _step(self) -> list[Request]:
        began, now, scheduler = perf_counter(), self.now, self.scheduler
        step = scheduler.schedule(now)
        self.recorder.begin(step, scheduler, now)
        if self.log is not None:
            self.log.begin(step, scheduler, now)
        elapsed_s = (result := self.runner.execute(step)).elapsed_s
        if not (elapsed_s >= 0 and now + elapsed_s < inf):
            limit = f"must be finite seconds ≥ 0, as must its end, got {elapsed_s!r}"
            raise RunnerError(f"elapsed_s of step {step.step} at {now} s {limit}")
        left = scheduler.update(step, result.tokens, result.errors, self.on_token, result.scores)
        host_s = 0.0 if self.runner.is_virtual else perf_counter() - began - elapsed_s
        self.recorder.end(step, now, elapsed_s, host_s, left)
        if self.log is not None:
            self.log.end(left)
        self.now = now + (elapsed_s + host_s)
        return left

    def next_start(self) -> float:
        """Return when the next step starts, in seconds; infinity if nobody is there or known to come."""
        return self.now if self.scheduler.requests else max(self.now, self._arriving.next_s)

    def is_coming(self, request: Request | None) -> bool:
        """Whether a request was added and has neither arrived nor been aborted."""
        return request is not None and self._arriving.by_id.get(request.request_id) is request

    def advance(self) -> list[Request]:
        """Run a stretch of steps that need no planning, or one step; return the requests that left."""
        if self.fast_forward is None or self.on_token is not None:
            return self.step()
        if (next_s := self._arriving.next_s) <= self.now:
            next_s = self._take_arrivals()
        if not self.scheduler.requests:
            return self.step()
        if (skipped := self.fast_forward.run(self.now, next_s, self.recorder, self.log)) is None:
            return self._step_or_leave()
        left, self.now = skipped
        return left

    def _record_left(self) -> None:
        if left := self.scheduler.drain_released():
            self.recorder.leave(left, self.scheduler.num_steps, self.now)
            if self.log is not None:
                self.log.end(left)

    def _take_arrivals(self) -> float:
        while (next_s := self._arriving.next_s) <= self.now:
            request, unchanged = self._arriving.pop()
            self.scheduler.add(request, fits=unchanged)  # which looks again: much may have changed on the way
        return next_s

    def run(
        self,
        requests: Iterable[Request] = (),
        *,
        on_finish: OnFinish | None = None,
        in_order: bool = False,
        progress: bool = False,
        last_arrival_s: float | None = None,
        watch: Watch | None = None,
    ) -> Result:
        """Run requests to their end and return the tables of this run.

        A request that can never run does not stop the others: it gets the finish reason "rejected", its `error`, and
        a row; one that was run before, or has the id of another of this run, is an error. An interrupt waits
        for the end of a step (a second does not): then every request of this run is aborted, the engine ready for more.

        Parameters
        ----------
        requests : iterable of Request
        on_finish : callable, optional
            Called with each request that left, with all its samples, or was rejected, and the time in seconds; returns
            the requests that come because of it, such as the next turn of a conversation.
        in_order : bool
            The requests come in order of arrival time: each is asked for when the one before it has arrived.
        progress : bool
            Show a bar: of finished requests, or of simulated seconds if the runner's time is virtual.
        last_arrival_s : float, optional
            Where the bar of seconds ends if nobody comes later.
        watch : callable, optional
            Called with the engine and the requests that left after each step, such as a `Live`.
        """
        self.forget()
        run = Run(self, requests, on_finish, in_order)
        try:
            run.to_the_end(progress, last_arrival_s, watch)
        except BaseException:
            run.abandon()
            raise
        with interrupts_held_back():  # sums are worked out now
            return replace(self.recorder.result(), decisions=self.log)
