"""Requests on their way: known, but not arrived."""

from heapq import heappop, heappush
from math import inf

from contbatch.errors import InvalidRequestError
from contbatch.request import Request
from contbatch.samples import sample_ids


class Arriving:
    """Requests in order of arrival time; ties go to those `listed` from the start, then in order of adding."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bool, int, Request]] = []
        """Those aborted before they arrived are still in it, but not at its head, and no longer among `_by_id`."""
        self._by_id: dict[int | str, Request] = {}
        self._num_added = 0

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def get(self, request_id: int | str) -> Request | None:
        """Return the request to which an id (of its own, or of one of its samples) belongs."""
        return self._by_id.get(request_id)

    def add(self, request: Request, listed: bool = False) -> None:
        """Add a request; `InvalidRequestError` if an id is in use here."""
        names = sample_ids(request)
        for name in names:
            if name in self._by_id:
                raise InvalidRequestError(f"request id {name!r} is already in use by an arriving request")
        for name in names:
            self._by_id[name] = request
        heappush(self._heap, (request.arrival_time, not listed, self._num_added, request))
        self._num_added += 1

    def remove(self, request: Request) -> None:
        """Remove a request: it has arrived, or will not."""
        for name in sample_ids(request):
            self._by_id.pop(name, None)  # an interrupt may have come between these lines before
        heap = self._heap
        while heap and self._by_id.get(heap[0][-1].request_id) is not heap[0][-1]:
            heappop(heap)

    @property
    def next_s(self) -> float:
        """When the next request arrives; infinity if none will."""
        return self._heap[0][0] if self._heap else inf

    def pop(self) -> Request:
        """Take out the next, if there is one."""
        request = self._heap[0][-1]
        self.remove(request)
        return request
