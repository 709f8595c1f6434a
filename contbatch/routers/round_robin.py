"""Each in turn."""

from contbatch.request import Request
from contbatch.routers.router import Loads, Router


class RoundRobin(Router):
    """One replica after the other, whatever they have to do."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, loads: Loads) -> int:  # noqa: ARG002, D102
        chosen = self._next % len(loads)
        self._next = chosen + 1
        return chosen

    def __repr__(self) -> str:
        return "RoundRobin()"
