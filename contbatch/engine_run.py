"""One run of an engine: a list of requests, and those that follow from them, to their end."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from contbatch.checks import require, require_type
from contbatch.errors import InvalidRequestError
from contbatch.interrupts import interrupts_held_back
from contbatch.progress import progress_bar
from contbatch.request import Request
from contbatch.samples import answered

if TYPE_CHECKING:
    from contbatch.engine import Engine

OnFinish = Callable[[Request, float], Iterable[Request] | None]
"""Takes a request that left and the time, and returns those that come because of it, if any."""
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
        require(isinstance(requests, Iterable), "what is run", requests, "a list of requests")
        require(on_finish is None or callable(on_finish), "on_finish", on_finish, "None or callable")
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
                self._submit(self.on_finish(request, engine.now) or ())
        return left

    def to_the_end(self, progress: bool, last_arrival_s: float | None, watch: Watch | None) -> None:
        """Run until nobody is left; show a bar of finished requests, or of seconds if these are simulated."""
        engine, virtual = self.engine, self.engine.runner.is_virtual
        with interrupts_held_back():
            self.begin()
        total, unit = (last_arrival_s, "s") if virtual else (sum(self.names.values()), "request")
        with progress_bar(total, unit, progress) as bar:
            first = began = engine.now
            left: Sequence[Request] | None = ()
            while left is not None:
                with interrupts_held_back() as held:  # they come between two steps, not between two lines of one
                    while (left := self.advance(watch)) is not None:
                        if progress and virtual:
                            if total is not None:  # it is the last arrival, and tqdm takes a bar beyond its end away
                                bar.total = max(total, engine.now - first)
                            bar.update(engine.now - began)
                            began = engine.now
                        elif progress and (ended := answered(left)):
                            bar.total = sum(self.names.values())
                            bar.update(len(ended))
                        if held.waiting is not None:
                            break

    def abandon(self) -> None:
        """Abort the requests that are live."""
        with interrupts_held_back():
            for name, was_added in self.names.items():
                if was_added:
                    self.engine.abort(name)

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
        for request in self._coming:
            require_type("what is run", request, Request)
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
        require(isinstance(requests, Iterable), "what comes of a request", requests, "a list of requests")
        coming = deque(requests)
        while coming:
            require_type("what is run", request := coming.popleft(), Request)
            coming.extend(self._add(request))

    def _add(self, request: Request, listed: bool = False) -> Iterable[Request]:
        """Add a request; return those that follow it if it can never run."""
        name = request.request_id
        if name in self.names and request.order < 0:
            raise InvalidRequestError(f"request id {name!r} is that of two requests of one run")
        try:
            self.engine.add(request, listed=listed)
        except InvalidRequestError as error:
            self.engine.reject(request, error)
            self.names[name] = False
            if self.on_finish is None:
                return ()
            return self.on_finish(request, max(self._began_s, request.arrival_time)) or ()
        self.names[name] = True
        return ()
