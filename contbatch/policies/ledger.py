"""What clients owe for the service they had."""

from collections.abc import Callable, Hashable

from contbatch.request import Request, RequestStatus


class Ledger:
    """Counters of service by client, brought up to date from the state of the requests: asking twice charges once."""

    def __init__(self) -> None:
        self.counters: dict[Hashable, float] = {}
        self.last: Hashable = None
        """The client admitted last."""
        self._paid: dict[Request, float] = {}

    def charge(self, request: Request, price: Callable[[Request], float]) -> None:
        """Charge what the service to a request so far costs more than what it was charged before.

        Who was not admitted after all, or was aborted before it computed anything, owes nothing.
        """
        served = request.seat is not None or request.num_computed_tokens or request.num_preemptions
        paid, due = self._paid.get(request, 0.0), price(request) if served else 0.0
        if due and not paid:
            self.last = request.client_id
        self.counters[request.client_id] += due - paid
        self._paid[request] = due
        if request.status is RequestStatus.FINISHED:
            del self._paid[request]

    def settle(self, price: Callable[[Request], float]) -> None:
        """Charge all requests that were ever charged and had not ended by then."""
        for request in list(self._paid):
            self.charge(request, price)

    def key(self, request: Request) -> tuple[float, float, int]:
        """Sort key of requests of different clients: least service first, ties by arrival."""
        return self.counters[request.client_id], request.arrival_time, request.order

    def lift(self, client: Hashable, among: list[Hashable]) -> None:
        """Raise a client's counter to the smallest among others, if it is below."""
        floor = min((self.counters.get(other, 0.0) for other in among), default=0.0)
        self.counters[client] = max(self.counters.get(client, 0.0), floor)
