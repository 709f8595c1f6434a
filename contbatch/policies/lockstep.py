"""Groups that stay together."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from contbatch.policies.chunked_prefill import ChunkedPrefill
from contbatch.policies.policy import Plan
from contbatch.request import Request


@dataclass(frozen=True, repr=False)
class Lockstep(ChunkedPrefill):
    """Nobody gets ahead of the others of its `Request.client_id` by more than a token; otherwise `ChunkedPrefill`.

    What beam search needs, whose beams are compared token by token. Those who are ahead give up seat and pages when
    one that is behind has none.
    """

    _least: dict[Hashable, int] = field(default_factory=dict, init=False, compare=False)
    """Fewest output tokens of each client's requests."""

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: D102
        waiting = list(waiting)
        self._least.clear()
        for r in (*running, *waiting):
            self._least[r.client_id] = min(r.num_output_tokens, self._least.get(r.client_id, r.num_output_tokens))
        waiting, running = ([r for r in requests if not self._is_ahead(r)] for requests in (waiting, running))
        yield from super().plan(waiting, running, budget)

    def make_way(self, newcomer: Request, running: Sequence[Request]) -> Sequence[Request]:  # noqa: ARG002, D102
        return [r for r in running if self._is_ahead(r)]

    def _is_ahead(self, request: Request) -> bool:
        return request.num_output_tokens > self._least[request.client_id]
