"""A cost model fitted to the steps of a real run on this very machine."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from contbatch.checks import is_int, require
from contbatch.cost import Linear
from contbatch.errors import CostModelError, MissingDependencyError
from contbatch.metrics import Result

FEATURES = {
    "token_s": "tokens",
    "seq_s": "seqs",
    "logits_s": "sampled_tokens",
    "decode_context_s": "decode_context",
    "prefill_pair_s": "prefill_pairs",
    "resize_s": "resized",
}
"""Coefficient of `Linear`, and the column of `Result.steps` that it multiplies; `resized` is worked out."""
MIN_STEPS = 30
REWEIGHTINGS = 5
"""Least squares in turn with weights from the last fit; three are enough for three digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Linear):
    """A `Linear` whose coefficients come from measured steps; make it with `Measured.fit`.

    `error` and `bias` are cross-validated: each step is predicted by a fit that did not see it.
    """

    num_steps: int
    """Steps fitted to."""
    error: float
    """Mean of |predicted - measured| / measured over steps."""
    bias: float
    """Σ predicted / Σ measured - 1: how far off the time of the whole run is."""

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
        require(is_int(folds, 2, MIN_STEPS), "folds", folds, f"an integer in [2, {MIN_STEPS}]", CostModelError)
        steps = _steps_of(run)
        features = steps[list(FEATURES.values())].to_numpy(dtype=float)
        times = (steps["elapsed_s"] + steps["host_s"]).to_numpy(dtype=float)
        _check(features, times)
        fold = np.arange(len(times)) % folds
        predicted = np.empty_like(times)
        for i in range(folds):
            held = fold == i
            constant, *rest = _fit(features[~held], times[~held])
            predicted[held] = constant + features[held] @ np.array(rest)
        step_s, *rest = _fit(features, times).tolist()
        return cls(
            step_s=step_s,
            **dict(zip(FEATURES, rest, strict=True)),
            num_steps=len(times),
            error=float(np.mean(np.abs(predicted - times) / times)),
            bias=float(predicted.sum() / times.sum() - 1),
        )

    def predict(self, run: Result | pd.DataFrame) -> pd.Series:
        """Return the seconds expected of each step of a run: where they are off, a cost is missing.

        Raises
        ------
        CostModelError
            As of `fit`, for tables that lack something.
        """
        steps = _steps_of(run)
        seconds = pd.Series(self.step_s, steps.index)
        for name, column in FEATURES.items():
            seconds += getattr(self, name) * steps[column]
        return seconds


def _steps_of(run: Result | pd.DataFrame) -> pd.DataFrame:
    """Return the rows of single steps with the columns of `FEATURES`."""
    steps = run.steps if isinstance(run, Result) else run
    require(isinstance(steps, pd.DataFrame), "run", run, "a Result or a DataFrame", CostModelError)
    columns = ["elapsed_s", "host_s", *(name for name in FEATURES.values() if name != "resized")]
    if missing := [column for column in columns if column not in steps]:
        raise CostModelError(f"the steps lack the column {missing[0]!r}; needed are {', '.join(columns)}")
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
    return steps.assign(resized=steps["tokens"].diff() != 0)


def _check(features: np.ndarray, times: np.ndarray) -> None:
    if len(times) < MIN_STEPS:
        raise CostModelError(f"{len(times)} steps are too few to fit a cost model to; at least {MIN_STEPS} are needed")
    if not (np.isfinite(features).all() and np.isfinite(times).all() and (times > 0).all()):
        raise CostModelError("every step must have finite sums and a time > 0")
    for name in ("tokens", "decode_context", "prefill_pairs"):
        values = features[:, list(FEATURES.values()).index(name)]
        if np.unique(values).size < 3:
            raise CostModelError(
                f"{name} takes {np.unique(values).size} value(s) in these steps, at least 3 are needed: "
                "measure a run that mixes prompts and answers of several lengths"
            )


def _fit(features: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return constant and coefficients, each ≥ 0, by least squares of errors relative to the last prediction."""
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise MissingDependencyError("fitting a cost model needs scipy: pip install scipy") from error
    columns = np.column_stack([np.ones(len(times)), features])
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    weights = 1 / times
    for _ in range(REWEIGHTINGS):
        coefficients, _ = nnls(columns / scale * weights[:, None], times * weights)
        weights = 1 / np.maximum(columns @ (coefficients / scale), times.min())
    return np.asarray(coefficients / scale)
