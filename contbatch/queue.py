"""The waiting requests, in order of rank."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from contbatch.request import Request


def _rank(request: Request) -> tuple[float, float, int]:
    return request.rank, request.arrival_time, request.order


class WaitingQueue:
    """Requests sorted by the rank their policy gave them, ties by arrival time, then by the order of adding.

    A preempted request comes back to the place its arrival gave it, so it loses nothing to its equals. Adding and
    removing one request costs a binary search and the shift of a list of pointers.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def add(self, request: Request) -> None:
        """Insert at the place that rank, arrival time and order give."""
        if self.requests and _rank(request) < _rank(self.requests[-1]):
            insort(self.requests, request, key=_rank)
        else:
            self.requests.append(request)

    def remove(self, requests: list[Request]) -> None:
        """Remove requests that are in the queue; those at its head go in one cut."""
        head = len(requests)
        if self.requests[:head] == requests:
            del self.requests[:head]
            return
        for request in requests:
            del self.requests[bisect_left(self.requests, _rank(request), key=_rank)]
