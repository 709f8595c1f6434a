"""Waiting requests in an order of a policy's own."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush

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
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED):
                return request
            heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take out the head."""
        return heappop(self._heap)[-1]


def offers(lanes: Sequence[Lane], key: Callable[[Request], tuple[float, ...]]) -> Iterator[Request]:
    """Yield the head with the smallest key, again and again, as long as each is admitted before the next is asked for.

    All heads are looked at anew each time, so whoever is in two lanes is offered once.
    """
    offered = None
    while found := [head for lane in lanes if (head := lane.head) is not None]:
        if (first := min(found, key=key)) is offered:
            return
        yield (offered := first)


def heads(lanes: dict[Hashable, Lane]) -> dict[Hashable, Request]:
    """Return the first of each lane by its name; lanes in which nobody waits are deleted."""
    found = {name: lane.head for name, lane in lanes.items()}
    for name in [name for name, head in found.items() if head is None]:
        del lanes[name]
    return {name: head for name, head in found.items() if head is not None}


def in_turn(lanes: dict[Hashable, Lane], key: Callable[[Request], tuple[float, ...]]) -> Iterator[Request]:
    """Yield the head with the smallest key, again and again, as long as each is admitted before the next is asked for.

    The key of a lane's head is taken anew when its predecessor has been admitted.
    """
    queue = [(key(head), head, lanes[name]) for name, head in heads(lanes).items()]
    heapify(queue)
    while queue:
        _, head, lane = heappop(queue)
        yield head
        if head.seat is None:
            return
        if (following := lane.head) is not None:
            heappush(queue, (key(following), following, lane))
