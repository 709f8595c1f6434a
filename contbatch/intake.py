"""One step's results on their way to the requests."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from contbatch.logprob import Logprobs
from contbatch.policies.answers import rank_of
from contbatch.request import Request, RequestStatus
from contbatch.samples import unforked
from contbatch.step import SchedulerOutput

if TYPE_CHECKING:
    from contbatch.scheduler import Scheduler

WAITING, RUNNING, FORKING = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FORKING
FINISHED = RequestStatus.FINISHED


class Intake:
    """Hands out a step's tokens, errors and scores; see `Scheduler.update` for what they are.

    Raises
    ------
    SchedulerError
        A token is missing. Nothing has changed then.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        step: SchedulerOutput,
        tokens: Mapping[int | str, int],
        errors: Mapping[int | str, Exception],
        scores: Mapping[int | str, Sequence[Logprobs]],
        on_token: Callable[[Request], bool] | None,
    ) -> None:
        step.require_results(tokens, errors)
        self.scheduler, self.step = scheduler, step
        self.tokens, self.errors, self.scores, self.on_token = tokens, errors, scores, on_token

    def run(self) -> None:
        """Take everything in. If `on_token` is interrupted, those that come after it compute the same step again."""
        for request, start, num_tokens, samples, _ in self.step.grants:
            if samples and request.children:
                self._fork(request)  # before the parent: it is asked again for those that an interrupt leaves out
            if request.status is not RUNNING:  # aborted while the step ran, or padding
                continue
            request.num_computed_tokens = start + num_tokens
            self._take(request, samples)

    def _take(self, request: Request, samples: bool) -> None:
        name = request.request_id
        if self.scores:
            request.scores += self.scores.get(name, ())
        if name in self.errors:
            self.scheduler.fail(request, "error", self.errors[name])
        elif samples:
            request.take(self.tokens[name])
            if self.on_token is not None:
                self._call_back(request, self.on_token)

    def _call_back(self, request: Request, on_token: Callable[[Request], bool]) -> None:
        try:  # a user's callback: it may raise or be interrupted, abort this request or others
            if on_token(request) and request.status is not FINISHED:
                request.finish_reason = "stop"
        except Exception as error:
            if request.status is not FINISHED:
                self.scheduler.fail(request, "error", error)

    def _fork(self, parent: Request) -> None:
        """Queue the children of a prompt with their first tokens; who needs no more never takes a seat."""
        waiting = self.scheduler.waiting
        for child in unforked(parent):
            if child.status is not FORKING:  # aborted by a callback
                continue
            try:
                child.rank = rank_of(self.scheduler.policy, child)
            except Exception as error:  # of a user's policy
                self.scheduler.fail(child, "error", error)
                continue
            child.status = WAITING
            waiting.add(child)
            try:
                self._take(child, samples=True)
            finally:
                if child.is_finished and child.status is WAITING:
                    waiting.remove([child])
                    self.scheduler.leave(child)
