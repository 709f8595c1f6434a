"""Sweeps: order, cache, failures, interrupts, workers."""

import joblib
import pandas as pd
import pytest

import contbatch as cb
from contbatch import sweeps
from contbatch.errors import ExperimentError

BASE = cb.Experiment(
    workload=cb.Poisson(rate=4, num_requests=12, seed=0),
    backend=cb.Simulated(cost=cb.Linear(step_s=0.01), kv_tokens=9999),
)


def at_rates(*rates):
    return [BASE.replace(workload=BASE.workload.replace(rate=rate)) for rate in rates]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path))
    return tmp_path / "sweeps"


def test_rows_are_the_summaries_in_the_order_given():
    points = [p.replace(policy=policy) for policy in (cb.OneAtATime(), cb.Orca()) for p in at_rates(8, 2, 8)]
    table = cb.sweep(iter(points), progress=False)
    assert list(table.columns[:2]) == ["policy", "rate"]
    assert list(table.columns[-2:]) == ["experiment", "error"]
    assert list(table.rate) == [8, 2, 8, 8, 2, 8]
    assert list(table.policy) == ["OneAtATime()"] * 3 + ["Orca()"] * 3
    assert list(table.experiment) == [p.hash for p in points]
    assert table.error.isna().all()
    summaries = pd.DataFrame([cb.run(p).summary() for p in points])
    pd.testing.assert_frame_equal(table[summaries.columns], summaries, check_dtype=False)
    pd.testing.assert_frame_equal(cb.sweep(points, progress=False), table)  # from the disk


def test_names_of_what_differs():
    points = [
        BASE,
        BASE.replace(workload=BASE.workload.replace(seed=1), max_num_seqs=3),
        BASE.replace(workload=cb.ClosedLoop(num_clients=2, num_requests=12), backend=BASE.backend.replace(gpu="T4")),
    ]
    rows = sweeps.differences(points)
    assert [row["max_num_seqs"] for row in rows] == [64, 3, 64]
    assert [row["workload"] for row in rows] == ["Poisson", "Poisson", "ClosedLoop"]
    assert [row["seed"] for row in rows] == [0, 1, 0]
    assert [row["gpu"] for row in rows] == ["A100-40GB", "A100-40GB", "T4"]
    assert [row["num_clients"] for row in rows] == [None, None, 2]
    assert "num_requests" not in rows[0]
    two = [BASE, BASE.replace(num_pages=5, backend=BASE.backend.replace(kv_tokens=5))]
    assert sweeps.differences(two) == [{"num_pages": None, "kv_tokens": 9999}, {"num_pages": 5, "kv_tokens": 5}]
    assert sweeps.differences([BASE]) == [{}]
    assert cb.sweep([], progress=False).empty


def counted(monkeypatch, act=lambda _: None):
    calls = []

    def run(point):
        calls.append(point)
        act(len(calls))
        return cb.run(point)

    monkeypatch.setattr(sweeps, "run", run)
    return calls


def test_what_has_run_does_not_run_again_unless_the_code_changed(folder, monkeypatch):
    calls = counted(monkeypatch)
    cb.sweep(at_rates(1, 2, 1), progress=False)
    assert len(calls) == 2
    cb.sweep(at_rates(2, 1, 3), progress=False)
    assert len(calls) == 3
    cb.sweep(at_rates(1), cache=False, progress=False)
    assert len(calls) == 4
    for path in folder.rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:50])  # as a full disk leaves it
    cb.sweep(at_rates(1, 2, 3), progress=False)
    assert len(calls) == 7
    monkeypatch.setattr(sweeps, "code_version", lambda: "another")
    cb.sweep(at_rates(1), progress=False)
    assert len(calls) == 8


def test_an_interrupted_sweep_goes_on_where_it_was(monkeypatch):
    def interrupt(call):
        if call == 3:
            raise KeyboardInterrupt

    calls = counted(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        cb.sweep(at_rates(1, 2, 3, 4), progress=False)
    assert len(calls) == 3
    table = cb.sweep(at_rates(1, 2, 3, 4), progress=False)
    assert len(calls) == 5
    assert list(table.requests) == [12] * 4


def test_one_that_fails_is_reported_and_tried_again(monkeypatch):
    def fail(call):
        if call == 2:
            raise ZeroDivisionError("by nothing")

    calls = counted(monkeypatch, fail)
    table = cb.sweep(at_rates(1, 2, 3), progress=False)
    assert table.error[1] == "ZeroDivisionError: by nothing"
    assert table.requests.isna().tolist() == [False, True, False]
    assert table.error.isna().tolist() == [True, False, True]
    assert cb.sweep(at_rates(1, 2, 3), progress=False).error.isna().all()
    assert len(calls) == 4


def test_nothing_runs_if_one_is_no_experiment(monkeypatch):
    calls = counted(monkeypatch)
    with pytest.raises(ExperimentError, match="experiment 1 must be an Experiment, got 3"):
        cb.sweep([BASE, 3], progress=False)
    assert calls == []


def test_processes_give_the_same_table():
    points = at_rates(1, 2, 3, 4)
    alone = cb.sweep(points, cache=False, progress=False)
    pd.testing.assert_frame_equal(cb.sweep(points, n_jobs=2, cache=False, progress=False), alone)


@pytest.mark.filterwarnings("ignore")  # of Dask's own
def test_a_dask_cluster_gives_the_same_table():
    distributed = pytest.importorskip("distributed")
    points = at_rates(1, 2, 3, 4)
    alone = cb.sweep(points, cache=False, progress=False)
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        with joblib.parallel_config("dask"):
            table = cb.sweep(points, cache=False, progress=False)
        assert any(client.run(lambda: "contbatch.experiment" in __import__("sys").modules).values())
    pd.testing.assert_frame_equal(table, alone)
