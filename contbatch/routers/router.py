"""Routers choose a replica for each request when it arrives, by what they have sent and what came back so far.

    class Fullest(cb.Router):
        def choose(self, request, loads):
            return int(loads.requests.argmax())

A router may keep state on itself: every run works on a deep copy of the router it was given.
"""

from heapq import heappop, heappush

import numpy as np

from contbatch.request import Request


class Loads:
    """What a router can know of its replicas: nothing that only their schedulers know, and nothing of the future.

    Parameters
    ----------
    num_replicas : int
    """

    def __init__(self, num_replicas: int) -> None:
        self.requests = np.zeros(num_replicas, np.int64)
        """By replica: requests sent there whose answers have not ended yet."""
        self.tokens = np.zeros(num_replicas, np.int64)
        """By replica: prompt tokens of these, and the most that each may answer (`max_tokens`)."""
        self._ends: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self.requests)

    def sent(self, replica: int, request: Request) -> None:
        """Note a request on its way to a replica."""
        self.requests[replica] += 1
        self.tokens[replica] += _tokens(request)

    def ends(self, replica: int, request: Request, at_s: float) -> None:
        """Note that an answer ends at a time (seconds), of which nobody knows before."""
        heappush(self._ends, (at_s, replica, _tokens(request)))

    def hear(self, now: float) -> None:
        """Take notice of all answers that have ended by `now` (seconds)."""
        while self._ends and self._ends[0][0] <= now:
            _, replica, tokens = heappop(self._ends)
            self.requests[replica] -= 1
            self.tokens[replica] -= tokens


def _tokens(request: Request) -> int:
    return request.num_prompt_tokens + request.sampling.max_tokens


class Router:
    """Base of all routers."""

    def choose(self, request: Request, loads: Loads) -> int:
        """Return the number, in [0, len(loads)), of the replica that a request goes to. It is not asked again."""
        raise NotImplementedError(f"{type(self).__name__} must define choose(request, loads)")
