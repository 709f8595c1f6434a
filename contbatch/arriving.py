"""Requests on their way: known, but not arrived."""

from heapq import heappop, heappush
from math import inf

from contbatch.errors import InvalidRequestError
from contbatch.request import Request
from contbatch.samples import sample_ids
from contbatch.sampling_params import SamplingParams


class Arriving:
    """Requests in order of arrival time; ties go to those `listed` from the start, then in order of adding."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bool, int, Request, SamplingParams, int]] = []
        """Those aborted before they arrived are still in it, but not at its head, and no longer in `by_id`."""
        self.by_id: dict[int | str, Request] = {}
        """The requests, by their ids and those of their samples."""
        self._num_added = 0

    def __bool__(self) -> bool:
        return bool(self.by_id)

    def add(self, request: Request, listed: bool = False) -> None:
        """Add a request; `InvalidRequestError` if an id is in use here."""
        names = sample_ids(request)
        for name in names:
            if name in self.by_id:
                raise InvalidRequestError(f"request id {name!r} is already in use by an arriving request")
        for name in names:
            self.by_id[name] = request
        asked = request.sampling, request.num_prompt_tokens
        heappush(self._heap, (request.arrival_time, not listed, self._num_added, request, *asked))
        self._num_added += 1

    def remove(self, request: Request) -> None:
        """Remove a request: it has arrived, or will not."""
        for name in sample_ids(request):
            self.by_id.pop(name, None)  # an interrupt may have come between these lines before
        heap = self._heap
        while heap and self.by_id.get((first := heap[0][3]).request_id) is not first:
            heappop(heap)

    @property
    def next_s(self) -> float:
        """When the next request arrives; infinity if none will."""
        return self._heap[0][0] if self._heap else inf

    def pop(self) -> tuple[Request, bool]:
        """Take out the next; return it, and whether it asks for what it did when it was added."""
        _, _, _, request, sampling, num_prompt_tokens = self._heap[0]
        self.remove(request)
        return request, request.sampling is sampling and request.num_prompt_tokens == num_prompt_tokens
