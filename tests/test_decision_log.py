"""The decision log: it says what happened, replays without a scheduler, and is the same for the same workload."""

import gc
import os
import pickle
import random
import subprocess
import sys
import weakref
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path

import pytest
from fake_runner import engine_of, request, scheduler_of
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import POLICIES, SAMPLED

import contbatch as cb
from contbatch.decision import MOVES, Decision
from contbatch.errors import DecisionLogError, SchedulerError
from contbatch.policies import ChunkedPrefill, ContinuousBatching, MaxUtilization, Orca, Priority
from contbatch.samples import sample_ids

FIELDS = [f.name for f in fields(Decision)]
LAYOUTS = st.sampled_from(["paged", "contiguous"])


def limits_of(workload, layout):
    return {**workload.limits, "layout": layout, "prefix_cache": workload.limits["prefix_cache"] and layout == "paged"}


def logged(policy, requests, **limits):
    """An engine with a log, and the states of its scheduler while each step ran."""
    engine = engine_of(policy, **limits)
    engine.log = cb.DecisionLog()
    scheduler, execute, live = engine.scheduler, engine.runner.execute, []

    def watch(step):
        pool = scheduler.pool
        taken = {page for r in scheduler.running for page in r.pages} | set(pool.cached_pages)
        live.append(
            (
                step.step,
                {r.seat: r.request_id for r in scheduler.running},
                {r.request_id: tuple(r.pages) for r in scheduler.running},
                {r.request_id: r.num_computed_tokens for r in scheduler.running},
                tuple(r.request_id for r in scheduler.waiting),
                {r.request_id: tuple(r.host_pages) for r in scheduler.waiting if r.host_pages},
                frozenset(range(pool.num_pages)) - taken,
                frozenset(pool.cached_pages),
            )
        )
        return execute(step)

    engine.runner.execute = watch
    for r in requests:
        engine.add(r)
    return engine, live


def run_to_the_end(engine):
    while engine.has_requests:
        engine.step()


def replayed(log):
    return [(s.step, s.seats, s.tables, s.computed, s.waiting, s.host_tables, s.free, s.cached) for s in log.states()]


@settings(max_examples=150)
@given(SAMPLED, POLICIES, LAYOUTS)
def test_replayed_states_are_those_recorded_live(workload, policy, layout):
    requests = filter(workload.fits, workload.requests())
    engine, live = logged(policy, requests, **limits_of(workload, layout))
    run_to_the_end(engine)
    assert replayed(engine.log) == live


@settings(max_examples=100)
@given(SAMPLED, POLICIES, LAYOUTS, st.data())
def test_replay_survives_aborts_crashes_and_failures(workload, policy, layout, data):
    requests = list(filter(workload.fits, workload.requests()))
    engine, live = logged(policy, requests, **limits_of(workload, layout))
    runner = engine.runner
    samples = [name for r in requests for name in sample_ids(r)]
    names = st.sampled_from(samples or [0])
    for _ in range(data.draw(st.integers(0, 12))):
        action = data.draw(st.sampled_from(["step", "abort", "crash", "poison", "abort in callback"]))
        if action == "abort":
            engine.abort(data.draw(names))
        elif action == "crash":
            runner.crash = {runner.calls}
        elif action == "poison":
            runner.poison[data.draw(names)] = data.draw(st.integers(0, 3))
        elif action == "abort in callback":
            name = data.draw(names)
            engine.on_token = lambda r, name=name: engine.abort(name)
        with suppress(RuntimeError):
            engine.step()
    engine.on_token = None
    run_to_the_end(engine)
    assert replayed(engine.log) == live
    assert sum(len(row.left) for row in engine.log.rows) <= len(samples)


