"""Rows of the requests that left: what is noted of each, and the table worked out from all of them at once."""

from typing import TYPE_CHECKING, Any

import numpy as np

from contbatch.life import TokenTimes
from contbatch.request import Request

if TYPE_CHECKING:
    import pandas as pd

NOTED = [
    *("request_id", "sample", "client_id", "arrival_s", "admitted_s", "first_token_s", "finished_s", "generated_s"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "preemptions", "max_itl_s"),
    *("ttft_target_s", "tpot_target_s"),
]
REQUEST_COLUMNS = [
    *("request_id", "sample", "client_id", "arrival_s", "admitted_s", "first_token_s", "finished_s", "generated_s"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "preemptions", "queue_s", "ttft_s", "tpot_s"),
    *("e2e_s", "normalized_latency_s", "max_itl_s", "ttft_target_s", "tpot_target_s"),
]


class RequestRows:
    """Collects requests that left, and makes their table."""

    def __init__(self) -> None:
        self._values: list[object] = []
        """Row after row: a container for each would be looked through for garbage."""

    def add(self, request: Request, admitted_s: float, made: TokenTimes, released_s: float | None = None) -> None:
        """Add a request whose tokens reached the client as they were made, or all together at `released_s`."""
        together = released_s is not None and made.count > 0
        first, last = (released_s, released_s) if together else (made.first_s, made.last_s)
        self._values += (
            request.request_id,
            request.sample_index,
            request.client_id,
            request.arrival_time,
            admitted_s,
            first,
            last,
            made.last_s,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            made.count,
            request.finish_reason,
            request.num_preemptions,
            made.longest_gap_s,
            request.ttft_target_s,
            request.tpot_target_s,
        )

    def frame(self) -> "pd.DataFrame":
        """Make the table of what was added so far."""
        import pandas as pd

        rows: dict[str, Any] = {name: self._values[i :: len(NOTED)] for i, name in enumerate(NOTED)}
        rows |= {name: np.array(values, np.float64) for name, values in rows.items() if name.endswith("_s")}
        arrival, first, last = (rows[name] for name in ("arrival_s", "first_token_s", "finished_s"))
        n = np.array(rows["output_tokens"], np.int64)
        in_pieces = (n > 1) & (last > first)
        rows["queue_s"] = rows["admitted_s"] - arrival
        rows["ttft_s"], rows["e2e_s"] = first - arrival, last - arrival
        rows["tpot_s"] = np.where(in_pieces, (last - first) / np.maximum(n - 1, 1), np.nan)
        rows["normalized_latency_s"] = (last - arrival) / np.maximum(n, 1)
        rows["max_itl_s"] = np.where(in_pieces, rows["max_itl_s"], np.nan)
        return pd.DataFrame({name: rows[name] for name in REQUEST_COLUMNS})
