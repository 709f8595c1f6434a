"""Equal service for every client."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from contbatch.checks import is_real, require
from contbatch.policies.chunked_prefill import ChunkedPrefill
from contbatch.policies.lane import Lane, heads, in_turn
from contbatch.policies.ledger import Ledger
from contbatch.policies.policy import Plan
from contbatch.request import Request


@dataclass(frozen=True, repr=False)
class FairShare(ChunkedPrefill):
    """The virtual token counter: admit from the client with the least service (Sheng et al., OSDI 2024, algorithm 2).

    A client's counter grows by `input_weight` per prompt token at admission, `output_weight` per token made. Who comes
    to queue is lifted to the smallest counter in the queue (if it is empty: of the client admitted last). While two
    clients queue, their services differ by at most 2 · max(input_weight · longest prompt, output_weight · tokens in the
    pool), for input_weight ≤ output_weight. Beyond the paper: chunks; and preemption, which is not charged for.
    """

    input_weight: float = 1.0
    output_weight: float = 2.0
    _lanes: dict[Hashable, Lane] = field(default_factory=lambda: defaultdict(Lane), init=False, compare=False)
    _ledger: Ledger = field(default_factory=Ledger, init=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = self.input_weight, self.output_weight
        require(all(is_real(w) and w >= 0 for w in weights), "input_weight, output_weight", weights, "numbers ≥ 0")

    def price(self, request: Request) -> float:
        """Return what the service that a request had so far counts."""
        prompt = 0 if request.sample_index else request.num_prompt_tokens  # computed once for all samples
        return self.input_weight * prompt + self.output_weight * request.num_output_tokens

    def rank(self, request: Request) -> float:  # noqa: D102
        if self._lanes[request.client_id].head is None:
            self._ledger.settle(self.price)
            self._ledger.lift(request.client_id, among=list(heads(self._lanes)) or [self._ledger.last])
        self._lanes[request.client_id].push(request)
        return 0.0

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        self._ledger.settle(self.price)
        yield from super().plan((), running, budget)
        for head in in_turn(self._lanes, self._ledger.key):
            self._ledger.charge(head, self.price)  # nothing before it is admitted, but its account is open
            yield head, head.num_uncomputed_tokens
            self._ledger.charge(head, self.price)
