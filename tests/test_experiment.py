"""Experiments as values: equal, hashed, written and read back."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import contbatch as cb
from contbatch.arrivals import AllAtOnce, BurstArrivals, DiurnalArrivals, GammaArrivals
from contbatch.description import describe, digest, restore
from contbatch.errors import ExperimentError
from contbatch.lengths import Fixed, Uniform

TESTS = Path(__file__).resolve().parent
WORKLOADS = [
    cb.Poisson(rate=4, num_requests=20, seed=3),
    cb.OpenLoop(arrivals=GammaArrivals(2.0, cv=3.0), num_requests=5, prompt=Fixed(7), output=Uniform(1, 9)),
    cb.OpenLoop(arrivals=DiurnalArrivals((1, 0.5)), num_requests=5, prefix=cb.SharedPrefix(30, num_prefixes=2)),
    cb.ClosedLoop(num_clients=2, num_requests=4, client=cb.Client(client_id="a", ttft_target_s=0.5)),
    cb.Mixture((cb.Poisson(rate=1, num_requests=2), cb.OpenLoop(arrivals=BurstArrivals(3, 2.0), num_requests=4))),
    cb.AgentLoops(arrivals=AllAtOnce(), num_tasks=2),
    cb.Trace([cb.Turn(0, 0.0, (cb.Segment(1, 5),), 3)], "mine"),
]
BACKENDS = [
    cb.Simulated(),
    cb.Simulated(gpu="H100", model="llama-3.1-8b", kv_tokens=1000, tensor_parallel=2),
    cb.Simulated(cost=cb.Linear(step_s=1.0), kv_tokens=100),
    cb.Simulated(cost=cb.Roofline("T4", "mistral-7b", "f16", compute_efficiency=0.5), kv_tokens=100),
]
experiments = st.builds(
    cb.Experiment,
    workload=st.sampled_from(WORKLOADS),
    policy=st.sampled_from(
        [cb.ChunkedPrefill(), cb.StaticBatching(8), cb.Orca("power_of_two"), cb.FairShare(), cb.Priority(preempt=True)]
    ),
    backend=st.sampled_from(BACKENDS),
    num_pages=st.none() | st.integers(1, 10**6),
    max_num_seqs=st.integers(1, 500),
    prefix_cache=st.booleans(),
)


@given(experiments, experiments)
def test_equal_is_equal_hash_and_json_brings_it_back(a, b):
    again = cb.Experiment.from_json(a.to_json())
    assert again == a
    assert (again.hash, hash(again)) == (a.hash, hash(a))
    assert (a.hash == b.hash) == (a.to_json() == b.to_json())
    assert (a == b) <= (a.hash == b.hash)


def test_every_field_is_in_the_hash():
    changes = {
        "workload": WORKLOADS[1], "policy": cb.FairShare(), "backend": BACKENDS[1], "num_pages": 9, "page_size": 8,
        "max_num_seqs": 3, "max_num_batched_tokens": 7, "max_model_len": 99, "prefix_cache": True, "num_host_pages": 1,
        "layout": "contiguous",
    }  # fmt: skip
    assert changes.keys() == {f.name for f in fields(cb.Experiment)}
    exp = cb.Experiment(workload=WORKLOADS[0])
    hashes = {exp.replace(**{name: value}).hash for name, value in changes.items()} | {exp.hash}
    assert len(hashes) == len(changes) + 1


def test_the_hash_is_that_of_any_process():
    exp = cb.Experiment(workload=WORKLOADS[4], policy=cb.ShortestJobFirst(by="prediction", error=1.0))
    code = "import sys, contbatch as cb; print(cb.Experiment.from_json(sys.stdin.read()).hash)"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], input=exp.to_json(), capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(TESTS.parent)},
        )  # fmt: skip
        assert done.stdout.strip() == exp.hash


def test_a_run_is_that_of_simulate():
    exp = cb.Experiment(
        workload=WORKLOADS[3], policy=cb.Orca(), backend=BACKENDS[2], num_pages=90, page_size=8, max_num_seqs=1,
        max_num_batched_tokens=64, max_model_len=700, prefix_cache=True,
    )  # fmt: skip
    limits = {"num_pages": 90, "page_size": 8, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    expected = cb.simulate(WORKLOADS[3], cb.Orca(), BACKENDS[2], max_model_len=700, prefix_cache=True, **limits)
    result = cb.run(exp)
    pd.testing.assert_frame_equal(result.requests, expected.requests)
    pd.testing.assert_frame_equal(result.steps, expected.steps)


class Backwards(cb.Policy):
    """Serves who came last."""

    def __init__(self, at_most=3):
        self.at_most = at_most

    def plan(self, waiting, running, budget):
        for r in [*running, *reversed(list(waiting))]:
            yield r, min(self.at_most, r.num_uncomputed_tokens)


def test_a_policy_of_ones_own_is_its_source_and_attributes():
    exp = cb.Experiment(workload=WORKLOADS[0], policy=Backwards())
    assert exp.hash == exp.replace(policy=Backwards(3)).hash != exp.replace(policy=Backwards(4)).hash
    assert "reversed(list(waiting))" in exp.to_json()
    assert cb.run(exp).summary().requests == 20
    with pytest.raises(ExperimentError, match="class Backwards was defined outside this package"):
        cb.Experiment.from_json(exp.to_json())


def test_a_class_without_source_is_an_error():
    made = {}
    exec("import contbatch as cb\nclass P(cb.ChunkedPrefill):\n    def rank(self, request): return 1", made)
    with pytest.raises(ExperimentError, match=r"the source of its class .*P is nowhere"):
        cb.Experiment(workload=WORKLOADS[0], policy=made["P"]()).to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "azure"}, "workload must be a Workload, got 'azure'"),
        ({"policy": cb.Orca}, "policy must be an instance of Policy"),
        ({"backend": "cpu"}, "backend must be a Simulated or an LLM, got 'cpu'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer ≥ 1, got 0"),
        ({"num_pages": 1.5}, "num_pages must be an integer ≥ 1, got 1.5"),
        ({"prefix_cache": 1}, "prefix_cache must be True or False, got 1"),
        ({"seats": 3}, "the field to replace must be one of policy, workload"),
    ],
)
def test_bad_fields(changes, message):
    with pytest.raises((ExperimentError, ValueError), match=message):
        cb.Experiment(workload=WORKLOADS[0]).replace(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("3", "describes no experiment, but int"),
        ('{"type": "os.system", "command": "x"}', "must be a dataclass of contbatch, got 'os.system'"),
        ('{"type": "contbatch.description.digest"}', "must be a dataclass of contbatch"),
        ('{"type": "contbatch.nothing.Here"}', "must be a dataclass of contbatch"),
        ('{"type": "contbatch.experiment.Experiment", "wrkload": 1}', "unexpected keyword argument 'wrkload'"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(ExperimentError, match=message):
        cb.Experiment.from_json(text)


def test_numbers_that_json_lacks():
    values = (float("inf"), float("-inf"), 1e-300, True, None, {3: ("a",)})
    assert restore(json.loads(json.dumps(describe(values)))) == values
    assert digest(describe(1)) != digest(describe(1.5)) != digest(describe("1"))
