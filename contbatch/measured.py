"""A cost model fitted to the steps of a real run on this very machine."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from contbatch.checks import is_int, python_number, require
from contbatch.cost import Linear
from contbatch.errors import CostModelError, MissingDependencyError
from contbatch.metrics import Result

FEATURES = {
    "many_rows_s": "many_rows",
    "token_s": "rows",
    "seq_s": "seqs",
    "logits_s": "sampled_tokens",
    "decode_context_s": "decode_context",
    "cold_context_s": "cold_context",
    "prefill_pair_s": "prefill_pairs",
    "resize_s": "resized",
}
"""Coefficient of `Linear`, and the column that it multiplies: of `Result.steps`, or worked out by `_columns`."""
NEEDED = ["elapsed_s", "host_s", "tokens", "seqs", "sampled_tokens", "decode_context", "prefill_pairs"]
MIN_STEPS = 30
REWEIGHTINGS = 5
"""Least squares in turn with weights from the last fit; three are enough for three digits."""
ROWS = list(product((1, 2), range(17)))
"""`min_rows` and `few_rows` to choose from, the simplest first: tiles of a matrix product are 16 rows high at most."""
ENOUGH = 2000
"""Steps, about, to choose by, evenly spread over all."""
WORTH = 1e-3
"""By how much another choice must lower the cross-validated error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Linear):
    """A `Linear` whose coefficients come from measured steps; make it with `Measured.fit`.

    `error` and `bias` are cross-validated: each step is predicted by a fit that did not see it. So are `few_rows` and
    `min_rows` chosen.
    """

    num_steps: int
    """Steps fitted to."""
    error: float
    """Mean of |predicted - measured| / measured over steps."""
    bias: float
    """Σ predicted / Σ measured - 1: how far off the time of the whole run is."""
    unseen: tuple[str, ...] = ()
    """Coefficients of which these steps say nothing: what they multiply never changed, or was not recorded."""

    @classmethod
    def fit(cls, run: Result | pd.DataFrame, *, folds: int = 5) -> "Measured":
        """Fit to a result, or to step rows such as those of several runs put together.

        The time of a step is `elapsed_s + host_s`, so that a simulation, which has no host time, keeps the clock of
        the real run. Least squares with coefficients ≥ 0 (Lawson and Hanson 1974), of errors relative to the prediction
        (reweighted in turn; McCullagh and Nelder 1989, ch. 8): relative to the measurement, slow steps would count
        less than fast ones, and a noisy machine would look faster than it is. So warm up first, or leave the first
        steps out; none between, as a step's cost hangs on the number of tokens in the one before.

        Parameters
        ----------
        run : Result or DataFrame
            At least `MIN_STEPS` steps, with prompts of several lengths among them and decodes of several contexts.
        folds : int
            Of the cross-validation; step i is in fold i mod folds.

        Raises
        ------
        CostModelError
            Too few steps, columns missing, numbers of steps that leave some out, a time that is not > 0, or too little
            variety to tell the costs apart.
        """
        folds = python_number(folds)
        require(is_int(folds, 2, MIN_STEPS), "folds", folds, f"an integer in [2, {MIN_STEPS}]", CostModelError)
        steps = _steps_of(run)
        times = (steps["elapsed_s"] + steps["host_s"]).to_numpy(dtype=float)
        _check(steps, times)
        if not steps["shared_context"].any():  # nobody can tell what memory takes: all counts as the other cost
            steps = steps.assign(shared_context=steps["decode_context"])
        some = slice(None, None, 1 + len(times) // ENOUGH)
        errors = {rows: _cross_validate(_columns(steps, *rows)[some], times[some], folds)[0] for rows in ROWS}
        best = min(errors, key=lambda rows: errors[rows])
        if errors[ROWS[0]] - errors[best] < WORTH:
            best = ROWS[0]
        columns = _columns(steps, *best)
        error, bias = _cross_validate(columns, times, folds)
        step_s, *rest = _fit(columns, times).tolist()
        varied = dict(zip(FEATURES, np.ptp(columns[:, 1:], axis=0) > 0, strict=True))
        return cls(
            step_s=step_s,
            **dict(zip(FEATURES, rest, strict=True)),
            min_rows=best[0],
            few_rows=best[1],
            num_steps=len(times),
            error=error,
            bias=bias,
            unseen=tuple(name for name in FEATURES if not varied[name] and name != "many_rows_s"),
        )

    def predict(self, run: Result | pd.DataFrame) -> pd.Series:
        """Return the seconds expected of each step of a run: where they are off, a cost is missing.

        Raises
        ------
        CostModelError
            As of `fit`, for tables that lack something.
        """
        steps = _steps_of(run)
        coefficients = [self.step_s, *(getattr(self, name) for name in FEATURES)]
        return pd.Series(_columns(steps, self.min_rows, self.few_rows) @ coefficients, steps.index)


def _steps_of(run: Result | pd.DataFrame) -> pd.DataFrame:
    """Return the rows of single steps; without a column `shared_context` nothing was shared."""
    steps = run.steps if isinstance(run, Result) else run
    require(isinstance(steps, pd.DataFrame), "run", run, "a Result or a DataFrame", CostModelError)
    if missing := [column for column in NEEDED if column not in steps]:
        raise CostModelError(f"the steps lack the column {missing[0]!r}; needed are {', '.join(NEEDED)}")
    if "num_steps" in steps and (steps["num_steps"] != 1).any():
        raise CostModelError("each row must be a single step: run with detail=True")
    if "step" in steps:
        gaps = np.flatnonzero(steps["step"].diff() > 1)  # where it falls, another run begins
        if gaps.size:
            last, following = steps["step"].iloc[gaps[0] - 1 : gaps[0] + 1]
            raise CostModelError(
                f"step {following} follows step {last}: rows between them are missing or in another order, "
                "so that nobody can tell which steps changed their number of tokens"
            )
    return steps if "shared_context" in steps else steps.assign(shared_context=0)


def _columns(steps: pd.DataFrame, min_rows: int, few_rows: int) -> np.ndarray:
    """Return what the constant and the coefficients multiply: (steps, 1 + len(FEATURES))."""
    tokens = steps["tokens"]
    named = steps.assign(
        many_rows=(tokens > few_rows) & (few_rows > 0),
        rows=(tokens - few_rows).clip(lower=0),
        cold_context=steps["decode_context"] - steps["shared_context"],
        resized=tokens.clip(lower=min_rows).diff() != 0,
    )
    return np.column_stack([np.ones(len(steps)), named[list(FEATURES.values())].to_numpy(dtype=float)])


def _check(steps: pd.DataFrame, times: np.ndarray) -> None:
    if len(times) < MIN_STEPS:
        raise CostModelError(f"{len(times)} steps are too few to fit a cost model to; at least {MIN_STEPS} are needed")
    sums = steps[[*NEEDED, "shared_context"]].to_numpy(dtype=float)
    if not (np.isfinite(sums).all() and (times > 0).all()):
        raise CostModelError("every step must have finite sums and a time > 0")
    for name in ("tokens", "decode_context", "prefill_pairs"):
        if (number := steps[name].nunique()) < 3:
            raise CostModelError(
                f"{name} takes {number} value(s) in these steps, at least 3 are needed: "
                "measure a run that mixes prompts and answers of several lengths"
            )


def _cross_validate(columns: np.ndarray, times: np.ndarray, folds: int) -> tuple[float, float]:
    """Return `Measured.error` and `bias`; step i is in fold i mod folds."""
    fold = np.arange(len(times)) % folds
    predicted = np.empty_like(times)
    for i in range(folds):
        held = fold == i
        predicted[held] = columns[held] @ _fit(columns[~held], times[~held])
    return float(np.mean(np.abs(predicted - times) / times)), float(predicted.sum() / times.sum() - 1)


def _fit(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return constant and coefficients, each ≥ 0, by least squares of errors relative to the last prediction."""
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise MissingDependencyError("fitting a cost model needs scipy: pip install scipy") from error
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    weights = 1 / times
    for _ in range(REWEIGHTINGS):
        coefficients, _ = nnls(columns / scale * weights[:, None], times * weights)
        weights = 1 / np.maximum(columns @ (coefficients / scale), times.min())
    return np.asarray(coefficients / scale)
