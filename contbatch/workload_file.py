"""Workloads as files: a row per turn, as JSON lines or Parquet."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contbatch.checks import require
from contbatch.errors import MissingDependencyError, TraceFileError, WorkloadError
from contbatch.trace import Trace
from contbatch.trace_file import Row, json_lines
from contbatch.turn import Client, Segment, Turn

FIELDS = ("session", "delay_s", "segment_keys", "segment_tokens", "output_tokens", "keeps_context")
CLIENT_FIELDS = tuple(asdict(Client()))


def save_turns(turns: Sequence[Turn], path: str | os.PathLike[str]) -> None:
    """Write turns; the end of the name, .jsonl or .parquet, chooses the format. Keys must fit 64 bits for Parquet."""
    path = Path(path)
    _require_suffix(path)
    rows = [_record(turn) for turn in turns]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return
    arrow, parquet = _parquet()
    try:
        table = arrow.Table.from_pylist(rows, schema=_schema(arrow))
    except OverflowError as error:
        raise WorkloadError(f"{path}: a segment's key does not fit 64 bits: {error}") from error
    parquet.write_table(table, path)


def load_workload(path: str | os.PathLike[str]) -> Trace:
    """Read what `Workload.save` wrote; `TraceFileError` with the line (row in Parquet) for what is malformed."""
    path = Path(path)
    _require_suffix(path)
    if path.suffix == ".jsonl":
        rows: Iterable[Row] = json_lines(path, (*FIELDS, *CLIENT_FIELDS))
    else:
        arrow, parquet = _parquet()
        try:
            table = parquet.read_table(path, schema=_schema(arrow))
        except (OSError, arrow.ArrowException) as error:
            raise TraceFileError(f"{path}: cannot be read: {error}") from error
        rows = (Row(str(path), number, values, "row") for number, values in enumerate(table.to_pylist(), 1))
    return Trace(tuple(map(_turn, rows)), path.name)


def _require_suffix(path: Path) -> None:
    known = path.suffix in (".jsonl", ".parquet")
    require(known, "the file name", path.name, "one that ends in .jsonl or .parquet", WorkloadError)


def _record(turn: Turn) -> dict[str, object]:
    keys, sizes = zip(*turn.prompt, strict=True)
    values = (turn.session, turn.delay_s, list(keys), list(sizes), turn.output_tokens, turn.keeps_context)
    return {**dict(zip(FIELDS, values, strict=True)), **asdict(turn.client)}


def _turn(row: Row) -> Turn:
    values: Mapping[str, Any] = row.values
    try:
        prompt = tuple(map(Segment, values["segment_keys"], values["segment_tokens"]))
        if len(values["segment_keys"]) != len(values["segment_tokens"]):
            raise WorkloadError("segment_keys and segment_tokens must be of one length")
        client = Client(**{name: values[name] for name in CLIENT_FIELDS})
        head = (values["session"], values["delay_s"], prompt, values["output_tokens"], values["keeps_context"])
        return Turn(*head, client=client)
    except (WorkloadError, TypeError) as error:
        raise row.error(str(error)) from error


def _schema(arrow: Any) -> Any:
    whole, text, real = arrow.int64(), arrow.string(), arrow.float64()
    types = [whole, real, arrow.list_(whole), arrow.list_(whole), whole, arrow.bool_()]
    client = {"client_id": text, "cache_salt": text, "max_tokens": whole}
    names = [*FIELDS, *CLIENT_FIELDS]
    return arrow.schema(list(zip(names, [*types, *(client.get(name, real) for name in CLIENT_FIELDS)], strict=True)))


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError("parquet needs pyarrow: pip install 'contbatch[simulation]'") from error
    return pyarrow, parquet
