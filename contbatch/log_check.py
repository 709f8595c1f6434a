"""Replay: from a decision log alone, who sat, waited and held which pages while each step ran."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from contbatch.decision import MOVES, PADDING, Decision
from contbatch.decision_log import DecisionLog
from contbatch.errors import DecisionLogError


@dataclass(frozen=True)
class State:
    """The scheduler while a step ran."""

    step: int
    now: float
    """Seconds on the engine's clock."""
    seats: dict[int, int | str]
    """Request ids by seat."""
    tables: dict[int | str, tuple[int, ...]]
    """Page ids in token order, by request id."""
    computed: dict[int | str, int]
    """Tokens whose K/V were in those pages when the step began, by request id."""
    waiting: tuple[int | str, ...]
    """Request ids in the order in which they wait."""
    host_tables: dict[int | str, tuple[int, ...]]
    """Host page ids in token order, by the id of a waiting request that was swapped out."""
    free: frozenset[int]
    cached: frozenset[int]
    """Pages that nobody holds, but whose content is kept."""
    row: Decision


@dataclass
class _Machine:
    """A scheduler's state by request number, which rows change."""

    log: DecisionLog
    ranks: dict[int, float] = field(default_factory=dict)
    """Of the waiting."""
    seats: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    host: dict[int, list[int]] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def begin(self, row: Decision) -> None:
        """Apply what was decided before the step ran."""
        for number in row.preempted:
            self._require(number in self.seats, f"request {number} lost a seat that it did not have")
            self._vacate(number)
        for number, rank in zip(row.queued, row.ranks, strict=True):
            self._require(
                self._is_live(number) and number not in self.seats, f"request {number} can't have begun to wait"
            )
            self.ranks[number] = rank
        for number, seat, computed in row.admitted:
            free = 0 <= seat < self.log.settings["max_num_seqs"] and seat not in self.seats.values()  # type: ignore[operator]
            self._require(number in self.ranks and free, f"request {number} can't have taken seat {seat}")
            del self.ranks[number]
            self.seats[number], self.tables[number], self.computed[number] = seat, [], computed
        for number in row.restarted:
            self.computed[number] = 0
        for number, place, *pages in row.tables:
            self._require(0 <= place <= len(self.tables[number]), f"request {number} has no page {place} in its table")
            self.tables[number][place:] = pages
        self.cached = (self.cached - set(row.uncached)) | set(row.cached)
        self._check_pages(row)
        self._move(row)
        self._check_grants(row)

    def end(self, row: Decision) -> None:
        """Apply what came of the step."""
        for number, start, num_tokens, _ in row.grants:
            if number not in row.lost:
                self.computed[number] = start + num_tokens
        for number, _ in row.left:
            self._require(self._is_live(number), f"request {number} left, but was not there")
            self.gone.add(number)
            for by_number in (self.ranks, self.host):
                by_number.pop(number, None)
            self._vacate(number)

    def state(self, row: Decision) -> State:
        """Show the state by request id."""
        ids = [name for name, _ in self.log.requests]
        waiting = sorted(self.ranks, key=lambda n: (self.ranks[n], self.log.requests[n][1], n))
        live = {page for table in self.tables.values() for page in table}
        return State(
            row.step,
            row.now,
            {seat: ids[number] for number, seat in sorted(self.seats.items(), key=lambda item: item[1])},
            {ids[number]: tuple(table) for number, table in self.tables.items()},
            {ids[number]: computed for number, computed in self.computed.items()},
            tuple(ids[number] for number in waiting),
            {ids[number]: tuple(pages) for number, pages in self.host.items()},
            frozenset(range(self._setting("num_pages"))) - live - self.cached,
            frozenset(self.cached),
            row,
        )

    def _is_live(self, number: int) -> bool:
        return 0 <= number < len(self.log.requests) and number not in self.gone

    def _vacate(self, number: int) -> None:
        for by_number in (self.seats, self.tables, self.computed):
            by_number.pop(number, None)

    def _check_pages(self, row: Decision) -> None:
        size = self._setting("page_size")
        holders = Counter(page for table in self.tables.values() for page in table)
        pages = set(range(self._setting("num_pages")))
        for number, table in self.tables.items():
            self._require(set(table) <= pages, f"request {number} holds pages {table} of {len(pages)}")
            contiguous = self.log.settings["layout"] == "paged" or all(b == a + 1 for a, b in pairwise(table))
            self._require(contiguous and len(set(table)) == len(table), f"request {number} can't hold pages {table}")
            for place, page in enumerate(table):  # shared pages are never written
                sole = holders[page] == 1 or (place + 1) * size <= self.computed[number]
                self._require(sole, f"page {page}, in which request {number} may write, has {holders[page]} holders")
        both = self.cached & holders.keys()
        self._require(not both and self.cached <= pages, f"pages {sorted(both or self.cached)} can't be cached")
        free = len(pages) - len(holders) - len(self.cached)
        self._require(free == row.free, f"{free} pages are free, not {row.free}")

    def _move(self, row: Decision) -> None:
        """Follow the page moves: what went to the host came from the device, and comes back to where it was."""
        came = [zip(self.host.get(n, ()), self.tables[n], strict=False) for n, _, _ in row.admitted]
        back = {pair for pairs in came for pair in pairs}
        for number, *pages in row.host:
            self.host[number] = pages
        filled = {page for number, *_ in row.admitted for page in self.tables[number]}
        host_pages = [page for _, *pages in row.host for page in pages]
        for kind, source, target in row.moves:
            move, device = MOVES[kind], range(self._setting("num_pages"))
            possible = (source, target) in back if move == "in" else source in device
            possible = possible and target in (host_pages if move == "out" else filled)
            self._require(possible, f"nothing can have gone {move} from page {source} to page {target}")
        out = [target for kind, _, target in row.moves if MOVES[kind] == "out"]
        self._require(
            sorted(out) == sorted(host_pages), f"pages went out to {out}, but host pages {host_pages} were taken"
        )
        self.host = {number: pages for number, pages in self.host.items() if pages}
        held = [page for pages in self.host.values() for page in pages]
        known = set(held) <= set(range(self._setting("num_host_pages")))
        self._require(known and len(set(held)) == len(held), f"requests can't hold host pages {self.host}")
        self._require(
            self.host.keys() <= self.ranks.keys(), f"requests {[*self.host]} hold host pages, but not all wait"
        )

    def _check_grants(self, row: Decision) -> None:
        size = self._setting("page_size")
        for number, start, num_tokens, flags in row.grants:
            computed = self.computed[number] - (flags == PADDING)
            self._require(start == computed, f"request {number} has {computed} tokens, so {start} can't come next")
            room = len(self.tables[number]) * size
            self._require(0 < num_tokens <= room - start, f"request {number} has no room for {num_tokens} tokens")
        for number in row.forked:
            waits_for_parent = self._is_live(number) and number not in self.ranks and number not in self.seats
            self._require(waits_for_parent, f"request {number} can't be forked")
        total, budget = sum(num_tokens for _, _, num_tokens, _ in row.grants), self._setting("max_num_batched_tokens")
        self._require(total <= budget, f"{total} tokens exceed the budget of {budget}")

    def _setting(self, name: str) -> int:
        return int(self.log.settings[name])

    def _require(self, holds: bool, fault: str) -> None:
        if not holds:
            raise DecisionLogError(fault)


def replayed(log: DecisionLog) -> Iterator[State]:
    """Yield the state while each step ran.

    Raises
    ------
    DecisionLogError
        At the first row that can't have happened after those before it.
    """
    machine = _Machine(log)
    for place, row in enumerate(log.rows):
        try:
            machine.begin(row)
            state = machine.state(row)
            machine.end(row)
        except (DecisionLogError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            fault = str(error) if isinstance(error, DecisionLogError) else f"malformed: {error!r}"
            raise DecisionLogError(f"step {getattr(row, 'step', '?')} (row {place}): {fault}") from error
        yield state
