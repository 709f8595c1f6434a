"""An engine that several callers share, and that knows text: stop strings, deltas."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from threading import Lock
from typing import Any, TypeVar

from contbatch.beam_search import BeamSearchResult
from contbatch.checks import tuple_of
from contbatch.decision_log import DecisionLog
from contbatch.engine import Engine, Runner
from contbatch.engine_run import OnFinish
from contbatch.errors import RunnerError
from contbatch.interrupts import interrupts_held_back
from contbatch.live import watching
from contbatch.logprob import Logprobs
from contbatch.metrics import Result
from contbatch.output import RequestOutput
from contbatch.policies import Policy
from contbatch.provenance import Provenance, attach
from contbatch.request import Request
from contbatch.samples import best_samples
from contbatch.scheduler import Scheduler
from contbatch.tokenizer import IncrementalDecoder, Tokenizer

T = TypeVar("T")


def decoder_of(request: Request, tokenizer: Tokenizer) -> IncrementalDecoder:
    """Make the decoder of a request's answer."""
    return IncrementalDecoder(tokenizer, request.sampling.stop, request.sampling.min_tokens)


def output_of(request: Request, tokenizer: Tokenizer) -> RequestOutput:
    """Return the answers to a prompt as far as they have come, each text cut before a stop string."""
    first, *further = (_answer(sample, request, tokenizer) for sample in best_samples(request))
    return replace(first, further=tuple(further))


def _answer(sample: Request, request: Request, tokenizer: Tokenizer) -> RequestOutput:
    decoder = decoder_of(sample, tokenizer)
    for token in sample.output_token_ids:
        decoder.push(token)
    decoder.flush()

    def with_text(scores: Logprobs) -> Logprobs:
        return {token: score._replace(decoded_token=tokenizer.token_text(token)) for token, score in scores.items()}

    own, prompt = sample.logprobs, request.prompt_logprobs
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.prompt_token_ids or ()),
        text=decoder.text,
        token_ids=tuple(sample.output_token_ids),
        finish_reason=sample.finish_reason or "",
        error=sample.error,
        logprobs=None if own is None else tuple(map(with_text, own)),
        cumulative_logprob=sample.cumulative_logprob,
        prompt_logprobs=None if prompt is None else tuple(scores and with_text(scores) for scores in prompt),
    )


def output_of_beams(request: Request, result: BeamSearchResult, tokenizer: Tokenizer) -> RequestOutput:
    """Return what a beam search found for the prompt of a request, the best first."""
    prompt = tuple(request.prompt_token_ids or ())
    answers = []
    for found in result.hypotheses:
        text = tokenizer.decode(found.token_ids)
        of = request.request_id, prompt, text, found.token_ids, found.finish_reason, None
        answers.append(RequestOutput(*of, cumulative_logprob=found.cumulative_logprob))
    if result.error is not None:
        return RequestOutput(request.request_id, prompt, "", (), "error", result.error)
    return replace(answers[0], further=tuple(answers[1:]))


NewEngine = Callable[[Callable[[Request], bool]], Engine]


def new_engine(
    runner: Runner,
    policy: Policy,
    limits: Mapping[str, Any],
    on_token: Callable[[Request], bool],
    log: DecisionLog | None = None,
) -> Engine:
    """Make an engine with a scheduler of its own."""
    return Engine(Scheduler(policy, **limits), runner, on_token=on_token, log=log)


class _Texts:
    """The text of requests whose text somebody looks at, as it grows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoders: dict[Request, IncrementalDecoder] = {}
        self.deltas: dict[Request, list[str]] = {}
        """Where the pieces of a request's text go."""

    def on_token(self, request: Request) -> bool:
        """Decode the new token; True if a stop string has come."""
        decoder, deltas = self._decoders.get(request), self.deltas.get(request)
        if decoder is None:
            if deltas is None and not request.sampling.stop:
                return False
            decoder = self._decoders[request] = decoder_of(request, self._tokenizer)
        delta = decoder.push(request.output_token_ids[-1])
        if request.is_finished:  # it may keep its seat for long
            delta += decoder.flush()
        if deltas is not None:
            deltas.append(delta)
        return decoder.stopped is not None

    def end(self, request: Request) -> None:
        """Hand out what was held back, and forget the request."""
        decoder, deltas = self._decoders.pop(request, None), self.deltas.pop(request, None)
        if decoder is not None and deltas is not None:
            deltas.append(decoder.flush())


