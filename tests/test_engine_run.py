"""Feeding an engine: requests made as they arrive, and the bar."""

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
        self.steps = []

    def __call__(self, total, unit, shown):
        self.total, self.unit, self.shown = total, unit, shown
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self, step):
        self.steps.append(step)


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
    assert (bar.unit, bar.shown, bar.total) == ("s", True, max(turn.delay_s for turn in load.turns()))
    assert sum(bar.steps) == pytest.approx(result.end_s)
    assert result.end_s > bar.total


def test_clients_who_do_not_come_in_order():
    loop = ClosedLoop(num_clients=5, num_requests=20, think_s=9.0, output=Uniform(1, 9))
    assert not loop.source().in_order
    assert len(cb.simulate(loop).requests) == 20
