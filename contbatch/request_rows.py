"""Rows of the requests that left: what is noted of each, and the table worked out from all of them at once."""

import numpy as np
import pandas as pd

from contbatch.life import TokenTimes
from contbatch.request import Request

NOTED = [
    *("request_id", "sample", "client_id", "arrival_s", "admitted_s", "first_token_s", "finished_s", "generated_s"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "preemptions", "max_itl_s"),
]
REQUEST_COLUMNS = [
    *("request_id", "sample", "client_id", "arrival_s", "admitted_s", "first_token_s", "finished_s", "generated_s"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "preemptions", "queue_s", "ttft_s", "tpot_s"),
    *("e2e_s", "normalized_latency_s", "max_itl_s"),
]


class RequestRows:
    """Collects requests that left, and makes their table."""

    def __init__(self) -> None:
        self._rows: list[tuple[object, ...]] = []

    def add(self, request: Request, admitted_s: float, made: TokenTimes, released_s: float | None = None) -> None:
        """Add a request whose tokens reached the client as they were made, or all together at `released_s`."""
        together = released_s is not None and made.count > 0
        first, last = (released_s, released_s) if together else (made.first_s, made.last_s)
        self._rows.append(
            (
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
            )
        )

    def frame(self) -> pd.DataFrame:
        """Make the table of what was added so far."""
        rows = pd.DataFrame(self._rows, columns=NOTED)
        for name in NOTED:
            if name.endswith("_s"):
                rows[name] = np.array(rows[name], np.float64)
        arrival, first, last, n = (rows[name] for name in ("arrival_s", "first_token_s", "finished_s", "output_tokens"))
        in_pieces = (n > 1) & (last > first)
        rows["queue_s"] = rows["admitted_s"] - arrival
        rows["ttft_s"], rows["e2e_s"] = first - arrival, last - arrival
        rows["tpot_s"] = ((last - first) / (n - 1).clip(lower=1)).where(in_pieces)
        rows["normalized_latency_s"] = (last - arrival) / n.clip(lower=1)
        rows["max_itl_s"] = rows["max_itl_s"].where(in_pieces)
        return rows[REQUEST_COLUMNS]