class TextEngine:
    """Callers submit requests and step until theirs are done; whoever steps moves everybody's requests on.

    Parameters
    ----------
    make_engine : callable
        Makes an engine that calls the function it is given after each new token.
    tokenizer : Tokenizer
    """

    def __init__(self, make_engine: NewEngine, tokenizer: Tokenizer) -> None:
        self._make_engine, self._tokenizer = make_engine, tokenizer
        self._texts = _Texts(tokenizer)  # not self: a cycle would keep the model from being freed when it is dropped
        self._names = count()
        self._lock = Lock()
        self._dropped: deque[Request] = deque()
        self._engine = make_engine(self._texts.on_token)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads, interrupts and finalizers out."""
        with self._lock, interrupts_held_back():
            self._abort_dropped()
            yield

    @property
    def num_free_pages(self) -> int:
        """Pages that no live request holds."""
        return self._engine.scheduler.pool.num_available

    def submit(self, requests: Sequence[Request], deltas: list[str] | None = None) -> None:
        """Queue requests now under fresh names, all or none; text of the only one is appended to `deltas`."""
        with self._alone():
            if not self._engine.has_requests:
                self._engine.forget()
            try:
                for request in requests:
                    request.request_id, request.arrival_time = next(self._names), self._engine.now
                    self._engine.add(request)
                    if deltas is not None:
                        self._texts.deltas[request] = deltas
            except BaseException:
                self._abort(requests)
                raise

    def step(self) -> None:
        """Run one step of everything that is going on. An interrupt waits for its end, a second one does not."""
        with self._alone():
            for request in self._engine.step():
                self._texts.end(request)

    def abandon(self, requests: Sequence[Request]) -> None:
        """Abort those of `requests` that are live."""
        with self._alone():
            if set(self._engine.scheduler.requests.values()) <= {s for r in requests for s in r.samples}:
                # What was raised may have left the engine between two of its lines: with nobody else there, start anew.
                self._engine = self._make_engine(self._texts.on_token)
            self._abort(requests)

    def drop(self, request: Request) -> None:
        """Do as `abandon`, from a finalizer: it may run at any line of any thread, even of this class."""
        self._dropped.append(request)
        if self._lock.acquire(blocking=False):
            try:
                self._abort_dropped()
            finally:
                self._lock.release()

    def run(
        self,
        make_engine: NewEngine,
        requests: Iterable[Request],
        on_finish: OnFinish | None,
        told: Callable[[list[Request]], Provenance],
        *,
        progress: bool,
        live: bool | None,
    ) -> Result:
        """Run requests on an engine of their own; `RunnerError` while anything else is going on.

        `told` says where the result comes from, if the requests are all there is.
        """
        # Now, since a generator may do anything, such as calling back.
        requests = list(tuple_of(requests, "what is run", "a list of requests"))
        with self.replaced(make_engine, "run") as engine, watching(live, repr(engine.scheduler.policy)) as watch:
            result = engine.run(requests, on_finish=on_finish, progress=progress, watch=watch)
        result = replace(result, max_num_seqs=engine.scheduler.max_num_seqs)
        return result if on_finish else attach(result, told(requests))

    @contextmanager
    def replaced(self, make: Callable[[Callable[[Request], bool]], T], caller: str) -> Iterator[T]:
        """Lend another engine, or several, with all pages to it; `RunnerError` while anything else is going on."""
        with self._lock:
            self._abort_dropped()
            if self._engine.has_requests:
                raise RunnerError(f"{caller}() needs all pages, but a stream or another call is not finished")
            texts = _Texts(self._tokenizer)
            try:
                yield make(texts.on_token)
            finally:
                self._engine = self._make_engine(
                    self._texts.on_token
                )  # the pages hold something else than it remembers

    def _abort_dropped(self) -> None:
        while self._dropped:
            self._abort([self._dropped.popleft()])

    def _abort(self, requests: Iterable[Request]) -> None:
        for request in [sample for parent in requests for sample in parent.samples]:
            if self._engine.scheduler.requests.get(request.request_id) is request:
                self._engine.abort(request.request_id)
            self._texts.end(request)
            request.finish_reason = request.finish_reason or "abort"
