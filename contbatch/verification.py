"""Does a saved result come out again? Simulated ones must, to the last column; of measured ones, what has no time."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from contbatch.catalog import CATALOG
from contbatch.description import code_version, describe, restore
from contbatch.errors import ExperimentError
from contbatch.experiment import Experiment, run
from contbatch.metrics import Result
from contbatch.policies import Policy
from contbatch.provenance import REQUESTS, Provenance, hardware, versions
from contbatch.request import Request
from contbatch.result_file import load_result

TOLERANCE = 1e-9
"""Of times and other real numbers: relative to the number saved where that is above 1."""
ANSWERS = ["request_id", "sample", "client_id", "prompt_tokens", "output_tokens", "finish_reason"]
"""Columns of measured requests that do not hang on the speed of the machine, if the policy cuts nobody off."""
TIMED = [
    *("duration_s", "output_tokens_per_s", "steps", "mean_seqs", "preemptions"),
    *("ttft_s_mean", "tpot_s_mean", "e2e_s_p99"),
]


@dataclass(frozen=True)
class Verification:
    """What a second run says of a saved result."""

    difference: str | None
    """The first thing that came out differently, with both values; None if nothing did."""
    changed: tuple[str, ...]
    """What is not as it was when the result was made: versions, code, hardware."""
    times: pd.DataFrame | None
    """Of a measured result: its figures, then and now. They are not compared."""

    @property
    def is_same(self) -> bool:
        """Whether the result came out again."""
        return self.difference is None

    def __str__(self) -> str:
        verdict = "the same result again" if self.is_same else f"another result: {self.difference}"
        lines = [verdict, *(f"  changed since: {change}" for change in self.changed)]
        if self.times is not None:
            lines += ["measured, not compared:", self.times.to_string(float_format="{:.4g}".format)]
        return "\n".join(lines)


def verify(path: str | os.PathLike[str], *, policy: Policy | None = None, model: str | None = None) -> Verification:
    """Run the experiment of a saved result again and compare.

    Parameters
    ----------
    path : path
        What `Result.save` wrote.
    policy : Policy, optional
        An instance of the class of one's own that made it: those outside this package can't be made from a file.
    model : str, optional
        Where the model of a measured result lies, if it is none of the catalogue.

    Returns
    -------
    Verification
        Of a simulated result every table is compared: whole numbers and texts exactly, real numbers to 1e-9. Of a
        measured one the token ids and counts of every request; its times stand side by side.

    Raises
    ------
    ResultFileError
        Nothing that can be read lies there.
    ExperimentError
        Its experiment can't be made again.
    """
    saved = load_result(path)
    provenance = saved.provenance
    assert provenance is not None  # every saved result has one
    with TemporaryDirectory() as folder:  # so that both have been through a file
        again = _run_again(provenance, policy, model, saved.detail)
        again.save(Path(folder) / "again")
        again = load_result(Path(folder) / "again")
    compared = _answers if provenance.is_measured else _everything
    times = pd.DataFrame({"then": saved.summary()[TIMED], "now": again.summary()[TIMED]})
    difference = next(compared(saved, again), None)
    return Verification(difference, tuple(_changes(provenance)), times if provenance.is_measured else None)


def _run_again(provenance: Provenance, policy: Policy | None, model: str | None, detail: bool) -> Result:
    description = dict(provenance.description)
    if policy is not None:
        if describe(policy) != description["policy"]:
            raise ExperimentError(f"policy must be what made the result, got {policy!r} with another source or fields")
        del description["policy"]
    backend = description.pop("backend")
    if not provenance.is_measured:
        return run(_experiment(description | {"backend": backend}, policy), detail=detail)
    with _llm(dict(backend["items"]), model) as llm:
        if description["type"] != REQUESTS:
            return run(_experiment(description, policy).replace(backend=llm))
        requests = [Request(**row) for row in restore(description["requests"])]
        result: Result = llm.run(requests, policy or restore(description["policy"]), **restore(description["limits"]))
        return result


def _experiment(description: dict[str, Any], policy: Policy | None) -> Experiment:
    experiment = restore(description)
    if not isinstance(experiment, Experiment):
        raise ExperimentError(f"the result describes no experiment, but {type(experiment).__name__}")
    return experiment if policy is None else experiment.replace(policy=policy)


def _llm(description: dict[str, Any], model: str | None) -> Any:
    """Load the model that `LLM.description` told of."""
    from contbatch.llm import LLM

    known = {Path(entry.member).name: name for name, entry in CATALOG.items()}
    file = description.pop("model")
    model = model or known.get(file)
    if model is None:
        raise ExperimentError(f"model {file!r} is none of the catalogue: say where it lies (model=, --model)")
    del description["max_model_len"]
    return LLM(model, **description)


def _everything(saved: Result, again: Result) -> Iterator[str]:
    """Yield what differs, in the order of the tables' columns."""
    for name in ("requests", "steps", "segments"):
        yield from _differences(name, getattr(saved, name), getattr(again, name), lambda row: f"row {row.name}")
    yield from _tokens(saved, again, "token_s", "times")
    yield from _tokens(saved, again, "token_ids", "token ids")


