"""What the scheduler decided for one step."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from contbatch.errors import SchedulerError
from contbatch.request import Request, RequestStatus
from contbatch.step_shape import StepShape


class Grant(NamedTuple):
    """What one request computes in a step: tokens start .. start + num_tokens - 1 of its prompt and output."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether this catches up with all known tokens, so that a new one is sampled."""
    padding: bool
    """A finished row computed again for nothing (static batching with `pad`)."""


class DecodeSums(NamedTuple):
    """Sums over the requests that decode in a step without being listed in its grants; see `Decoders`."""

    num_requests: int = 0
    """A token of each is computed, and one sampled."""
    context: int = 0
    """Positions that they read: Σ (start + 1)."""


NO_DECODERS = DecodeSums()


class PageMove(NamedTuple):
    """A page whose content, of all layers, goes to another page."""

    kind: Literal["copy", "out", "in"]
    """"copy": between two device pages. "out": from a device page to a host page. "in": from host to device."""
    source: int
    target: int


BINDING = ("seats", "tokens", "pages", "fragmentation")
"""Limits that may bind: seats, the token budget, pages, and (with "pages") pages that are free but not side by side."""


@dataclass(slots=True, init=False)
class SchedulerOutput:
    """One step: whose tokens to compute, and what changed on the way."""

    step: int
    grants: list[Grant]
    decoders: DecodeSums
    """Who decodes besides, in a simulation."""
    admitted: list[Request]
    preempted: list[Request]
    moves: list[PageMove]
    """To be done before anything is computed, each after the one before it: a page may be emptied by one and filled by
    the next."""
    moved: list[Request]
    """Those whose pages hold what they should only once all `moves` are done."""
    forked: list[Request]
    """Further samples of the prompts that are finished in this step: each draws its first token from its parent's
    logits."""
    restarted: list[Request]
    """Running requests that outgrew their contiguous run: they begin again in a longer one."""
    plan: list[tuple[Request, int]]
    """What the policy asked for, in its order, as far as the step went: requests and tokens."""
    bound: set[str]
    """The limits that kept something the plan asked for out of this step, see `BINDING`."""
    num_tokens: int
    """Tokens computed, but those of `decoders`; together ≤ max_num_batched_tokens."""
    num_cached_tokens: int
    """Tokens of those admitted that the prefix cache held; they are not among `num_tokens`."""
    num_evictions: int
    """Cached pages taken for other content."""
    shared_context: int
    """Positions that are read again, see `StepShape`."""
    _shape: StepShape | None

    def __init__(
        self,
        step: int,
        grants: list[Grant] | None = None,
        plan: list[tuple[Request, int]] | None = None,
        bound: set[str] | None = None,
        num_tokens: int = 0,
    ) -> None:
        self.step, self.num_tokens = step, num_tokens
        self.grants = [] if grants is None else grants
        self.plan = [] if plan is None else plan
        self.bound = set() if bound is None else bound
        self.decoders = NO_DECODERS
        self.admitted, self.preempted = [], []
        self.restarted, self.forked = [], []
        self.moves, self.moved = [], []
        self.num_cached_tokens = self.num_evictions = self.shared_context = 0
        self._shape = None

    @property
    def shape(self) -> StepShape:
        """Its size, added up once: ask when the step is planned."""
        if self._shape is None:
            self._shape = StepShape.of(self.grants, self.decoders, self.shared_context)
        return self._shape

    def pages_moved(self, kind: Literal["copy", "out", "in"]) -> list[tuple[int, int]]:
        """Return (source, target) of the moves of one kind, in order: what a cost model has to price."""
        return [(move.source, move.target) for move in self.moves if move.kind == kind]

    def require_results(self, tokens: Collection[int | str], errors: Collection[int | str]) -> None:
        """Raise `SchedulerError` unless every live request that samples has a token or an error."""
        sampling = [request for request, _, _, samples, _ in self.grants if samples]
        for request in sampling + self.forked:
            name = request.request_id
            if name not in tokens and name not in errors and request.status is not RequestStatus.FINISHED:
                raise SchedulerError(f"step {self.step} brought no token and no error for request {name!r}")
