"""Waiting requests in an order of a policy's own."""

from collections.abc import Hashable, Iterator, Mapping
from heapq import heappop, heappush

from contbatch.request import Request, RequestStatus


class Lane:
    """A heap of requests, kept across steps; those that wait no more are dropped when they come to the head.

    Pushing and dropping cost the logarithm of its length. A request that waits again must be pushed again; being in
    the heap twice does no harm, since both entries are dropped once it waits no more.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, Request]] = []

    def push(self, request: Request, key: float = 0.0) -> None:
        """Add a request that starts to wait; smaller keys go first, ties by arrival."""
        heappush(self._heap, (key, request.arrival_time, request.order, request))

    @property
    def head(self) -> Request | None:
        """The first of those that wait; None if nobody does."""
        while self._heap:
            request = self._heap[0][-1]
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                return request
            heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take out the head."""
        return heappop(self._heap)[-1]

    def offers(self) -> Iterator[Request]:
        """Yield one head after the other, as long as each is admitted before the next is asked for."""
        offered = None
        while (head := self.head) is not None and head is not offered:
            offered = head
            yield head


def heads(lanes: Mapping[Hashable, Lane]) -> dict[Hashable, Request]:
    """Return the lanes in which somebody waits, and the first of each."""
    return {name: head for name, lane in lanes.items() if (head := lane.head) is not None}
