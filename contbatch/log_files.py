"""Decision logs as files: JSON lines, or parquet. Each row carries a checksum of all before and in it."""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contbatch.decision import Decision
from contbatch.decision_log import DecisionLog
from contbatch.errors import DecisionLogError, MissingDependencyError

if TYPE_CHECKING:
    import pandas as pd

FIELDS = [f.name for f in fields(Decision)]
Record = dict[str, Any]


def _compact(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"))


def _header(log: DecisionLog) -> Record:
    return {"settings": log.settings, "requests": log.requests, "num_rows": len(log.rows)}


def _sealed(header: Record, rows: Iterable[Record]) -> Iterator[int]:
    """Yield the checksum of the header, then one for each row that also covers all before it."""
    seal = zlib.crc32(_compact(header).encode())
    yield seal
    for row in rows:
        seal = zlib.crc32(_compact(row).encode(), seal)
        yield seal


def frame(log: DecisionLog) -> "pd.DataFrame":
    """Return the rows as a table, a column per field of `Decision`."""
    import pandas as pd

    return pd.DataFrame([asdict(row) for row in log.rows], columns=FIELDS)


def write(log: DecisionLog, path: Path) -> Path:
    """Write a log as *.jsonl or *.parquet."""
    _require_suffix(path)
    rows = [asdict(row) for row in log.rows]
    first, *seals = _sealed(_header(log), rows)
    header = {**_header(log), "seal": first}
    if path.suffix == ".parquet":
        table = frame(log).assign(seal=seals)
        table.attrs = {"decision_log": _compact(header)}
        _with_pyarrow(table.to_parquet, path, index=False)
        return path
    filled = ({name: value for name, value in row.items() if value != []} for row in rows)
    lines = [header, *({**row, "seal": seal} for row, seal in zip(filled, seals, strict=True))]
    path.write_text("".join(_compact(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(log: DecisionLog, path: Path) -> DecisionLog:
    """Fill an empty log from a file; `DecisionLogError` if it is not what was written."""
    _require_suffix(path)
    try:
        header, *rows = _parquet_records(path) if path.suffix == ".parquet" else _json_records(path)
        seals = [record.pop("seal") for record in (header, *rows)]
        log.settings, log.requests = header["settings"], [(name, at) for name, at in header["requests"]]
        log.rows = [Decision(**row) for row in rows]
        expected = list(_sealed(header, map(asdict, log.rows)))
        count = header["num_rows"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, DecisionLogError):
            raise
        raise DecisionLogError(f"{path} is no decision log: {type(error).__name__}: {error}") from error
    for place, (found, seal) in enumerate(zip(seals, expected, strict=True)):
        if found != seal:
            what = f"step {log.rows[place - 1].step} (row {place - 1})" if place else "the header"
            raise DecisionLogError(f"{path}: {what} was changed after it was written: checksum {seal}, not {found}")
    if len(rows) != count:
        raise DecisionLogError(f"{path}: cut off after row {len(rows) - 1}; {count} rows were written")
    return log


def _require_suffix(path: Path) -> None:
    if path.suffix not in (".jsonl", ".parquet"):
        raise DecisionLogError(f"a decision log is a file *.jsonl or *.parquet, got {path}")


def _json_records(path: Path) -> Iterator[Record]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise DecisionLogError(f"{path}, line {number}, is no row of a decision log: {line[:80]!r}") from error


def _parquet_records(path: Path) -> Iterator[Record]:
    import pandas as pd

    table = _with_pyarrow(pd.read_parquet, path)
    yield json.loads(table.attrs["decision_log"])
    for record in table.to_dict("records"):
        yield {name: _plain(value) for name, value in record.items()}


def _plain(value: Any) -> Any:
    """Make Python lists of the nested arrays that pandas reads."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _with_pyarrow(call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, engine="pyarrow", **kwargs)
    except ImportError as error:
        raise MissingDependencyError("parquet needs pyarrow: pip install 'contbatch[simulation]'") from error
