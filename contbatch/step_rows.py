"""Rows of steps, kept as stretches of like steps: the row of each step is worked out when the table is asked for."""

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contbatch.stretch import Stretch

if TYPE_CHECKING:
    import pandas as pd

COUNTS = [
    *("seats", "held_seats", "waiting", "seqs", "tokens", "prefill_tokens"),
    *("decode_tokens", "padding_tokens", "admitted", "preempted", "cached_tokens", "live_pages", "kv_tokens"),
    *("cached_pages", "evictions", "pages_out", "pages_in", "pages_copied", "restarted"),
    *("seats_bound", "tokens_bound", "pages_bound", "external_slots"),
    *("decode_context", "prefill_context", "prefill_pairs", "shared_context", "sampled_tokens", "left"),
]
"""Integers of a step, in the order of the table's columns."""
STEP_COLUMNS = ["step", "start_s", "elapsed_s", "host_s", *COUNTS, "internal_slots", "num_steps"]
CARRIED = ["step", "num_steps", "seqs", "decode_context", "waiting", "seats_bound", "left"]
SUMMED = 1024
"""Steps in a row of a table without detail, about."""


class StepRows:
    """Collects steps and makes their table.

    Parameters
    ----------
    detail : bool
        Whether each step has a row of its own. Otherwise a row is the mean of `num_steps` consecutive ones, begins with
        the first, and memory does not grow by more than a row for each thousand steps or so.
    """

    def __init__(self, detail: bool) -> None:
        self.detail = detail
        self._counts = array("q")  # by stretch: first step, number of steps, growth, counts
        self._carried = array("q")  # by stretch of another kind: `CARRIED`
        self._times: list[float] = []  # by stretch: start, and host time of each step
        self._live_pages: list[int] = []  # by step
        self._elapsed: list[float] = []
        self._ends: list[float] = []
        self._means: list[dict[str, float]] = []

    def add(
        self,
        step: int,
        stretch: Stretch,
        host_s: float,
        counts: tuple[int, ...],
        sampled: int,
        left: int,
        growth: int = 0,
    ) -> None:
        """Add a stretch.

        Parameters
        ----------
        step : int
            Number of the first.
        stretch : Stretch
        host_s : float
            Seconds of each of its steps.
        counts : tuple of int
            The others of `COUNTS`, of the first step.
        sampled, left : int
            Tokens in each step, and who left in the last.
        growth : int
            By how much `kv_tokens` and `decode_context` are larger in each step than in the one before.
        """
        self._counts.extend((step, len(stretch.ends), growth, *counts, sampled, left))
        self._add(stretch, host_s)

    def add_carried(self, step: int, stretch: Stretch, counts: tuple[int, int, int, bool], left: int) -> None:
        """Add a stretch in which all who run are carried, and who waits is kept out by seats or else pages.

        Parameters
        ----------
        step : int
            Number of the first.
        stretch : Stretch
        counts : tuple of int
            How many run, the positions that they read in the first, how many wait, and whether for a seat.
        left : int
        """
        self._carried.extend((step, len(stretch.ends), *counts, left))
        self._add(stretch, 0.0)

    def _add(self, stretch: Stretch, host_s: float) -> None:
        start, elapsed, ends, live_pages = stretch
        self._times += (start, host_s)
        self._live_pages += live_pages
        self._elapsed += elapsed
        self._ends += ends
        if not self.detail and len(self._ends) >= SUMMED:
            self._sum_up()

    def frame(self) -> "pd.DataFrame":
        """Make the table of what was added so far; `internal_slots` is yet to be filled in."""
        import pandas as pd

        if self.detail:
            return pd.DataFrame(self._columns(), copy=False)
        self._sum_up()
        return pd.DataFrame(self._means, columns=STEP_COLUMNS)

    def _columns(self) -> dict[str, NDArray[Any]]:
        table, n = self._table(), len(self._ends)
        lengths = table["num_steps"]
        first = np.cumsum(lengths) - lengths
        nth = np.arange(n) - np.repeat(first, lengths)  # within its stretch
        none = [name for name, values in table.items() if not values.any()]
        columns: dict[str, NDArray[Any]] = dict(zip(none, np.zeros((len(none), n), np.int64), strict=True))
        columns |= {name: np.repeat(values, lengths) for name, values in table.items() if name not in columns}
        columns["step"] += nth
        columns["kv_tokens"] += nth * columns["growth"]
        columns["decode_context"] += nth * columns["growth"]
        columns["left"] = np.where(nth == columns["num_steps"] - 1, columns["left"], 0)
        columns["num_steps"] = np.ones_like(nth)
        columns["live_pages"] = np.array(self._live_pages, np.int64)
        ends, columns["start_s"] = np.array(self._ends, np.float64), np.empty(n)
        columns["start_s"][1:] = ends[:-1]
        columns["start_s"][first] = self._times[::2]
        columns["elapsed_s"] = np.array(self._elapsed, np.float64)
        columns["host_s"] = np.repeat(np.array(self._times[1::2], np.float64), lengths)
        for name in ("seats_bound", "tokens_bound", "pages_bound"):
            columns[name] = np.repeat(table[name].astype(bool), lengths)
        columns["internal_slots"] = np.zeros_like(nth)
        return {name: columns[name] for name in STEP_COLUMNS}

    def _table(self) -> dict[str, NDArray[np.int64]]:
        """Return what is counted by stretch."""
        names = ["step", "num_steps", "growth", *(name for name in COUNTS if name != "live_pages")]
        listed = np.array(self._counts, np.int64).reshape(-1, len(names)).T
        carried = dict(zip(CARRIED, np.array(self._carried, np.int64).reshape(-1, len(CARRIED)).T, strict=True))
        carried |= dict.fromkeys(("growth", "seats", "tokens", "decode_tokens", "sampled_tokens"), carried["seqs"])
        carried["kv_tokens"] = carried["decode_context"]
        carried["pages_bound"] = (carried["waiting"] > 0) & (carried["seats_bound"] == 0)
        none = np.zeros_like(carried["step"])
        order = np.argsort(np.concatenate([listed[0], carried["step"]]))
        return {
            name: np.concatenate([values, carried.get(name, none)])[order]
            for name, values in zip(names, listed, strict=True)
        }

    def _sum_up(self) -> None:
        if not self._ends:
            return
        columns = self._columns()
        row = {name: float(values.mean()) for name, values in columns.items()}
        first, start_s = int(columns["step"][0]), float(columns["start_s"][0])
        self._means.append(row | {"step": first, "start_s": start_s, "num_steps": len(self._ends)})
        del self._counts[:], self._carried[:]
        for rows in (self._times, self._live_pages, self._elapsed, self._ends):
            rows.clear()
