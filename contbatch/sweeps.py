"""Many experiments: in parallel, each kept on disk once it is done, in one table."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from contbatch.catalog import cache_dir
from contbatch.checks import is_int, python_number, require, tuple_of
from contbatch.description import code_version
from contbatch.errors import ExperimentError, MissingDependencyError
from contbatch.experiment import Experiment, run
from contbatch.progress import progress_bar
from contbatch.provenance import title_of_runs
from contbatch.simulation import Simulated
from contbatch.workload import Workload

Row = dict[str, Any]


def sweep(
    experiments: Iterable[Experiment], *, n_jobs: int | None = None, cache: bool = True, progress: bool = True
) -> pd.DataFrame:
    """Run experiments and return a row for each, in their order.

    Parameters
    ----------
    experiments : iterable of Experiment
        Such as a comprehension over `replace`.
    n_jobs : int, optional
        Processes for the simulated ones, -1 for all cores; None is one, or what `joblib.parallel_config` says: under
        `joblib.parallel_config("dask")` they run on the workers of a Dask cluster. Measured ones run one at a time.
    cache : bool
        Whether a simulated experiment that ran before, with the same code, is read from `cache_dir() / "sweeps"`. So a
        sweep that was interrupted goes on where it was. A measurement is of now, and never kept.
    progress : bool
        Show a bar of finished experiments.

    Returns
    -------
    DataFrame
        First the fields in which the experiments differ, by name (`rate`; `workload.rate` if several are called so),
        then those of `Result.summary`, then `experiment` (its hash) and `error`: None, or what went wrong with this
        one alone.

    Raises
    ------
    ExperimentError
        Something in `experiments` is not an experiment; nothing has run then.
    """
    points = tuple_of(experiments, "experiments", "a list of experiments", ExperimentError)
    n_jobs = python_number(n_jobs)
    jobs_ok = n_jobs is None or (is_int(n_jobs, -(2**31), 2**31 - 1) and n_jobs != 0)
    require(jobs_ok, "n_jobs", n_jobs, "None, -1 or an integer ≥ 1", ExperimentError)
    for i, point in enumerate(points):
        require(isinstance(point, Experiment), f"experiment {i}", point, "an Experiment", ExperimentError)
    keys = [point.hash for point in points]
    uses = Counter(keys)
    folder = cache_dir() / "sweeps" / code_version()
    rows: dict[str, Row] = {}
    with progress_bar(len(points), "experiment", progress) as bar:
        for key, row in _rows(dict(zip(keys, points, strict=True)), folder if cache else None, n_jobs):
            rows[key] = row
            bar.set_postfix(failed=sum(row["error"] is not None for row in rows.values()), refresh=False)
            bar.update(uses[key])
    figures = [{name: value for name, value in rows[key].items() if name != "error"} for key in keys]
    ends = {"experiment": keys, "error": [rows[key]["error"] for key in keys]}
    table = pd.concat([pd.DataFrame(differences(points)), pd.DataFrame(figures), pd.DataFrame(ends)], axis=1)
    table.attrs["run"] = title_of_runs(points)
    return table


def _rows(points: dict[str, Experiment], folder: Path | None, n_jobs: int | None) -> Iterator[tuple[str, Row]]:
    """Yield key and row of each, as they come: those on disk first, then the measured, then the simulated."""
    todo = {}
    for key, point in points.items():
        row = None if folder is None or point.is_measured else _read(folder / f"{key}.parquet")
        if row is None:
            todo[key] = point
        else:
            yield key, row
    for key in [key for key, point in todo.items() if point.is_measured]:
        yield _row(key, todo.pop(key))
    for key, row in _parallel(todo, n_jobs):
        if folder is not None and row["error"] is None:
            _write(folder / f"{key}.parquet", row)
        yield key, row


def _parallel(points: dict[str, Experiment], n_jobs: int | None) -> Iterator[tuple[str, Row]]:
    try:
        from joblib import Parallel, delayed
    except ImportError as error:
        raise MissingDependencyError("sweeps need joblib: pip install 'contbatch[simulation]'") from error
    running = Parallel(n_jobs=n_jobs, return_as="generator_unordered", batch_size=1)(
        delayed(_row)(key, point) for key, point in points.items()
    )
    try:
        yield from running
    finally:
        running.close()  # after an interrupt: what has not begun never will


def _row(key: str, point: Experiment) -> tuple[str, Row]:
    """Run one experiment; an error of it is its row."""
    try:
        summary = {str(name): figure for name, figure in run(point).summary().items()}
        return key, {**summary, "error": None}
    except Exception as error:
        return key, {"error": f"{type(error).__name__}: {error}"}


def _read(path: Path) -> Row | None:
    try:
        row = pd.read_parquet(path).iloc[0]
    except (OSError, ValueError, IndexError):  # not there, or cut short
        return None
    return {**{str(name): figure for name, figure in row.items()}, "error": None}


def _write(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    pd.DataFrame([row]).drop(columns="error").to_parquet(part)
    os.replace(part, path)  # whole or not at all


def differences(points: Sequence[Experiment]) -> list[Row]:
    """Return, for each experiment, the fields in which not all are equal.

    A field is called by its own name if no other of that name differs, else by its path: `workload.seed`. A policy, and
    whatever else differs in its kind, is shown as it is written.
    """
    flat = [_flat("", point) for point in points]
    paths = dict.fromkeys(path for fields in flat for path in fields)
    kept = [path for path in paths if len({str(fields.get(path)) for fields in flat}) > 1]
    names = Counter(path.rpartition(".")[2] for path in kept)
    short = {path: path.rpartition(".")[2] for path in kept}
    called = {path: path if names[short[path]] > 1 else short[path] for path in kept}
    return [{called[path]: fields.get(path) for path in kept} for fields in flat]


def _flat(prefix: str, value: Any) -> Row:
    """Return the fields of an experiment by their paths: those of its workload and backend among them."""
    found: Row = {}
    for field in (f for f in fields(value) if f.init):
        part = getattr(value, field.name)
        path = f"{prefix}{field.name}"
        if isinstance(part, (Workload, Simulated)):
            found[path] = type(part).__name__
            found |= _flat(f"{path}.", part)
        else:
            found[path] = part if isinstance(part, (int, float, str, type(None))) else repr(part)
    return found
