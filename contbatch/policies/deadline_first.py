"""The most urgent first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import merge
from math import inf

from contbatch.policies.lane import Lane
from contbatch.policies.policy import Plan, everything
from contbatch.policies.preemptive import Preemptive
from contbatch.request import Request


@dataclass(frozen=True, repr=False)
class DeadlineFirst(Preemptive):
    """Earliest deadline first (Liu and Layland, 1973), by the next token of every request, running or waiting.

    The first token is due at arrival + `ttft_target_s`, the k-th after it k · `tpot_target_s` after the first was made;
    without a target never. Whose first token is late already goes after all that can be in time, since under overload
    plain EDF makes everybody late. Nobody gives up seat or pages for a more urgent newcomer.
    """

    _due: Lane = field(default_factory=Lane, init=False, compare=False)
    _resumed: Lane = field(default_factory=Lane, init=False, compare=False)
    _late: Lane = field(default_factory=Lane, init=False, compare=False)
    _first_s: dict[Request, float] = field(default_factory=dict, init=False, compare=False)

    def deadline(self, request: Request) -> float:
        """Return when the next token of a request is due, in seconds on the engine's clock."""
        if request.output_token_ids:
            pace = inf if request.tpot_target_s is None else request.tpot_target_s
            return self._first_s.setdefault(request, self.now) + pace * request.num_output_tokens
        return request.arrival_time + (inf if request.ttft_target_s is None else request.ttft_target_s)

    def rank(self, request: Request) -> float:  # noqa: D102
        (self._resumed if request.output_token_ids else self._due).push(request, self.deadline(request))
        return 0.0

    def reserve(self, request: Request) -> int:  # noqa: D102
        return request.num_tokens

    def _key(self, request: Request) -> tuple[bool, float, float, int]:
        due = self.deadline(request)
        return due < self.now and not request.output_token_ids, due, request.arrival_time, request.order

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        for gone in [r for r in self._first_s if r.is_finished]:
            del self._first_s[gone]
        while (head := self._due.head) is not None and self._key(head)[0]:
            self._late.push(self._due.pop(), self.deadline(head))
        offers = (lane.offers() for lane in (self._resumed, self._due, self._late))
        yield from everything(merge(sorted(running, key=self._key), *offers, key=self._key))
