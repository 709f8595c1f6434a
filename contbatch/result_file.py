"""A result on disk: a folder with its tables as parquet, and result.json, which says where they come from."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from contbatch.cached_folder import sha256_of
from contbatch.description import digest
from contbatch.errors import ExperimentError, MissingDependencyError, ResultFileError
from contbatch.metrics import Result
from contbatch.provenance import Provenance, attach

MANIFEST = "result.json"
FORMAT = 1
TABLES = ("requests", "steps", "segments", "tokens")
UNKNOWN = "end_s", "max_num_seqs"
"""Figures of a result that may be NaN, which JSON has not."""
NAMED = [f.name for f in fields(Provenance) if f.name != "describe"]


def save_result(result: Result, path: str | os.PathLike[str]) -> None:
    """Do what `Result.save` says."""
    path, provenance = Path(path), result.provenance
    if provenance is None:
        raise ResultFileError(f"{path}: no result of `run`, `simulate` or `LLM.run`: nothing says where it comes from")
    try:
        description = provenance.description
    except ExperimentError as error:
        raise ResultFileError(f"{path}: {error}") from None
    if path.exists() and not (path / MANIFEST).is_file():
        raise ResultFileError(f"{path} is there already, and is no saved result")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".result-", dir=path.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        for name, table in _tables(result).items():
            _write(table, new / f"{name}.parquet")
        manifest = {
            "format": FORMAT,
            **{name: getattr(provenance, name) for name in NAMED},
            "hash": provenance.hash,
            "experiment": description,
            **{name: getattr(result, name) for name in ("num_pages", "page_size", "detail")},
            **{name: None if np.isnan(value := getattr(result, name)) else value for name in UNKNOWN},
            "sha256": {name: sha256_of(new / f"{name}.parquet") for name in TABLES},
        }
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if path.exists():
            shutil.move(path, Path(temporary) / "old")
        os.replace(new, path)


def load_result(path: str | os.PathLike[str]) -> Result:
    """Read what `Result.save` wrote.

    Raises
    ------
    ResultFileError
        It is not there, no saved result, of another format, or was changed since.
    """
    path = Path(path)
    manifest = _manifest(path)
    frames = {name: _read(path / f"{name}.parquet", manifest["sha256"][name]) for name in TABLES}
    tokens = frames.pop("tokens")
    for table in (frames["requests"], frames["segments"], tokens):
        names = [json.loads(name) for name in table.request_id]
        table["request_id"] = pd.Series(names, dtype=None if names else object)
    clients = frames["requests"].client_id
    frames["requests"]["client_id"] = pd.Series(
        [c if isinstance(c, str) else None for c in clients], dtype=None if len(clients) else object
    )
    rows = dict(iter(tokens.groupby("request_id", sort=False)))
    names = list(frames["requests"].request_id) if manifest["detail"] else []
    none = tokens.iloc[:0]
    figures: dict[str, Any] = {name: float("nan") if manifest[name] is None else manifest[name] for name in UNKNOWN}
    result = Result(
        frames["requests"],
        frames["steps"],
        frames["segments"],
        token_s={name: rows.get(name, none).token_s.tolist() for name in names},
        token_ids={name: rows.get(name, none).token_id.tolist() for name in names},
        **figures,
        **{name: manifest[name] for name in ("num_pages", "page_size", "detail")},
    )
    told = {name: manifest[name] for name in NAMED}
    told["seed"] = tuple(told["seed"]) if isinstance(told["seed"], list) else told["seed"]
    return attach(result, Provenance(**told, describe=partial(dict, manifest["experiment"])))


def _tables(result: Result) -> dict[str, pd.DataFrame]:
    """Return the tables as parquet takes them: ids, numbers or texts, as JSON; clients as texts."""
    names = [name for name, times in result.token_s.items() for _ in times]
    tokens = pd.DataFrame(
        {
            "request_id": pd.Series(names, dtype=object),
            "token_s": np.array([at for times in result.token_s.values() for at in times], np.float64),
            "token_id": np.array([token for tokens in result.token_ids.values() for token in tokens], np.int64),
        }
    )
    clients = [None if c is None or c != c else str(c) for c in result.requests.client_id]
    requests = result.requests.assign(client_id=pd.array(clients, dtype="string"))
    tables = {"requests": requests, "steps": result.steps, "segments": result.segments, "tokens": tokens}
    ids = {name: [json.dumps(i) for i in table.request_id] for name, table in tables.items() if name != "steps"}
    return {name: table.assign(request_id=ids[name]) if name in ids else table for name, table in tables.items()}


def _manifest(path: Path) -> dict[str, Any]:
    """Read and check result.json."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultFileError(f"{path} is no saved result: {file.name}: {error.strerror}") from None
    except ValueError as error:
        raise ResultFileError(f"{file} is damaged: {error}") from None
    if not isinstance(manifest, Mapping) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, Mapping) else type(manifest).__name__
        raise ResultFileError(f"{file} must have format {FORMAT}, got {found!r}")
    missing = {"hash", "experiment", "num_pages", "page_size", "detail", "sha256", *UNKNOWN, *NAMED} - manifest.keys()
    if missing:
        raise ResultFileError(f"{file} lacks {', '.join(sorted(missing))}")
    if digest(manifest["experiment"]) != manifest["hash"]:
        raise ResultFileError(f"{file}: the experiment has hash {digest(manifest['experiment'])}, not the one noted")
    if not isinstance(manifest["sha256"], Mapping) or set(manifest["sha256"]) != set(TABLES):
        raise ResultFileError(f"{file}: sha256 must name {', '.join(TABLES)}")
    return dict(manifest)


def _write(table: pd.DataFrame, file: Path) -> None:
    try:
        table.to_parquet(file)
    except ImportError as error:
        raise MissingDependencyError("saved results need pyarrow: pip install 'contbatch[simulation]'") from error


def _read(file: Path, sha256: str) -> pd.DataFrame:
    try:
        if sha256_of(file) != sha256:
            raise ResultFileError(f"{file} was changed or cut: its SHA-256 is not that in {MANIFEST}")
        return pd.read_parquet(file)
    except OSError as error:
        raise ResultFileError(f"{file}: {error.strerror}") from None
    except ImportError as error:
        raise MissingDependencyError("saved results need pyarrow: pip install 'contbatch[simulation]'") from error
