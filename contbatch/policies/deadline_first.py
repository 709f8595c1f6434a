"""The most urgent first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import merge

from contbatch.checks import is_real, require
from contbatch.policies.deadlines import Deadlines
from contbatch.policies.lane import Lane, offers
from contbatch.policies.policy import Plan, everything
from contbatch.policies.preemptive import Preemptive
from contbatch.request import Request


@dataclass(frozen=True, repr=False)
class DeadlineFirst(Preemptive):
    """Earliest deadline first (Liu and Layland, 1973), by the next token of every request, running or waiting.

    The first token is due at arrival + `ttft_target_s`, the k-th after it k · `tpot_target_s` after the first was made;
    without a target never. Whose first token is late goes after all others, since plain EDF under overload makes
    everybody late: late means that less than `least_ttft_s` are left, the time that a first token takes at least.
    Nobody gives up seat or pages for a more urgent newcomer.
    """

    least_ttft_s: float = 0.0
    _due: Lane = field(default_factory=Lane, init=False, compare=False)
    _resumed: Lane = field(default_factory=Lane, init=False, compare=False)
    _late: Lane = field(default_factory=Lane, init=False, compare=False)
    _deadlines: Deadlines = field(default_factory=Deadlines, init=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_real(self.least_ttft_s), "least_ttft_s", self.least_ttft_s, "finite seconds")

    def rank(self, request: Request) -> float:  # noqa: D102
        lane = self._resumed if request.output_token_ids else self._due
        lane.push(request, self._deadlines.of(request, self.now))
        return 0.0

    def _key(self, request: Request) -> tuple[bool, float, float, int]:
        due = self._deadlines.of(request, self.now)
        late = due < self.now + self.least_ttft_s and not request.output_token_ids
        return late, due, request.arrival_time, request.order

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        self._deadlines.forget_finished()
        while (head := self._due.head) is not None and self._key(head)[0]:
            self._late.push(self._due.pop(), self._deadlines.of(head, self.now))
        first_of_each = offers((self._resumed, self._due, self._late), self._key)
        yield from everything(merge(sorted(running, key=self._key), first_of_each, key=self._key))
