"""Where two decision logs part, and how."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from contbatch.checks import require_type
from contbatch.decision import MOVES, REASONS
from contbatch.decision_log import DecisionLog
from contbatch.errors import DecisionLogError
from contbatch.log_check import State
from contbatch.step import BINDING

# In the order of cause and effect within a step.
DECISIONS = {
    "step": "the number of the step",
    "queued": "who began to wait",
    "plan": "what the policy asked for",
    "preempted": "who was preempted",
    "admitted": "who was admitted",
    "restarted": "who began again in a longer run",
    "bound": "the limits that were binding",
    "grants": "who computes what",
    "forked": "whose further samples draw a token",
    "moves": "which pages move",
    "tables": "page tables",
    "host": "host pages",
    "uncached": "the pages that are cached no more",
    "cached": "the pages that became cached",
    "free": "the number of free pages",
    "sampled": "the tokens made",
    "lost": "whose work was lost",
    "left": "who left",
}
# Looked at last: on a real runner no two clocks are equal.
WHAT = {**DECISIONS, "rows": "whether there is one", "now": "when it began", "settings": "the schedulers' settings"}

_Item = tuple[int | str | None, str]  # whom it concerns, and what it says


@dataclass(frozen=True)
class Difference:
    """The first decision on which two logs differ."""

    step: int
    row: int
    field: str
    """Of `Decision`; "rows" if one log goes on where the other ends; "settings" if nothing else differs."""
    request_id: int | str | None
    """Whom it concerns, if anybody."""
    first: str
    second: str
    """What each log says."""
    before: State | None
    """While the step before ran, the same in both logs; None at the first row."""
    settings: tuple[str, ...]
    """Settings of the schedulers that differ, such as "max_num_seqs: 2 and 3"."""

    def __str__(self) -> str:
        text = f"step {self.step}, {WHAT[self.field]}: {self.first} in the first log, {self.second} in the second."
        if self.before is not None:
            seats, waiting, free = len(self.before.seats), len(self.before.waiting), len(self.before.free)
            text += f" One step earlier both had {seats} running, {waiting} waiting and {free} free pages."
        return text + (f" The schedulers differ in {', '.join(self.settings)}." if self.settings else "")


def _items(log: DecisionLog, place: int, name: str) -> Iterator[_Item]:
    """Yield what a row says in one field, as (request id, words); numbers of requests become ids."""
    row = log.rows[place]
    value: Any = getattr(row, name)
    if name in ("cached", "uncached", "step", "free"):
        yield None, str(value)
        return
    for item in zip(value, row.ranks, strict=True) if name == "queued" else value:
        number, *rest = item if isinstance(item, (list, tuple)) else [item]
        if name in ("bound", "moves"):
            yield None, BINDING[number] if name == "bound" else f"{MOVES[number]} from page {rest[0]} to page {rest[1]}"
            continue
        request_id, arrival = log.requests[number]
        yield request_id, _words(name, repr(request_id), rest, arrival)


def _words(name: str, who: str, rest: list[int], arrival: float) -> str:
    if name == "queued":
        return f"request {who} of rank {rest[0]}, arrived at {arrival} s"
    if name == "plan":
        return f"{rest[0]} tokens of request {who}"
    if name == "admitted":
        return f"request {who} on seat {rest[0]} with {rest[1]} tokens cached"
    if name == "tables":
        return f"pages {rest[1:]} from place {rest[0]} of request {who}"
    if name == "host":
        return f"host pages {rest} of request {who}"
    if name == "grants":
        flags = ("", ", sampling", ", padding")[rest[2]]
        return f"tokens {rest[0]} to {rest[0] + rest[1] - 1} of request {who}{flags}"
    if name == "sampled":
        return f"token {rest[0]} of request {who}"
    return f"request {who}" + (f" ({REASONS[rest[0]]})" if name == "left" else "")


Parting = tuple[int, str, int | str | None, str, str]
"""Row, field, request, and what each log says."""


def _unequal(mine: list[_Item], theirs: list[_Item], ordered: bool) -> tuple[int | str | None, str, str] | None:
    """Return whom the first items that differ concern, and both; without order, what one side lacks is "nothing"."""
    for (whom, first), (other, second) in zip_longest(mine, theirs, fillvalue=(None, "nothing more")):
        if first == second:
            continue
        if not ordered and whom not in (None, other) and whom not in {name for name, _ in theirs}:
            return whom, first, "nothing"
        if not ordered and other not in (None, whom) and other not in {name for name, _ in mine}:
            return other, "nothing", second
        return other if whom is None else whom, first, second
    return None


def _parting(one: DecisionLog, other: DecisionLog) -> Parting | None:
    both = min(len(one), len(other))
    for place in range(both):
        for name in DECISIONS:
            ordered = name not in ("tables", "host", "sampled", "lost", "left")
            if found := _unequal(list(_items(one, place, name)), list(_items(other, place, name)), ordered):
                return place, name, *found
    if len(one) != len(other):
        first, second = ("a step" if len(log) > both else "the end" for log in (one, other))
        return both, "rows", None, first, second
    for place in range(both):
        if one.rows[place].now != other.rows[place].now:
            return place, "now", None, f"{one.rows[place].now} s", f"{other.rows[place].now} s"
    return None


def first_difference(one: DecisionLog, other: DecisionLog) -> Difference | None:
    """Return the first decision on which two logs differ.

    A difference in the steps' times alone counts if there is no other; then one of the schedulers' settings alone.
    """
    require_type("what is compared", other, DecisionLog, DecisionLogError)
    names = {**one.settings, **other.settings}
    each = {name: (one.settings.get(name), other.settings.get(name)) for name in names}
    settings = tuple(f"{name}: {first} and {second}" for name, (first, second) in each.items() if first != second)
    parting = _parting(one, other)
    if parting is None:
        return Difference(0, 0, "settings", None, "these", "those", None, settings) if settings else None
    longer, row = max(one, other, key=len), parting[0]
    before = list(islice(longer.states(), row))
    return Difference(longer.rows[row].step, *parting, before[-1] if before else None, settings)
