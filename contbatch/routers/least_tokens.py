"""To whoever has least to do."""

from dataclasses import dataclass

from contbatch.request import Request
from contbatch.routers.router import Loads, Router


@dataclass(frozen=True)
class LeastTokens(Router):
    """The replica with the fewest tokens of unfinished requests; of several, the first.

    Counts what was asked for: the length of an answer that may end before `max_tokens` is not known.
    """

    def choose(self, request: Request, loads: Loads) -> int:  # noqa: ARG002, D102
        return int(loads.tokens.argmin())
