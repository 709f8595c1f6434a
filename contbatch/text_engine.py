"""An engine that several callers share, and that knows text: stop strings, deltas."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from threading import RLock

from contbatch.engine import Engine
from contbatch.errors import RunnerError
from contbatch.logprob import Logprobs
from contbatch.metrics import Result
from contbatch.output import RequestOutput
from contbatch.request import Request
from contbatch.tokenizer import IncrementalDecoder, Tokenizer


def decoder_of(request: Request, tokenizer: Tokenizer) -> IncrementalDecoder:
    """Make the decoder of a request's answer."""
    return IncrementalDecoder(tokenizer, request.sampling.stop, request.sampling.min_tokens)


def output_of(request: Request, tokenizer: Tokenizer) -> RequestOutput:
    """Return a request's answer as far as it has come, its text cut before a stop string."""
    decoder = decoder_of(request, tokenizer)
    for token in request.output_token_ids:
        decoder.push(token)
    decoder.flush()

    def with_text(scores: Logprobs) -> Logprobs:
        return {token: score._replace(decoded_token=tokenizer.token_text(token)) for token, score in scores.items()}

    own, prompt = request.logprobs, request.prompt_logprobs
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.prompt_token_ids or ()),
        text=decoder.text,
        token_ids=tuple(request.output_token_ids),
        finish_reason=request.finish_reason or "",
        error=request.error,
        logprobs=None if own is None else tuple(map(with_text, own)),
        prompt_logprobs=None if prompt is None else tuple(scores and with_text(scores) for scores in prompt),
    )


NewEngine = Callable[[Callable[[Request], bool]], Engine]


class TextEngine:
    """Callers submit requests and step until theirs are done; whoever steps moves everybody's requests on.

    Parameters
    ----------
    new_engine : callable
        Makes an engine that calls the function it is given after each new token.
    tokenizer : Tokenizer
    """

    def __init__(self, new_engine: NewEngine, tokenizer: Tokenizer) -> None:
        self._new_engine = new_engine
        self._tokenizer = tokenizer
        self._decoders: dict[int | str, IncrementalDecoder] = {}
        self._deltas: dict[int | str, list[str]] = {}
        self._names = count()
        self._lock = RLock()
        self._engine = new_engine(self._on_token)

    @property
    def num_free_pages(self) -> int:
        """Pages that no live request holds."""
        return self._engine.scheduler.pool.num_free

    def submit(self, requests: Sequence[Request], deltas: list[str] | None = None) -> None:
        """Queue requests now under fresh names, all or none; text of the only one is appended to `deltas`."""
        with self._lock:
            if not self._engine.has_requests:
                self._engine.forget()
            try:
                for request in requests:
                    request.request_id, request.arrival_time = next(self._names), self._engine.now
                    self._engine.add(request)
                    if deltas is not None:
                        self._deltas[request.request_id] = deltas
            except BaseException:
                self.abandon(requests)
                raise

    def step(self) -> None:
        """Run one step of everything that is going on."""
        with self._lock:
            for request in self._engine.step():
                self._forget(request.request_id)

    def abandon(self, requests: Sequence[Request]) -> None:
        """Abort those of `requests` that are live."""
        with self._lock:
            live = self._engine.scheduler.requests
            ours = {r.request_id for r in requests if live.get(r.request_id) is r}
            if ours and live.keys() <= ours:
                # An interrupt may have hit the scheduler between two of its lines: with nobody else there, start anew.
                self._engine = self._new_engine(self._on_token)
            for request in requests:
                if request.request_id in ours:
                    self._engine.abort(request.request_id)
                    self._forget(request.request_id)
                    request.finish_reason = request.finish_reason or "abort"

    def run(self, new_engine: NewEngine, requests: Iterable[Request], *, progress: bool) -> Result:
        """Run requests on an engine of their own; `RunnerError` while anything else is going on."""
        with self._lock:
            if self._engine.has_requests:
                raise RunnerError("run() needs all pages, but a stream or another call is not finished")
            try:
                return new_engine(self._on_token).run(requests, progress=progress)
            finally:
                self._decoders.clear()

    def _forget(self, name: int | str) -> None:
        if decoder := self._decoders.pop(name, None):
            rest = decoder.flush()
            self._deltas.pop(name, []).append(rest)

    def _on_token(self, request: Request) -> bool:
        """Decode the new token if somebody looks at the text; True if a stop string has come."""
        name = request.request_id
        decoder, deltas = self._decoders.get(name), self._deltas.get(name)
        if decoder is None:
            if deltas is None and not request.sampling.stop:
                return False
            decoder = self._decoders[name] = decoder_of(request, self._tokenizer)
        delta = decoder.push(request.output_token_ids[-1])
        if deltas is not None:
            deltas.append(delta)
        return decoder.stopped is not None
