"""A workload that was recorded: requests of a trace, each with its time and its lengths."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from contbatch.arrivals import Arrivals
from contbatch.checks import is_int, python_number, require, require_positive, take_python_numbers, tuple_of
from contbatch.errors import WorkloadError
from contbatch.portable import uniforms
from contbatch.turn import Client, Turn
from contbatch.workload import Workload, require_seeded

_require = partial(require, error=WorkloadError)


@dataclass(frozen=True)
class Trace(Workload):
    """Turns read from a file; see `contbatch.traces` and `contbatch.workload_file`.

    Parameters
    ----------
    rows : sequence of Turn
        Those of a session side by side, in order.
    name : str
        Where they come from, such as the name of the file.
    num_skipped : int
        Rows left out: a prompt or an answer without tokens, as failed requests have.
    num_reordered : int
        Rows that came before a later one in the file and have been sorted by time; ties keep the file's order.
    """

    rows: tuple[Turn, ...] = field(repr=False)
    name: str
    num_skipped: int = 0
    num_reordered: int = 0

    def __post_init__(self) -> None:
        take_python_numbers(self)
        object.__setattr__(self, "rows", tuple_of(self.rows, "rows", "turns", WorkloadError))
        _require(all(isinstance(row, Turn) for row in self.rows), "rows", self.rows[:1], "turns")
        _require(isinstance(self.name, str), "name", self.name, "a string")
        for name in ("num_skipped", "num_reordered"):
            _require(is_int(getattr(self, name), 0), name, getattr(self, name), "an integer ≥ 0")

    def __len__(self) -> int:
        return len(self.rows)

    def turns(self) -> list[Turn]:
        """Return the rows."""
        return list(self.rows)

    def head(self, n: int) -> "Trace":
        """Return the first n sessions; `WorkloadError` if there are fewer."""
        sessions = self._sessions(n := python_number(n))
        return self.replace(rows=[turn for session in sessions[:n] for turn in session])

    def sample(self, n: int, seed: int = 0, *, oversample: bool = False) -> "Trace":
        """Draw n sessions at their own times, in order of these.

        Without `oversample` none is drawn twice, and asking for more than there are raises `WorkloadError`; with it
        each draw is from all of them.
        """
        n, seed = python_number(n), python_number(seed)
        require_seeded(seed, n=n)
        sessions = self._sessions(0 if oversample else n)
        _require(bool(sessions), "the number of rows to sample from", 0, "at least 1")
        u = uniforms(n if oversample else len(sessions), seed, "sample")
        chosen = (u * len(sessions)).astype(int).tolist() if oversample else u.argsort(kind="stable")[:n].tolist()
        return self.replace(rows=_numbered(sessions[i] for i in sorted(chosen)))

    def at_rate(self, rate: float) -> "Trace":
        """Stretch or shrink the times of arrival so that sessions come at `rate` a second on average."""
        [rate] = require_positive(WorkloadError, rate=rate)
        sessions = self._sessions(2)
        times = [session[0].delay_s for session in sessions]
        first, lasts = min(times), max(times) - min(times)
        _require(lasts > 0, "the time from first to last arrival", lasts, "> 0 to be scaled to a rate")
        factor = (len(sessions) - 1) / rate / lasts
        return self._arriving((at - first) * factor for at in times)

    def with_arrivals(self, arrivals: Arrivals, seed: int = 0) -> "Trace":
        """Keep the lengths, in their order, but let the sessions come when a process says."""
        require_seeded(seed := python_number(seed))
        return self._arriving(arrivals.times(len(self._sessions(0)), seed, "arrivals").tolist())

    def with_client(self, client: Client) -> "Trace":
        """Give all requests to a client."""
        return self.replace(rows=[replace(turn, client=client) for turn in self.rows])

    def _arriving(self, times: Iterable[float]) -> "Trace":
        moved = zip(self._sessions(0), times, strict=True)
        rows = [turn for (first, *rest), at in moved for turn in (replace(first, delay_s=at), *rest)]
        return self.replace(rows=rows)

    def _sessions(self, at_least: int) -> list[list[Turn]]:
        sessions: dict[int, list[Turn]] = {}
        for turn in self.rows:
            sessions.setdefault(turn.session, []).append(turn)
        limit = f"an integer in [0, {len(sessions)}], the sessions of {self.name}"
        _require(is_int(at_least, 0, len(sessions)), "the number of sessions", at_least, limit)
        return list(sessions.values())


def _numbered(sessions: Iterable[list[Turn]]) -> list[Turn]:
    return [replace(turn, session=i) for i, session in enumerate(sessions) for turn in session]
