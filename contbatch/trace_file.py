"""Rows of CSV and JSON files, each knowing its line for errors."""

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from contbatch.errors import TraceFileError

MAX_TOKENS, MAX_SECONDS = 10**9, 10**12


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a trace: its values by column, as text or as JSON has them."""

    path: str
    number: int
    """Of its line in the file, or of its entry, from 1."""
    values: Mapping[str, Any]
    unit: str = "line"

    def error(self, problem: str) -> TraceFileError:
        """Make the error that says where the problem is."""
        return TraceFileError(f"{self.path}, {self.unit} {self.number}: {problem}")

    def _number(self, column: str) -> Decimal:
        value = self.values[column]
        try:
            number = Decimal(str(value)) if isinstance(value, (str, int, float)) else Decimal("NaN")
        except InvalidOperation:
            number = Decimal("NaN")
        if isinstance(value, bool) or not number.is_finite():
            raise self.error(f"{column} must be a number, got {value!r}")
        return number

    def count(self, column: str) -> int:
        """Read a number of tokens ≥ 0."""
        number = self._number(column)
        if not 0 <= number <= MAX_TOKENS or number != int(number):
            raise self.error(f"{column} must be an integer in [0, {MAX_TOKENS}], got {self.values[column]!r}")
        return int(number)

    def nanoseconds(self, column: str, unit: int = 10**9) -> int:
        """Read a time ≥ 0 in units of so many nanoseconds."""
        number = self._number(column)
        if not 0 <= number <= MAX_SECONDS:
            raise self.error(f"{column} must be in [0, {MAX_SECONDS}], got {self.values[column]!r}")
        return round(number * unit)

    def has_tokens(self, prompt: int, output: int, strict: bool) -> bool:
        """Whether there is a prompt and an answer; if not, and `strict`, raise."""
        if prompt and output:
            return True
        if strict:
            raise self.error(f"prompt and answer must have tokens, got {prompt} and {output}")
        return False


def _read(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TraceFileError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise TraceFileError(f"{os.fspath(path)}, line {line}: not UTF-8") from error


def csv_rows(path: str | os.PathLike[str], columns: tuple[str, ...]) -> Iterator[Row]:
    """Read a CSV file with a header; columns are found by name, others ignored, empty lines skipped."""
    name = os.fspath(path)
    reader = csv.reader(io.StringIO(_read(path), newline=""), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                if missing := [column for column in columns if column not in header]:
                    have = f"the header has {', '.join(header)}"
                    raise TraceFileError(f"{name}, line {reader.line_num}: no column {missing[0]!r}; {have}")
                continue
            row = Row(name, reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=False)))
            if len(cells) != len(header):
                raise row.error(f"{len(cells)} values, but the header has {len(header)} columns")
            yield row
    except csv.Error as error:
        raise TraceFileError(f"{name}, line {reader.line_num}: {error}") from error
    if header is None:
        raise TraceFileError(f"{name}, line 1: empty, expected a header with {', '.join(columns)}")


def json_lines(path: str | os.PathLike[str], keys: tuple[str, ...]) -> Iterator[Row]:
    """Read a file of one JSON object a line; each must have `keys`. Empty lines are skipped."""
    name = os.fspath(path)
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceFileError(f"{name}, line {number}: no JSON: {error}") from error
        row = Row(name, number, values if isinstance(values, dict) else {})
        if missing := [key for key in keys if key not in row.values]:
            raise row.error(f"an object with {missing[0]!r} was expected, got {line.strip()[:80]}")
        yield row


def json_document(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Read a file that is one JSON array of objects."""
    name = os.fspath(path)
    try:
        entries = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise TraceFileError(f"{name}, line {error.lineno}: no JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise TraceFileError(f"{name}: no JSON: {error}") from error
    if not isinstance(entries, list):
        raise TraceFileError(f"{name}, line 1: a JSON array was expected, got {type(entries).__name__}")
    for number, values in enumerate(entries, 1):
        row = Row(name, number, values if isinstance(values, dict) else {}, unit="entry")
        if not isinstance(values, dict):
            raise row.error(f"an object was expected, got {values!r}"[:120])
        yield row
