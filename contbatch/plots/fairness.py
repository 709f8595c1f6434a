"""What each client got, over time."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from contbatch.checks import is_real, python_number, require
from contbatch.metrics import Result
from contbatch.plots.colours import line_style
from contbatch.plots.columns import table_of, title_of
from contbatch.plots.legend import name_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("client_id", "admitted_s", "generated_s", "prompt_tokens", "output_tokens")


def fairness(
    run: Result | pd.DataFrame,
    *,
    input_weight: float = 1.0,
    output_weight: float = 2.0,
    title: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the service that each client has had by the time: figure 3 of VTC (Sheng et al., OSDI 2024).

    Service is input_weight · prompt tokens + output_weight · output tokens. A request's is taken as even from its
    admission to its last token. Lines of equal slope: equal service.

    Parameters
    ----------
    run : Result or DataFrame
        A table is that of `Result.requests`. Requests that were never computed, or made no token, got nothing.
    input_weight, output_weight : float
        Those of `FairShare`.
    title : str
        What was run; if empty, what the run knows of it.
    ax : Axes, optional
        Drawn into; a new figure if None.

    Raises
    ------
    InvalidRequestError
        A table without one of the columns, or weights that are no numbers ≥ 0.
    """
    input_weight, output_weight = weights = python_number(input_weight), python_number(output_weight)
    require(all(is_real(w) and w >= 0 for w in weights), "input_weight, output_weight", weights, "numbers ≥ 0")
    table = table_of(run, "requests", *COLUMNS)
    served = table[table.admitted_s.notna() & table.generated_s.notna()]
    ax = plt.subplots(figsize=(8, 4), layout="constrained")[1] if ax is None else ax
    for place, (client, rows) in enumerate(served.groupby("client_id", sort=True, dropna=False)):
        service = input_weight * rows.prompt_tokens + output_weight * rows.output_tokens
        times, had = _service(rows.admitted_s.to_numpy(), rows.generated_s.to_numpy(), service.to_numpy(dtype=float))
        ax.plot(
            times, had, label="no client" if client is None or client != client else str(client), **line_style(place)
        )
    unit = f"{input_weight:g} · prompt + {output_weight:g} · output tokens"
    ax.set(xlabel="time [s]", ylabel=f"service so far\n[{unit}]", title=title_of(title, [table]))
    ax.set_ylim(bottom=0)
    if len(served):
        name_lines(ax)
    ax.grid(alpha=0.3)
    return ax


def _service(starts: np.ndarray, ends: np.ndarray, service: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add up services that are each even between a start and an end, where any of them begins or ends."""
    ends = np.maximum(ends, starts + 1e-6)  # what takes no time takes a microsecond
    slopes = service / (ends - starts)
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    times, slope = times[order], np.cumsum(np.concatenate([slopes, -slopes])[order])
    return times, np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(times))])
