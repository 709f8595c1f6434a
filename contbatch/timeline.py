"""A run over time: who waits, what is taken and what comes out, second by second."""

import numpy as np
import pandas as pd

from contbatch.checks import require, require_positive, require_type
from contbatch.errors import InvalidRequestError
from contbatch.metrics import Result

MAX_ROWS = 1_000_000
STATES = ["waiting", "seats", "held_seats", "live_pages"]


def over_time(result: Result, every_s: float) -> pd.DataFrame:
    """Return a row for each `every_s` seconds, from the first arrival to the end of the last step; the last is shorter.

    `waiting` (the queue), `seats`, `held_seats` and `live_pages` are means over time, each step weighing what it took
    and nothing counting while the engine idles. `page_use` is `live_pages` over the pool. `busy`: share of the time in
    steps. `arrivals_per_s`, `finished_per_s`, `output_tokens_per_s`: numbers within the row, over its seconds; tokens
    count when their step ends.

    Raises
    ------
    DetailError
        The run kept no rows of single steps.
    InvalidRequestError
        `every_s` is no finite number > 0, or so small that there are more than `MAX_ROWS` rows.
    """
    require_type("result", result, Result)
    [every_s] = require_positive(InvalidRequestError, every_s=every_s)
    result.require_detail("over_time()")
    steps, requests, seconds = result.steps, result.requests, result.duration_s
    names = [*STATES, "busy", "page_use", "arrivals_per_s", "finished_per_s", "output_tokens_per_s"]
    if steps.empty or not seconds > 0:
        return pd.DataFrame(columns=names, index=pd.Index([], name="start_s"), dtype=float)
    least = seconds / MAX_ROWS
    require(every_s >= least, "every_s", every_s, f"at least {least:.3g} s, or there are more than {MAX_ROWS} rows")
    first, last = float(requests.arrival_s.min()), result.end_s
    edges = np.append(first + every_s * np.arange(np.ceil(seconds / every_s)), last)
    width = np.diff(edges)
    starts = steps.start_s.to_numpy()
    lengths = (steps.elapsed_s + steps.host_s).to_numpy()
    ends = starts + lengths
    table = pd.DataFrame(index=pd.Index(edges[:-1], name="start_s"))
    values = {name: steps[name].to_numpy(float) for name in STATES} | {"busy": np.ones(len(steps))}
    for name, value in values.items():
        table[name] = _integral(starts, ends, value, lengths, edges) / width
    table["page_use"] = table.live_pages / result.num_pages
    done = requests[requests.finish_reason.isin(["stop", "length"])]
    counted = {
        "arrivals_per_s": (requests.arrival_s, None),
        "finished_per_s": (done.finished_s, None),
        "output_tokens_per_s": (ends, steps.sampled_tokens),
    }
    for name, (times, weights) in counted.items():
        inside = np.clip(times, first, last)  # rounding may put the end of the last step behind the last edge
        table[name] = np.histogram(inside, edges, weights=weights)[0] / width
    return table


def _integral(
    starts: np.ndarray, ends: np.ndarray, values: np.ndarray, lengths: np.ndarray, edges: np.ndarray
) -> np.ndarray:
    """Integrate steps of constant value between consecutive edges; nothing between one step and the next."""
    after = np.cumsum(values * lengths)
    times = np.column_stack([starts, ends]).ravel()
    sums = np.column_stack([np.append(0.0, after[:-1]), after]).ravel()
    between: np.ndarray = np.diff(np.interp(edges, times, sums))
    return between
