"""Loaders of public traces of LLM servers. None of the data comes with this package.

Every loader raises `TraceFileError` with file and line for what is malformed. Rows whose prompt or answer has no
tokens, which failed requests leave, are counted in `Trace.num_skipped`; with `strict=True` they are errors too. Nothing
is clipped.
"""

import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from zlib import crc32

from contbatch.checks import is_int
from contbatch.trace import Trace
from contbatch.trace_file import Row, csv_rows, json_document, json_lines
from contbatch.turn import Segment, Turn

Arrived = tuple[int, tuple[Segment, ...], int]
"""Nanoseconds, prompt, output tokens."""
_FINE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOONCAKE_BLOCK = 512
"""Tokens of a block of Mooncake's traces; the last of a prompt may be shorter."""


def load_azure(path: str | os.PathLike[str], *, strict: bool = False) -> Trace:
    """Load an Azure LLM inference trace of 2023 or 2024 (Patel et al. 2024; CC-BY 4.0).

    CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`; times with up to nine digits of a second, with or without an
    offset (UTC if none).
    """
    return _load(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _timestamp, strict)


def load_burstgpt(path: str | os.PathLike[str], *, strict: bool = False) -> Trace:
    """Load a BurstGPT trace (Wang et al. 2024; CC-BY 4.0), any version.

    CSV with `Timestamp` in seconds, `Request tokens` and `Response tokens`, found by name. A response of no tokens is a
    failed request.
    """
    return _load(path, ("Timestamp", "Request tokens", "Response tokens"), Row.nanoseconds, strict)


def load_vidur(path: str | os.PathLike[str], *, strict: bool = False) -> Trace:
    """Load a trace of Vidur's (Agrawal et al. 2024): CSV with `arrived_at,num_prefill_tokens,num_decode_tokens`."""
    return _load(path, ("arrived_at", "num_prefill_tokens", "num_decode_tokens"), Row.nanoseconds, strict)


def load_mooncake(path: str | os.PathLike[str], *, strict: bool = False) -> Trace:
    """Load a Mooncake trace (Qin et al. 2024; Apache-2.0): JSON lines, times in milliseconds.

    `hash_ids` name the blocks of 512 tokens that make up a prompt, so prompts of equal first ids share a beginning.
    """
    turns, skipped = list[Arrived](), 0
    for row in json_lines(path, ("timestamp", "input_length", "output_length", "hash_ids")):
        at, prompt, output = row.nanoseconds("timestamp", 10**6), row.count("input_length"), row.count("output_length")
        if not row.has_tokens(prompt, output, strict):
            skipped += 1
            continue
        ids = row.values["hash_ids"]
        blocks = -(-prompt // MOONCAKE_BLOCK)
        if not (isinstance(ids, list) and len(ids) == blocks and all(map(is_int, ids))):
            raise row.error(f"hash_ids must be {blocks} integers, one for each {MOONCAKE_BLOCK} of {prompt} tokens")
        sizes = [MOONCAKE_BLOCK] * (blocks - 1) + [prompt - MOONCAKE_BLOCK * (blocks - 1)]
        turns.append((at, tuple(map(Segment, ids, sizes)), output))
    return _trace(path, turns, skipped)


def load_sharegpt(path: str | os.PathLike[str], count_tokens: Callable[[str], int], *, strict: bool = False) -> Trace:
    """Load ShareGPT conversations: the first question and its answer, as vLLM's benchmarks do.

    A JSON array of `{"id", "conversations": [{"from": "human" | "gpt", "value"}, …]}`. There are no times: everybody
    comes at 0 seconds until `Trace.with_arrivals`. Conversations of fewer than two turns are skipped and counted.

    Parameters
    ----------
    path : path
    count_tokens : callable
        Number of tokens of a text: `lambda text: len(tokenizer.encode(text))`.
    strict : bool
        Raise for what would be skipped.
    """
    turns, skipped, first_key = list[Arrived](), 0, _first_key(path)
    for row in json_document(path):
        talk = row.values.get("conversations")
        if not isinstance(talk, list) or not all(
            isinstance(t, Mapping) and isinstance(t.get("value"), str) for t in talk
        ):
            raise row.error("conversations must be a list of turns with a text as their value")
        prompt, output = (count_tokens(turn["value"]) for turn in talk[:2]) if len(talk) > 1 else (0, 0)
        if not row.has_tokens(prompt, output, strict):
            skipped += 1
            continue
        turns.append((0, (Segment(first_key + row.number, prompt),), output))
    return _trace(path, turns, skipped)


def _load(
    path: str | os.PathLike[str],
    columns: tuple[str, str, str],
    time_of: Callable[[Row, str], int],
    strict: bool,
) -> Trace:
    """Load a CSV file by its columns of times, prompt tokens and output tokens; `time_of` reads nanoseconds."""
    turns, skipped, first_key = list[Arrived](), 0, _first_key(path)
    when, asked, answered = columns
    for row in csv_rows(path, columns):
        at, prompt, output = time_of(row, when), row.count(asked), row.count(answered)
        if row.has_tokens(prompt, output, strict):
            turns.append((at, (Segment(first_key + row.number, prompt),), output))
        else:
            skipped += 1
    return _trace(path, turns, skipped)


def _trace(path: str | os.PathLike[str], arrived: list[Arrived], skipped: int) -> Trace:
    """Sort by time, ties as they come, and begin at 0 seconds."""
    reordered = sum(a[0] > b[0] for a, b in pairwise(arrived))
    arrived.sort(key=itemgetter(0))
    rows = [Turn(i, (at - arrived[0][0]) / 1e9, prompt, output) for i, (at, prompt, output) in enumerate(arrived)]
    return Trace(tuple(rows), Path(path).name, skipped, reordered)


def _first_key(path: str | os.PathLike[str]) -> int:
    """Return what, with a row's number added, is the key of a prompt that no row of another file has."""
    return crc32(Path(path).name.encode()) << 31


def _timestamp(row: Row, column: str) -> int:
    """Read a time of day, in nanoseconds since 1970; naive ones are UTC."""
    text = row.values[column]
    match = _FINE_TIME.fullmatch(text)
    if not match:
        raise row.error(f"{column} must be like 2023-11-16 18:17:03.9799600, got {text!r}")
    whole, fraction, offset = match.groups()
    try:
        at = datetime.fromisoformat(whole + (offset or "Z"))
    except ValueError as error:
        raise row.error(f"{column} {text!r}: {error}") from None
    return (at - _EPOCH) // timedelta(seconds=1) * 10**9 + int((fraction or "").ljust(9, "0"))
