"""Several engines, each with a clock of its own, moved on together in order of time."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from contbatch.checks import is_int, python_number, require
from contbatch.decision_log import DecisionLog
from contbatch.errors import InvalidRequestError
from contbatch.fast_forward import FastForward
from contbatch.recorder import Recorder
from contbatch.request import Request
from contbatch.samples import answered
from contbatch.simulation import simulated_engine

Action = Callable[[float], None]
"""Something that happens, and the time, in seconds."""
OnFinish = Callable[[int, Request, float], None]
"""Told the machine, a request that left it or was refused, and when."""


MAX_MACHINES = 100_000
LIMITS = (
    *("num_pages", "page_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("prefix_cache", "num_host_pages", "layout", "detail"),
)
"""What may be said of replicas besides policy and backend: see `simulate`."""


def require_machines(**counts: Any) -> tuple[int, ...]:
    """Return numbers of machines as Python integers; `InvalidRequestError` for the first that is out of its limits."""
    numbers = tuple(map(python_number, counts.values()))
    for name, number in zip(counts, numbers, strict=True):
        require(is_int(number, 1, MAX_MACHINES), name, number, f"an integer in [1, {MAX_MACHINES}]")
    return numbers


class _UpTo(FastForward):
    """Skips no step that begins at `horizon` (seconds) or later: by then something may happen that changes it."""

    horizon = inf

    def run(
        self, now: float, next_arrival: float, recorder: Recorder, log: DecisionLog | None
    ) -> tuple[list[Request], float] | None:
        return super().run(now, min(next_arrival, self.horizon), recorder, log)


class Machines:
    """Engines and events on one time axis. A step begins only when everything up to its beginning has happened.

    Parameters
    ----------
    num_machines : int
    on_finish : callable
        Told each request that left, with all its samples, or was refused.
    isolated : bool
        Whether nothing that happens at one machine has others as its consequence, so that each may run ahead to the
        next event; else to the next step of any other.
    limits : mapping
        Of each engine: see `simulated_engine`.
    """

    def __init__(self, num_machines: int, on_finish: OnFinish, *, isolated: bool, **limits: Any) -> None:
        for name in limits.keys() - {"policy", "backend"}:
            require(name in LIMITS, "a limit of replicas", name, f"one of {', '.join(LIMITS)}")
        self.engines = [simulated_engine(skip_with=_UpTo, single_samples=True, **limits) for _ in range(num_machines)]
        self.on_finish, self.isolated = on_finish, isolated


class EventLoop:
    """Runs groups of machines and the events between them, until nothing is left.

    Parameters
    ----------
    groups : sequence of Machines
    """

    def __init__(self, groups: Sequence[Machines]) -> None:
        self._all = [(group, number, engine) for group in groups for number, engine in enumerate(group.engines)]
        self._place = {id(engine): place for place, (*_, engine) in enumerate(self._all)}
        self._events: list[tuple[float, bool, int, Action]] = []
        self._starts: list[tuple[float, int]] = []
        """When the next step of each engine that has requests begins."""
        self._number = count()

    def at(self, at_s: float, action: Action, listed: bool = False) -> None:
        """Have something happen at a time; those `listed` go first among equals, then the order of adding counts."""
        heappush(self._events, (at_s, not listed, next(self._number), action))

    def add(self, group: Machines, number: int, request: Request, listed: bool = False) -> None:
        """Give a request that arrives now to a machine; one that it can never run is refused with a row there."""
        engine = group.engines[number]
        was_idle = not engine.has_requests
        try:
            engine.add(request, listed=listed)
        except InvalidRequestError as error:
            engine.reject(request, error)
            group.on_finish(number, request, request.arrival_time)
            return
        if was_idle:
            heappush(self._starts, (engine.next_start(), self._place[id(engine)]))

    def run(self) -> None:
        """Run to the end."""
        while self._events or self._starts:
            next_event = self._events[0][0] if self._events else inf
            if self._starts and self._starts[0][0] < next_event:
                self._advance(next_event)
            else:
                at_s, *_, action = heappop(self._events)
                action(at_s)

    def _advance(self, horizon: float) -> None:
        """Move the engine on whose next step is the first, up to `horizon` at most."""
        _, place = heappop(self._starts)
        group, number, engine = self._all[place]
        if not group.isolated and self._starts:
            horizon = min(horizon, self._starts[0][0])
        if isinstance(engine.fast_forward, _UpTo):
            engine.fast_forward.horizon = horizon
        left = engine.advance()
        if engine.has_requests:
            heappush(self._starts, (engine.next_start(), place))
        for request in answered(left):
            group.on_finish(number, request, engine.now)
