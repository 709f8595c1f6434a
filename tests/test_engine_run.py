"""Feeding an engine: requests made as they arrive, and the bar."""

import os
import re
import subprocess
import sys
from itertools import accumulate

import pytest
from fake_runner import engine_of, request
from hypothesis import given, settings
from random_workloads import POLICIES, WORKLOADS

import contbatch as cb
from contbatch.errors import InvalidRequestError
from contbatch.lengths import Uniform
from contbatch.sessions import ClosedLoop


class Bar:
    def __init__(self):
        self.steps, self.totals = [], []

    def __call__(self, total, unit, shown):
        self.total, self.unit, self.shown = total, unit, shown
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self, step):
        self.steps.append(step)
        self.totals.append(self.total)


@settings(max_examples=60, deadline=None)
@given(WORKLOADS, POLICIES)
def test_asking_one_by_one_changes_nothing(workload, policy):
    at_once, coming = (sorted(workload.requests(), key=lambda r: r.arrival_time) for _ in range(2))
    expected = engine_of(policy, **workload.limits).run(at_once)
    result = engine_of(policy, **workload.limits).run(iter(coming), in_order=True)
    # The rejected have their row when they are asked for, so not all of them first.
    rows, others = (each.requests.sort_values("request_id", ignore_index=True) for each in (result, expected))
    assert rows.equals(others)
    assert result.steps.equals(expected.steps)
    assert [(r.output_token_ids, r.finish_reason) for r in coming] == [
        (r.output_token_ids, r.finish_reason) for r in at_once
    ]


def test_a_request_is_asked_for_when_the_one_before_it_has_arrived():
    made, most = [], 0
    engine = engine_of()

    def requests():
        nonlocal most
        for i in range(20):
            made.append(request(i, 2, 3, at=100.0 * i))
            most = max(most, sum(not r.is_finished for r in made))
            yield made[-1]

    assert len(engine.run(requests(), in_order=True).requests) == 20
    assert most == 2


def test_nobody_may_come_before_the_one_listed_before():
    engine = engine_of()
    with pytest.raises(
        InvalidRequestError, match=r"must not arrive before the one listed before it.* 3\.0 s; got 2\.5"
    ):
        engine.run([request("a", 2, 9, at=3.0), request("b", 2, 1, at=2.5)], in_order=True)
    assert not engine.has_requests
    assert len(engine.run([request("c", 2, 1)]).requests) == 1


def test_those_who_follow_the_rejected_come():
    engine = engine_of(num_pages=2, page_size=4)
    follow = {"long": [request("after", 1, 1, at=7.0)]}
    run = engine.run([request("long", 99)], on_finish=lambda r, now: follow.pop(r.request_id, ()), in_order=True)
    assert list(run.requests.finish_reason) == ["rejected", "length"]


def test_a_simulation_shows_its_time(monkeypatch):
    bar = Bar()
    monkeypatch.setattr("contbatch.engine_run.progress_bar", bar)
    load = cb.Poisson(rate=1, num_requests=30, output=Uniform(1, 50))
    result = cb.simulate(load, progress=True)
    assert (bar.unit, bar.shown, bar.totals[0]) == ("s", True, max(turn.delay_s for turn in load.turns()))
    assert sum(bar.steps) == pytest.approx(result.end_s)
    assert bar.total == result.end_s > bar.totals[0]
    assert all(done <= total + 1e-9 for done, total in zip(accumulate(bar.steps), bar.totals, strict=True))


PRINTED = """
import contbatch as cb
from contbatch.simulation import simulated_engine
load = cb.OpenLoop(arrivals=cb.arrivals.{arrivals}, num_requests=9, output=99)
{run}
"""
KNOWN, UNKNOWN = (
    "cb.simulate(load, progress=True, fast_forward=False)",
    "simulated_engine().run(load.requests(), progress=True)",
)


@pytest.mark.parametrize(
    ("arrivals", "run", "line"),
    [
        ("PoissonArrivals(1)", KNOWN, r" *\d+%\|.*\| (\d+\.\d)/(\d+\.\d) s \[\d\d:\d\d\]"),
        ("AllAtOnce()", KNOWN, r"(?: *\d+%)?\|.*\| (\d+\.\d)/(\d+\.\d) s \[\d\d:\d\d\]"),
        ("AllAtOnce()", UNKNOWN, r"(\d+\.\d) s \[\d\d:\d\d\]"),
    ],
)
def test_the_bar_of_a_simulation_as_it_is_printed(arrivals, run, line):
    code = PRINTED.format(arrivals=arrivals, run=f"print({run}.end_s)")
    env = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"} | {"TQDM_MININTERVAL": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", check=True)
    shown = [re.fullmatch(line, text.rstrip()) for text in re.split(r"[\r\n]+", done.stderr) if text.strip()]
    assert len(shown) >= 2
    assert all(shown)
    numbers = [[float(number) for number in match.groups()] for match in shown]
    assert all(seconds[0] <= seconds[-1] for seconds in numbers)
    assert {*numbers[-1]} == {round(float(done.stdout), 1)}


def test_clients_who_do_not_come_in_order():
    loop = ClosedLoop(num_clients=5, num_requests=20, think_s=9.0, output=Uniform(1, 9))
    assert not loop.source().in_order
    assert len(cb.simulate(loop).requests) == 20
