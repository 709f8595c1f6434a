"""Groups that stay together."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from contbatch.policies.chunked_prefill import ChunkedPrefill
from contbatch.policies.policy import Plan
from contbatch.request import Request


@dataclass(frozen=True, repr=False)
class Lockstep(ChunkedPrefill):
    """Nobody gets ahead of the others of its `Request.client_id` by more than a token; otherwise `ChunkedPrefill`.

    What beam search needs, whose beams are compared token by token. Those who are ahead give up seat and pages when
    one that is behind has none.
    """

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: D102
        everybody = [*running, *waiting]
        least = _shortest(everybody)
        behind = [r for r in everybody if r.num_output_tokens == least[r.client_id]]
        here = set(running)
        yield from super().plan([r for r in behind if r not in here], [r for r in behind if r in here], budget)

    def make_way(self, newcomer: Request, running: Sequence[Request]) -> Sequence[Request]:  # noqa: D102
        least = _shortest([newcomer, *running])
        return [r for r in running if r.num_output_tokens > least[r.client_id]]


def _shortest(requests: Iterable[Request]) -> dict[Hashable, int]:
    """Return the fewest output tokens of each client's requests."""
    least: dict[Hashable, int] = {}
    for r in requests:
        least[r.client_id] = min(r.num_output_tokens, least.get(r.client_id, r.num_output_tokens))
    return least
