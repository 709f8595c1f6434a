"""Rows of steps, kept as stretches of like steps: the row of each step is worked out when the table is asked for."""

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
    *("decode_context", "prefill_context", "prefill_pairs", "sampled_tokens", "left"),
]
"""Integers of a step, in the order of the table's columns."""
STEP_COLUMNS = ["step", "start_s", "elapsed_s", "host_s", *COUNTS, "internal_slots", "num_steps"]
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
        self._stretches: list[tuple[int, ...]] = []  # first step, number of steps, growth, counts
        self._live_pages: list[int] = []  # these, and the next three, by step
        self._starts: list[float] = []
        self._elapsed: list[float] = []
        self._host: list[float] = []
        self._means: list[dict[str, float]] = []

    def add(self, step: int, stretch: Stretch, host_s: float, counts: tuple[int, ...], growth: int = 0) -> None:
        """Add a stretch.

        Parameters
        ----------
        step : int
            Number of the first.
        stretch : Stretch
        host_s : float
            Seconds of each of its steps.
        counts : tuple of int
            The others of `COUNTS`, of the first step; `left` of the last.
        growth : int
            By how much `kv_tokens` and `decode_context` are larger in each step than in the one before.
        """
        self._stretches.append((step, len(stretch.starts), growth, *counts))
        self._live_pages += stretch.live_pages
        self._starts += stretch.starts
        self._elapsed += stretch.elapsed
        self._host += [host_s] * len(stretch.starts)
        if not self.detail and len(self._starts) >= SUMMED:
            self._sum_up()

    def frame(self) -> "pd.DataFrame":
        """Make the table of what was added so far; `internal_slots` is yet to be filled in."""
        import pandas as pd

        if self.detail:
            return pd.DataFrame(self._columns(), copy=False)
        self._sum_up()
        return pd.DataFrame(self._means, columns=STEP_COLUMNS)

    def _columns(self) -> dict[str, NDArray[Any]]:
        names = ["step", "num_steps", "growth", *(name for name in COUNTS if name != "live_pages")]
        table = np.array(self._stretches, np.int64).reshape(-1, len(names))
        lengths = table[:, 1]
        last = np.cumsum(lengths)
        nth = np.arange(len(self._starts)) - np.repeat(last - lengths, lengths)  # within its stretch
        columns: dict[str, NDArray[Any]] = dict(zip(names, np.repeat(table.T, lengths, axis=1), strict=True))
        columns["step"] += nth
        columns["kv_tokens"] += nth * columns["growth"]
        columns["decode_context"] += nth * columns["growth"]
        columns["left"] = np.where(nth == columns["num_steps"] - 1, columns["left"], 0)
        columns["num_steps"] = np.ones_like(nth)
        columns["live_pages"] = np.array(self._live_pages, np.int64)
        seconds = {"start_s": self._starts, "elapsed_s": self._elapsed, "host_s": self._host}
        columns |= {name: np.array(values, np.float64) for name, values in seconds.items()}
        columns |= {name: columns[name].astype(bool) for name in ("seats_bound", "tokens_bound", "pages_bound")}
        columns["internal_slots"] = np.zeros_like(nth)
        return {name: columns[name] for name in STEP_COLUMNS}

    def _sum_up(self) -> None:
        if not self._starts:
            return
        columns = self._columns()
        row = {name: float(values.mean()) for name, values in columns.items()}
        first, start_s = int(columns["step"][0]), float(columns["start_s"][0])
        self._means.append(row | {"step": first, "start_s": start_s, "num_steps": len(self._starts)})
        for rows in (self._stretches, self._live_pages, self._starts, self._elapsed, self._host):
            rows.clear()
