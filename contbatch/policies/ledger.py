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

    def open(self, request: Request) -> None:
        """Charge for a request from now on, once it is admitted."""
        self._paid.setdefault(request, 0.0)

    def settle(self, price: Callable[[Request], float]) -> None:
        """Charge what the service so far to each admitted request costs now more than at the last call.

        Whoever was not admitted after all, or was aborted before it computed anything, owes nothing.
        """
        for request, paid in list(self._paid.items()):
            served = request.seat is not None or request.num_computed_tokens or request.num_preemptions
            due = price(request) if served else 0.0
            self.counters[request.client_id] += due - paid
            self._paid[request] = due
            if request.status is RequestStatus.FINISHED:
                del self._paid[request]

    def lift(self, client: Hashable, among: list[Hashable]) -> None:
        """Raise a client's counter to the smallest among others, if it is below."""
        floor = min((self.counters.get(other, 0.0) for other in among), default=0.0)
        self.counters[client] = max(self.counters.get(client, 0.0), floor)
