"""One run of an engine: a list of requests, and those that follow from them, to their end."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from contbatch.checks import require
from contbatch.errors import InvalidRequestError
from contbatch.progress import progress_bar
from contbatch.request import Request
from contbatch.samples import answered

if TYPE_CHECKING:
    from contbatch.engine import Engine

OnFinish = Callable[[Request, float], Iterable[Request]]
"""Takes a request that left and the time, and returns those that come because of it."""
Watch = Callable[["Engine", Sequence[Request]], None]
"""Told, after each step or stretch of steps, of the engine and the requests that left."""


class Run:
    """Feeds an engine; see `Engine.run` for the parameters.

    Requests are asked for when the one before has arrived if they come in order of arrival, so that there are never
    more of them than needed.
    """

    def __init__(
        self, engine: "Engine", requests: Iterable[Request], on_finish: OnFinish | None, in_order: bool
    ) -> None:
        self.engine, self.on_finish = engine, on_finish
        self.names: dict[int | str, bool] = {}
        """Ids of the requests, and whether they were added: those that can never run were not."""
        self._coming = iter(requests if in_order else ())
        self._at_once = () if in_order else requests
        self._began_s, self._heard_s = engine.now, 0.0
        self._last: Request | None = None
        """Of those in order of arrival, the last one asked for."""

    def begin(self) -> None:
        """Add the requests that do not come in order of arrival."""
        self._submit(self._at_once)

    def advance(self, watch: Watch | None = None) -> Sequence[Request] | None:
        """Take a step, or a stretch of steps; return who left, or None if nobody is there any more."""
        engine = self.engine
        if not self._is_ahead() and not self._listen() and not engine.has_requests:
            return None
        left = engine.advance()
        if watch is not None:
            watch(engine, left)
        if self.on_finish is not None:
            for request in answered(left):
                self._submit(self.on_finish(request, engine.now))
        return left

    def to_the_end(self, progress: bool, last_arrival_s: float | None, watch: Watch | None) -> None:
        """Run until nobody is left; show a bar of finished requests, or of seconds if these are simulated."""
        engine, virtual = self.engine, self.engine.runner.is_virtual
        self.begin()
        total, unit = (last_arrival_s, "s") if virtual else (sum(self.names.values()), "request")
        with progress_bar(total, unit, progress) as bar:
            began = engine.now
            while (left := self.advance(watch)) is not None:
                if not progress:
                    continue
                if virtual:
                    bar.update(engine.now - began)
                    began = engine.now
                elif ended := answered(left):
                    bar.total = sum(self.names.values())
                    bar.update(len(ended))

    def _is_ahead(self) -> bool:
        """Whether the last one asked for is coming, and later than the next step begins."""
        engine = self.engine
        start = engine.now if engine.scheduler.requests else engine.next_start()
        return self._heard_s > start and engine.is_coming(self._last)

    def _listen(self) -> bool:
        """Ask for requests up to one that is to arrive later than the next step begins; return whether there was any.

        One that was refused or aborted does not count: the engine would think that nobody comes before those it knows.
        """
        heard = False
        while (request := next(self._coming, None)) is not None:
            if request.arrival_time < self._heard_s:
                raise InvalidRequestError(
                    f"{request!r} must not arrive before the one listed before it, which comes at {self._heard_s} s; "
                    f"got {request.arrival_time}"
                )
            self._heard_s, self._last, heard = request.arrival_time, request, True
            if following := self._add(request, listed=True):
                self._submit(following)
            if self._is_ahead():
                break
        return heard

    def _submit(self, requests: Iterable[Request]) -> None:
        """Add requests, and those that follow the ones that can never run."""
        coming = deque(requests)
        while coming:
            coming.extend(self._add(coming.popleft()))

    def _add(self, request: Request, listed: bool = False) -> Iterable[Request]:
        """Add a request; return those that follow it if it can never run."""
        is_one = isinstance(request, Request)
        if not is_one:
            require(False, "what is run", request, "a Request")
        name = request.request_id
        if name in self.names and request.order < 0:
            raise InvalidRequestError(f"request id {name!r} is that of two requests of one run")
        try:
            self.engine.add(request, listed=listed)
        except InvalidRequestError as error:
            self.engine.reject(request, error)
            self.names[name] = False
            return () if self.on_finish is None else self.on_finish(request, max(self._began_s, request.arrival_time))
        self.names[name] = True
        return ()
