"""The exported trace keeps the rules of the Trace Event Format, and says what the tables say."""

import json
from collections import defaultdict
from dataclasses import replace

import pytest
from fake_runner import engine_of, request
from hypothesis import given, settings
from random_workloads import POLICIES, WORKLOADS

import contbatch as cb
from contbatch.errors import DetailError
from contbatch.trace_events import REQUESTS, SEATS, STEPS, trace_events

REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "b": {"name", "cat", "id", "ts", "pid", "tid"},
    "e": {"name", "cat", "id", "ts", "pid", "tid"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "M": {"name", "pid", "args"},
}


def nanoseconds(event):
    """Where an event begins and ends; microseconds with at most three decimals."""
    begin, duration = event["ts"] * 1000, event.get("dur", 0) * 1000
    assert begin == pytest.approx(round(begin), abs=1e-3)
    assert duration >= 0
    return round(begin), round(begin) + round(duration)


def require_valid(events):
    """Check what the format asks of every event, and that on each track durations nest."""
    open_until, open_names, last = defaultdict(list), defaultdict(list), defaultdict(int)
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys()
        if event["ph"] == "M":
            continue
        begin, end = nanoseconds(event)
        track = event["ph"] in "be", event["pid"], event.get("id", event["tid"])
        assert begin >= last[track], "in order of time"
        last[track] = begin
        if event["ph"] == "X":
            stack = open_until[track]
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1], "overlaps without nesting"
            stack.append(end)
        elif event["ph"] == "b":
            open_names[track].append(event["name"])
        elif event["ph"] == "e":
            assert open_names[track].pop() == event["name"]
        elif event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
    assert not any(open_names.values()), "begun and never ended"


def by_kind(events, ph, pid):
    return [event for event in events if event["ph"] == ph and event["pid"] == pid]


@settings(max_examples=60)
@given(WORKLOADS, POLICIES)
def test_any_run_is_a_valid_trace_that_says_what_the_tables_say(workload, policy):
    engine = engine_of(policy, **workload.limits)
    result = engine.run(workload.requests())
    events = json.loads(json.dumps(trace_events(result), allow_nan=False))
    require_valid(events)
    steps, segments, requests = result.steps, result.segments, result.requests
    assert [e["ts"] for e in by_kind(events, "X", STEPS)] == pytest.approx([1e6 * at for at in steps.start_s], abs=1e-3)
    seats = defaultdict(float)
    for event in by_kind(events, "X", SEATS):
        seats[event["tid"]] += event["dur"]
    busy = (segments.end_s - segments.start_s).groupby(segments.seat).sum()
    assert dict(seats) == pytest.approx({seat: 1e6 * s for seat, s in busy.items()}, abs=0.01)
    pages = [e["args"] for e in by_kind(events, "C", STEPS) if e["name"] == "pages"]
    assert [page["live"] for page in pages] == list(steps.live_pages)
    assert {sum(page.values()) for page in pages} <= {result.num_pages}
    waiting = [e["args"]["waiting"] for e in by_kind(events, "C", STEPS) if e["name"] == "requests"]
    assert waiting == [*steps.waiting, *([0] if len(steps) else [])]
    assert len(by_kind(events, "i", SEATS)) == segments.preempted.sum()
    spans = spans_of(by_kind(events, "b", REQUESTS) + by_kind(events, "e", REQUESTS))
    for number, row in enumerate(requests.itertuples()):
        begin, end = spans[number].pop(f"request {row.request_id}")
        assert begin == 1e6 * row.arrival_s
        if row.finish_reason in ("stop", "length"):
            assert end == pytest.approx(1e6 * row.finished_s, abs=1e-3)
        within = sum(to - at for at, to in spans[number].values())
        assert within == pytest.approx(end - begin, abs=0.01), "waiting and working, one after another, no gap"


def spans_of(events):
    """By request, the span of each name; those of one name added up as one span of the same length."""
    spans, begun = defaultdict(dict), {}
    for event in sorted(events, key=lambda e: e["ts"]):
        key = event["id"], event["name"]
        if event["ph"] == "b":
            begun[key] = event["ts"]
        else:
            before = spans[event["id"]].get(event["name"])
            shift = before[1] - before[0] if before else 0.0
            spans[event["id"]][event["name"]] = begun[key] - shift, event["ts"]
    return spans


def test_further_samples_and_rejected_requests_are_in_it():
    engine = engine_of(num_pages=8)
    three = cb.Request("a", [1, 2, 3], cb.SamplingParams(max_tokens=4, n=3), arrival_time=0.25)
    events = trace_events(engine.run([three, request("big", 999)]))
    require_valid(events)
    titles = {event["name"]: event["args"] for event in by_kind(events, "b", REQUESTS) if "args" in event}
    assert {"request a", "request a#1", "request a#2", "request big"} <= titles.keys()
    assert titles["request big"]["finish_reason"] == "rejected"


def test_host_time_is_beside_the_model_within_a_step():
    engine = engine_of()
    engine.runner.is_virtual, execute = False, engine.runner.execute
    engine.runner.execute = lambda step: replace(execute(step), elapsed_s=1e-9)  # less than it really takes
    events = trace_events(engine.run([request("a", 4, 2)]))
    require_valid(events)
    assert [e["name"] for e in by_kind(events, "X", STEPS)] == ["step 0", "model", "step 1", "model"]


def test_the_file_is_json_and_replaces_an_older_one(tmp_path):
    result = engine_of().run([request("a", 4, 2)])
    path = tmp_path / "run.json"
    path.write_text("old", encoding="utf-8")
    assert result.to_perfetto(str(path)) == path
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["traceEvents"] == trace_events(result)
    assert trace["displayTimeUnit"] in ("ms", "ns")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_what_was_there(tmp_path, monkeypatch, error):
    result = engine_of().run([request("a", 4, 2)])
    path = tmp_path / "run.json"
    path.write_text("old", encoding="utf-8")

    def interrupt(*_):
        raise error

    monkeypatch.setattr("contbatch.trace_events.os.replace", interrupt)
    with pytest.raises(error):
        result.to_perfetto(path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text(encoding="utf-8") == "old"


def test_a_run_without_detail_has_no_trace(tmp_path):
    result = cb.simulate(cb.Poisson(rate=4, num_requests=3), detail=False)
    with pytest.raises(DetailError, match="a trace"):
        result.to_perfetto(tmp_path / "run.json")
    assert not list(tmp_path.iterdir())