def _answers(saved: Result, again: Result) -> Iterator[str]:
    then, now = (
        r.requests[ANSWERS].sort_values("request_id", key=lambda names: names.map(repr), ignore_index=True)
        for r in (saved, again)
    )
    yield from _differences("requests", then, now, lambda row: f"request {row.request_id!r}")
    yield from _tokens(saved, again, "token_ids", "token ids")


def _differences(
    name: str, saved: pd.DataFrame, again: pd.DataFrame, where: Callable[[pd.Series], str]
) -> Iterator[str]:
    if list(saved) != list(again):
        yield f"{name} has the columns {', '.join(map(str, saved))}, now {', '.join(map(str, again))}"
    elif len(saved) != len(again):
        yield f"{name} has {len(saved)} rows, now {len(again)}"
    else:
        for column in saved:
            equal = _equal(saved[column], again[column])
            if not equal.all():
                row = int(np.flatnonzero(~equal)[0])
                values = f"{saved[column].iloc[row]!r}, now {again[column].iloc[row]!r}"
                others = f", and {int((~equal).sum()) - 1} other rows" if (~equal).sum() > 1 else ""
                yield f"{name}.{column} differs first, in {where(saved.iloc[row])}: {values}{others}"


def _equal(saved: pd.Series, again: pd.Series) -> np.ndarray:
    both_missing = (saved.isna() & again.isna()).to_numpy(dtype=bool)
    if saved.dtype.kind == again.dtype.kind == "f":
        then, now = saved.to_numpy(dtype=float), again.to_numpy(dtype=float)
        equal = np.abs(now - then) <= TOLERANCE * np.maximum(1, np.abs(then))
    else:
        pairs = zip(saved.astype(object), again.astype(object), strict=True)
        equal = np.array([not pd.isna(a) and not pd.isna(b) and a == b for a, b in pairs], bool)
    same: np.ndarray = np.logical_or(both_missing, equal)
    return same


def _tokens(saved: Result, again: Result, field: str, what: str) -> Iterator[str]:
    """Yield whose tokens, or times of them, differ."""
    then, now = getattr(saved, field), getattr(again, field)
    for name, values in then.items():
        others = now.get(name, [])
        if len(values) != len(others):
            yield f"{what} of request {name!r}: {len(values)}, now {len(others)}"
        elif len(values) and not _equal(pd.Series(values), pd.Series(others)).all():
            place = int(np.flatnonzero(~_equal(pd.Series(values), pd.Series(others)))[0])
            yield f"{what} of request {name!r} differ first at {place}: {values[place]}, now {others[place]}"


def _changes(provenance: Provenance) -> Iterator[str]:
    """Yield what is not as it was."""
    now = versions(provenance.is_measured)
    for name in sorted(provenance.versions.keys() | now.keys()):
        if provenance.versions.get(name) != now.get(name):
            yield f"{name} {provenance.versions.get(name, 'none')}, now {now.get(name, 'none')}"
    if provenance.code != code_version():
        yield f"the code of contbatch: {provenance.code}, now {code_version()}"
    if provenance.is_measured:
        here = hardware()
        yield from (f"{k}: {v}, now {here[k]}" for k, v in provenance.hardware.items() if here.get(k, v) != v)