@settings(max_examples=60)
@given(SAMPLED, POLICIES, LAYOUTS)
def test_rows_say_what_the_runner_was_given_and_what_it_made(workload, policy, layout):
    requests = list(filter(workload.fits, workload.requests()))
    engine, _ = logged(policy, requests, **limits_of(workload, layout))
    run_to_the_end(engine)
    requests = [sample for r in requests for sample in r.samples]
    log, made = engine.log, {r.request_id: [] for r in requests}
    assert [name for name, _ in log.requests] == [r.request_id for r in sorted(requests, key=lambda r: r.order)]
    for row, (grants, _), moves in zip(log.rows, engine.runner.steps, engine.runner.moves, strict=True):
        assert [(MOVES[kind], source, target) for kind, source, target in row.moves] == moves
        assert [
            (log.requests[n][0], start, tokens, bool(f & 1), bool(f & 2)) for n, start, tokens, f in row.grants
        ] == grants
        for number, token in row.sampled:
            made[log.requests[number][0]].append(token)
        planned = dict(row.plan)
        assert all(tokens <= planned[number] for number, _, tokens, _ in row.grants)
    assert made == {r.request_id: r.output_token_ids for r in requests}
    assert [log.requests[n][0] for row in log.rows for n, _ in row.left] == [
        r.request_id for r in engine.scheduler.ended
    ]


# ---- the same workload, the same log -----------------------------------------------------------------------------


@settings(max_examples=60)
@given(SAMPLED, POLICIES, LAYOUTS)
def test_the_same_workload_gives_the_same_log(workload, policy, layout):
    logs = []
    for _ in range(2):
        engine, _ = logged(policy, filter(workload.fits, workload.requests()), **limits_of(workload, layout))
        run_to_the_end(engine)
        logs.append(engine.log)
    assert logs[0] == logs[1]
    assert logs[0].diff(logs[1]) is None


PROGRAM = """
import sys; sys.path[:0] = sys.argv[1:3]
from fake_runner import engine_of
import fake_runner, zlib
fake_runner.next_token = lambda tokens, sample=0: zlib.crc32(bytes(tokens)) % 7
import contbatch as cb
for policy in (cb.FairShare(), cb.Priority(preempt=True), cb.ShortestJobFirst(by="prediction", error=1.0)):
    requests = [
        cb.Request(f"r{i}", [i % 3] * (3 + 5 * i % 11), cb.SamplingParams(max_tokens=3 + i % 7), arrival_time=i / 2,
                   client_id=("a", "b", "c")[i % 3], priority=i % 4, cache_salt=("x", None)[i % 2])
        for i in range(24)
    ]
    engine = engine_of(policy, num_pages=9, max_num_seqs=4, max_num_batched_tokens=9, prefix_cache=True)
    engine.log = cb.DecisionLog()
    engine.run(requests)
    print(engine.log.settings, engine.log.requests, *engine.log.rows, sep="\\n")
    assert sum(len(row.preempted) for row in engine.log.rows) > 3
"""


