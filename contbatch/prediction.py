"""How far a simulated run is from the measured runs that it predicts."""

from collections.abc import Collection, Sequence

import pandas as pd

from contbatch.checks import is_one_of, require, tuple_of
from contbatch.metrics import Result

FIGURES = ("output_tokens_per_s", *(f"{name}_p{p}" for name in ("ttft_s", "tpot_s") for p in (50, 90, 99)))
"""Of `Result.summary`: what a server is judged by."""


def prediction_errors(simulated: Result, measured: Sequence[Result], figures: Sequence[str] = FIGURES) -> pd.DataFrame:
    """Compare a simulated run with measured ones of the same experiment.

    Parameters
    ----------
    simulated : Result
    measured : sequence of Result
        The same experiment, run once or more often on a real model.
    figures : sequence of str
        Of `Result.summary`.

    Returns
    -------
    DataFrame
        By figure: `measured`, the median over runs; `simulated`; `error`, simulated / measured - 1; and `spread`,
        (largest - smallest) / median of the measured: no prediction can be better than the runs agree.
        NaN where a figure is undefined.

    Raises
    ------
    InvalidRequestError
        There is no measured run, or something is no `Result`.
    """
    runs_ok = isinstance(measured, Collection) and len(measured) > 0
    require(runs_ok, "measured", measured, "a list of one result or more")
    for result in (simulated, *measured):
        require(isinstance(result, Result), "what is compared", result, "a Result")
    figures, known = tuple_of(figures, "figures", "names of figures"), simulated.summary().index
    for name in figures:
        require(is_one_of(name, known), "a figure", name, f"one of {', '.join(known)}")
    runs = pd.DataFrame([run.summary()[list(figures)] for run in measured])
    table = pd.DataFrame({"measured": runs.median(), "simulated": simulated.summary()[list(figures)]})
    table["error"] = table.simulated / table.measured - 1
    table["spread"] = (runs.max() - runs.min()) / table.measured
    return table
