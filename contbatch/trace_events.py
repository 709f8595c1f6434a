"""A run as a trace in the Trace Event Format, for ui.perfetto.dev and chrome://tracing.

Three groups ("processes"): the steps, one after another, with counters of the queue and the pages; the seats, a track
each, with what was done in them; the requests, a track each from arrival to end, waiting and preemptions included.
Times are microseconds on the engine's clock, whole nanoseconds as decimals, so that rounding keeps things nested.

Format: "Trace Event Format", the Chromium project. Event types used: X (complete), C (counter), b and e (nestable
asynchronous), i (instant), M (metadata).
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pandas as pd

from contbatch.metrics import Result

STEPS, SEATS, REQUESTS = 1, 2, 3
"""Process ids of the three groups."""
Event = dict[str, Any]
_ARGS = ["seqs", "tokens", "prefill_tokens", "decode_tokens", "padding_tokens", "sampled_tokens", "admitted"]
_ARGS += ["preempted", "cached_tokens"]


def trace_events(result: Result) -> list[Event]:
    """Return the events of a run, those with times in order of these.

    Raises
    ------
    DetailError
        The run did not keep who sat where when.
    """
    result.require_detail("a trace")
    timed = [*_steps(result), *_seats(result), *_requests(result)]
    timed.sort(key=lambda event: event["ts"])  # stable: an end stays before the beginning that follows it
    return [*_names(result), *timed]


def write_trace(result: Result, path: Path) -> Path:
    """Write the events of a run as a JSON file, whole or not at all."""
    trace = {"traceEvents": trace_events(result), "displayTimeUnit": "ms"}
    text = json.dumps(trace, separators=(",", ":"), allow_nan=False)
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}-", delete=False) as part:
        try:
            part.write(text)
            part.close()
            os.replace(part.name, path)
        except BaseException:
            Path(part.name).unlink()
            raise
    return path


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def _at(seconds: float) -> float:
    return _nanoseconds(seconds) / 1000


def _complete(name: str, begin_s: float, end_s: float, pid: int, tid: int, args: Event) -> Event:
    """Make an event that begins and ends on the grid of nanoseconds, as its neighbours do."""
    duration = (_nanoseconds(end_s) - _nanoseconds(begin_s)) / 1000
    return {"ph": "X", "name": name, "ts": _at(begin_s), "dur": duration, "pid": pid, "tid": tid, "args": args}


def _names(result: Result) -> Iterator[Event]:
    """Name the groups and their tracks."""
    for pid, name in ((STEPS, "steps"), (SEATS, "seats"), (REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    yield {"ph": "M", "name": "thread_name", "pid": STEPS, "tid": 0, "args": {"name": "step"}}
    for seat in sorted(set(result.segments.seat)):
        yield {"ph": "M", "name": "thread_name", "pid": SEATS, "tid": seat, "args": {"name": f"seat {seat}"}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": SEATS, "tid": seat, "args": {"sort_index": seat}}


def _steps(result: Result) -> Iterator[Event]:
    for row in result.steps.to_dict("records"):
        begin, end = row["start_s"], row["start_s"] + (row["elapsed_s"] + row["host_s"])
        yield _complete(f"step {row['step']}", begin, end, STEPS, 0, {name: row[name] for name in _ARGS})
        if row["host_s"]:
            yield _complete("model", begin, begin + row["elapsed_s"], STEPS, 0, {})
        live, cached = row["live_pages"], row["cached_pages"]
        free = result.num_pages - live - cached
        yield _counter("pages", begin, {"live": live, "cached": cached, "free": free})
        yield _counter("requests", begin, {"waiting": row["waiting"], "running": row["seats"]})
    if len(result.steps):
        yield _counter("requests", result.end_s, {"waiting": 0, "running": 0})


def _counter(name: str, at_s: float, values: Event) -> Event:
    return {"ph": "C", "name": name, "ts": _at(at_s), "pid": STEPS, "tid": 0, "args": values}


def _seats(result: Result) -> Iterator[Event]:
    for row in result.segments.to_dict("records"):
        args = {"request": row["request_id"], "first step": row["start_step"], "end step": row["end_step"]}
        name = f"{row['request_id']}: {row['kind']}"
        yield _complete(name, row["start_s"], row["end_s"], SEATS, row["seat"], args)


def _requests(result: Result) -> Iterator[Event]:
    """Yield, for each request, itself, and within it waiting and the kinds of work, one after another."""
    segments = defaultdict(list)
    for segment in result.segments.to_dict("records"):
        segments[segment["request_id"]].append(segment)
    for number, row in enumerate(result.requests.to_dict("records")):
        mine = sorted(segments[row["request_id"]], key=lambda segment: segment["start_step"])
        known = [segment["end_s"] for segment in mine] + [row[name] for name in ("generated_s", "finished_s")]
        arrival, end = row["arrival_s"], max((at for at in known if not pd.isna(at)), default=row["arrival_s"])
        base = {"cat": "request", "id": number, "pid": REQUESTS, "tid": 0}
        counts = ("prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "preemptions")
        title = f"request {row['request_id']}"
        yield {"ph": "b", "name": title, "ts": _at(arrival), "args": {name: row[name] for name in counts}, **base}
        now = arrival
        for segment in mine:
            if segment["start_s"] > now:
                yield from _phase("waiting", now, segment["start_s"], base)
            yield from _phase(segment["kind"], segment["start_s"], segment["end_s"], base)
            now = segment["end_s"]
            if segment["preempted"]:
                at = {"ts": _at(now), "pid": SEATS, "tid": segment["seat"]}
                yield {"ph": "i", "name": f"{row['request_id']} preempted", "s": "t", **at}
        if end > now:
            yield from _phase("waiting", now, end, base)
        yield {"ph": "e", "name": title, "ts": _at(end), "args": {}, **base}


def _phase(name: str, begin_s: float, end_s: float, base: Event) -> Iterator[Event]:
    yield {"ph": "b", "name": name, "ts": _at(begin_s), "args": {}, **base}
    yield {"ph": "e", "name": name, "ts": _at(end_s), "args": {}, **base}