def test_the_log_does_not_hang_on_the_hash_seed():
    root = Path(__file__).resolve().parent
    printed = set()
    for seed in ("0", "1", "77"):
        command = [sys.executable, "-c", PROGRAM, str(root), str(root.parent)]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        printed.add(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    assert len(printed) == 1
    assert len(printed.pop().splitlines()) > 100


# ---- files -------------------------------------------------------------------------------------------------------


def some_log(n=1, **limits):
    limits = {"num_pages": 4, "max_num_seqs": 3, "max_num_batched_tokens": 9, "prefix_cache": True, **limits}
    names = ["a", "b", "ü", 3, 4]
    prompts = [[i] * (4 + i) for i in range(5)]
    made = cb.SamplingParams(max_tokens=5, n=n)
    requests = [
        cb.Request(n, p, made, arrival_time=i // 2) for i, (n, p) in enumerate(zip(names, prompts, strict=True))
    ]
    engine, _ = logged(ChunkedPrefill(), requests, **limits)
    run_to_the_end(engine)
    return engine.log


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_saved_log_loads_equal_and_replays(suffix, tmp_path):
    log = some_log(n=2, num_host_pages=6)
    empty = {name for name in FIELDS if not any(getattr(row, name) for row in log.rows)}
    assert empty == {"restarted", "lost"}
    loaded = cb.DecisionLog.load(log.save(tmp_path / f"log.{suffix}"))
    assert loaded == log
    assert replayed(loaded) == replayed(log)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_empty_log_has_a_file_too(suffix, tmp_path):
    assert cb.DecisionLog.load(cb.DecisionLog().save(tmp_path / f"log.{suffix}")) == cb.DecisionLog()


def test_the_table_has_a_row_a_decision():
    log = some_log()
    frame = log.frame()
    assert list(frame.columns) == FIELDS
    assert list(frame.step) == [row.step for row in log.rows]
    assert list(frame.grants) == [row.grants for row in log.rows]


def changed_line(lines, row, old, new):
    assert old in lines[1 + row]
    return [*lines[: 1 + row], lines[1 + row].replace(old, new, 1), *lines[2 + row :]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: changed_line(lines, 3, '"now":', '"now":1'), r"step 3 \(row 3\) was changed"),
        (lambda lines: changed_line(lines, 2, '"sampled":[[0,', '"sampled":[[0,9'), r"step 2 \(row 2\) was changed"),
        (lambda lines: [*lines[:4], *lines[5:]], r"step 4 \(row 3\) was changed"),
        (lambda lines: [lines[0].replace('"ü"', '"u"').replace("\\u00fc", "u"), *lines[1:]], "the header was changed"),
        (lambda lines: lines[:-2], "cut off after row"),
        (lambda lines: [*lines[:2], "{", *lines[3:]], "line 3, is no row"),
        (lambda lines: [*lines[:2], lines[2].replace('"step"', '"stop"'), *lines[3:]], "is no decision log: TypeError"),
        (lambda lines: lines[1:], "is no decision log: KeyError"),
        (lambda lines: [], "is no decision log"),
    ],
)
def test_a_changed_file_is_refused(change, message, tmp_path):
    path = some_log().save(tmp_path / "log.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(change(lines)), encoding="utf-8")
    with pytest.raises(DecisionLogError, match=message):
        cb.DecisionLog.load(path)


def test_a_file_of_another_kind_is_named():
    with pytest.raises(DecisionLogError, match=r"\*.jsonl or \*.parquet, got log.csv"):
        cb.DecisionLog().save("log.csv")


# ---- what can't have happened ------------------------------------------------------------------------------------


def impossible():
    """(field, what it is changed to in row 2, message)."""
    return [
        ("admitted", [[1, 0, 0]], "request 1 can't have taken seat 0"),
        ("preempted", [4], "request 4 lost a seat that it did not have"),
        ("queued", [77], "request 77 can't have begun to wait"),
        ("tables", [[0, 0, 99]], r"holds pages .*99"),
        ("tables", [[0, 0, 1, 1]], "can't hold pages"),
        ("tables", [[0, 9, 1]], "has no page 9 in its table"),
        ("cached", [0], r"can't be cached|pages are free"),
        ("free", 55, "pages are free, not 55"),
        ("grants", [[0, 3, 1, 1]], "so 3 can't come next"),
        ("grants", [[0, 5, 100, 1]], "has no room for 100 tokens"),
        ("left", [[77, 0]], "request 77 left, but was not there"),
        ("grants", [[0]], "malformed"),
        ("tables", None, "malformed"),
    ]


@pytest.mark.parametrize(("name", "value", "message"), impossible())
def test_a_log_of_impossible_decisions_is_refused_at_its_step(name, value, message):
    log = some_log(prefix_cache=False)
    extra = {"ranks": [0.0]} if name == "queued" else {}
    log.rows[2] = replace(log.rows[2], **{name: value}, **extra)
    states = log.states()
    assert [next(states).step, next(states).step] == [0, 1]
    with pytest.raises(DecisionLogError, match=rf"^step 2 \(row 2\): .*{message}"):
        next(states)


def impossible_moves():
    """(field, kind of move in the row concerned, change of its value, message)."""
    return [
        ("moves", "out", lambda moves: moves[1:], "pages went out to"),
        ("moves", "out", lambda moves: [[1, 99, moves[0][2]], *moves[1:]], "out from page 99"),
        ("moves", "out", lambda moves: [[1, moves[0][1], 99], *moves[1:]], "out from page . to page 99"),
        ("moves", "in", lambda moves: [[2, moves[0][1] + 1, moves[0][2]]], "in from page"),
        ("moves", "in", lambda moves: [[2, moves[0][1], 99]], "in from page . to page 99"),
        ("moves", "copy", lambda moves: [[0, moves[0][1], 99]], "copy from page . to page 99"),
        ("moves", "copy", lambda moves: [[0, -1, moves[0][2]]], "copy from page -1"),
        ("moves", "copy", lambda moves: [[7, 1, 1]], "malformed"),
        ("host", "out", lambda host: [], "nothing can have gone out"),
        ("host", "out", lambda host: [[host[0][0], *range(90, 89 + len(host[0]))]], "nothing can have gone out"),
        ("host", "in", lambda host: [], "hold host pages, but not all wait"),
        ("forked", None, lambda forked: [0], "request 0 can't be forked"),
    ]


@pytest.mark.parametrize(("name", "kind", "change", "message"), impossible_moves())
def test_a_log_of_impossible_page_moves_is_refused_at_its_step(name, kind, change, message):
    log = some_log(n=2, num_host_pages=6, prefix_cache=False)
    assert [*log.states()][-1].host_tables == {}
    place = next(i for i, row in enumerate(log.rows) if kind in [MOVES[move] for move, *_ in row.moves] or not kind)
    log.rows[place] = replace(log.rows[place], **{name: change(getattr(log.rows[place], name))})
    with pytest.raises(DecisionLogError, match=rf"^step {log.rows[place].step} \(row {place}\): .*{message}"):
        list(log.states())


def test_a_page_that_may_be_written_has_one_holder():
    log = some_log(n=2, prefix_cache=False)
    tables = [table for state in log.states() for table in state.tables.values()]
    assert any(one is not other and {*one} & {*other} for one in tables for other in tables)
    place = next(i for i, row in enumerate(log.rows) if any(MOVES[move] == "copy" for move, *_ in row.moves))
    row = log.rows[place]
    [copy] = row.moves
    tables = [[page if page != copy[2] else copy[1] for page in table] for table in row.tables]
    log.rows[place] = replace(row, tables=tables, moves=[], free=row.free + 1)
    with pytest.raises(DecisionLogError, match=rf"page {copy[1]}, in which request . may write, has 2 holders"):
        list(log.states())


def test_a_log_begins_with_its_scheduler():
    scheduler = scheduler_of(ChunkedPrefill(), request("a", 4, 5))
    scheduler.update(scheduler.schedule(), {"a": 1})
    with pytest.raises(SchedulerError, match="begins before"):
        cb.DecisionLog().begin(scheduler.schedule(), scheduler, 0.0)


EXPERIMENT = cb.Experiment(workload=cb.Poisson(rate=8, num_requests=10))


@pytest.mark.parametrize("changes", [{}, {"policy": Orca()}, {"num_pages": 200, "prefix_cache": True}])
def test_a_log_of_one_run_is_not_that_of_another(changes):
    log = cb.DecisionLog()
    first = cb.run(EXPERIMENT, log=log)
    rows = list(log.rows)
    with pytest.raises(SchedulerError, match=f"holds {len(rows)} steps of 10 requests of another run"):
        cb.run(EXPERIMENT.replace(**changes), log=log)
    assert first.decisions is log
    assert (log.rows, len(log.requests)) == (rows, 10)


def test_a_log_goes_on_with_its_scheduler_only(tmp_path):
    engine, _ = logged(ChunkedPrefill(), [request("a", 4, 5)])
    run_to_the_end(engine)
    steps = len(engine.log)
    engine.add(request("b", 4, 5))
    run_to_the_end(engine)
    assert len(engine.log) == 2 * steps
    again = [deepcopy(engine.log), cb.DecisionLog.load(engine.log.save(tmp_path / "log.jsonl"))]
    again.append(pickle.loads(pickle.dumps(engine.log)))
    engine.add(request("c", 4, 5))
    step = engine.scheduler.schedule()
    for log in again:
        assert log == engine.log
        with pytest.raises(SchedulerError, match=f"holds {2 * steps} steps of 2 requests"):
            log.begin(step, engine.scheduler, engine.now)


def test_a_log_does_not_keep_its_scheduler():
    engine, _ = logged(ChunkedPrefill(), [request("a", 4, 5)])
    run_to_the_end(engine)
    log, scheduler = engine.log, weakref.ref(engine.scheduler)
    del engine
    gc.collect()
    assert scheduler() is None
    assert log.rows


# ---- two runs differ ---------------------------------------------------------------------------------------------


def pair(first=None, second=None, policies=None, poison=None):
    """Logs of two runs of three requests."""
    logs = []
    for policy, limits in zip(policies or [ChunkedPrefill()] * 2, (first or {}, second or {}), strict=True):
        requests = [request(name, 6, 4, priority=-i) for i, name in enumerate("abc")]
        engine, _ = logged(policy, requests, **{"num_pages": 9, "max_num_batched_tokens": 8, **limits})
        if poison is not None and logs:
            engine.runner.poison["b"] = poison
        run_to_the_end(engine)
        logs.append(engine.log)
    return logs


def test_another_budget_shows_in_the_first_step_that_it_changes():
    one, other = pair({}, {"max_num_batched_tokens": 9})
    found = one.diff(other)
    assert (found.step, found.field, found.request_id, found.before) == (0, "grants", "b", None)
    assert str(found) == (
        "step 0, who computes what: tokens 0 to 1 of request 'b' in the first log, tokens 0 to 2 of request 'b' in the "
        "second. The schedulers differ in max_num_batched_tokens: 8 and 9."
    )


def test_another_order_shows_in_the_plan():
    one, other = pair(policies=(ChunkedPrefill(), Priority()))
    found = one.diff(other)
    assert (found.field, found.first) == ("queued", "request 'b' of rank 0.0, arrived at 0.0 s")
    one, other = pair(policies=(ContinuousBatching(), MaxUtilization()))
    found = one.diff(other)
    assert (found.step, found.field) == (1, "plan")
    assert (found.first, found.second) == ("4 tokens of request 'b'", "1 tokens of request 'a'")
    assert found.before.seats == {0: "a", 1: "b"}
    assert "One step earlier both had 2 running, 1 waiting and 5 free pages." in str(found)


def test_another_token_or_a_failure_shows_where_it_was_made():
    one, other = pair(poison=1)
    found = one.diff(other)
    assert (found.field, found.request_id, found.second) == ("sampled", "b", "nothing")
    changed = replace_token(one)
    found = one.diff(changed)
    assert (found.step, found.field, found.request_id) == (3, "sampled", "a")
    assert str(found).startswith("step 3, the tokens made: token ")


def replace_token(log):
    changed = cb.DecisionLog()
    changed.settings, changed.requests, changed.rows = log.settings, log.requests, list(log.rows)
    sampled = [[number, token + 1] for number, token in log.rows[3].sampled]
    changed.rows[3] = replace(log.rows[3], sampled=sampled)
    return changed


def test_a_log_that_goes_on_and_one_that_differs_in_time_alone():
    one, other = pair()
    other.rows.pop()
    found = one.diff(other)
    assert (found.field, found.step, found.first, found.second) == ("rows", len(other), "a step", "the end")
    assert other.diff(one).second == "a step"
    one, other = pair()
    other.rows[2] = replace(other.rows[2], now=99.0)
    assert str(one.diff(other)).startswith("step 2, when it began: ")
    other.rows[4] = replace(other.rows[4], bound=[1, 2])
    assert one.diff(other).field == "bound", "decisions before times"


def test_settings_that_change_no_decision_are_named_last():
    one, other = pair({}, {"max_num_seqs": 40})
    found = one.diff(other)
    assert found.field == "settings"
    assert "max_num_seqs: 64 and 40" in str(found)


@settings(max_examples=60)
@given(
    SAMPLED, POLICIES, st.integers(0, 2**31), st.sampled_from(["plan", "grants", "tables", "sampled", "free", "now"])
)
def test_any_change_is_found_in_its_row(workload, policy, seed, name):
    engine, _ = logged(policy, filter(workload.fits, workload.requests()), **workload.limits)
    run_to_the_end(engine)
    log, other = engine.log, cb.DecisionLog()
    other.settings, other.requests, other.rows = log.settings, log.requests, list(log.rows)
    places = [i for i, row in enumerate(log.rows) if getattr(row, name) not in ([], None)]
    if not places:
        return
    place = random.Random(seed).choice(places)
    value = getattr(log.rows[place], name)
    value = [[*value[0][:-1], value[0][-1] + 1], *value[1:]] if isinstance(value, list) else value + 1
    other.rows[place] = replace(log.rows[place], **{name: value})
    found = log.diff(other)
    assert (found.row, found.field, found.step) == (place, name, log.rows[place].step)


def test_a_result_carries_the_log_of_its_engine():
    engine = engine_of(Orca())
    assert engine.run([request("a")]).decisions is None
    engine.log = cb.DecisionLog()
    assert engine.run([request("a", 3, 4)]).decisions is engine.log
    assert len(engine.log) == 4
