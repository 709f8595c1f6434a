"""The table of benchmarks/cpu.py, on peers that are tiny scripts."""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_llm import write_tiny

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import cpu
import huggingface_copy
from engine_process import EngineProcess
from workload import WORKLOADS, timed

from contbatch.model import load_model

PEER = """
import json, sys
print("a library says hello", {arguments!r}, "[1]", sep="\\n", flush=True)
for nth, _ in enumerate(sys.stdin):
    {before}
    print(json.dumps({{"seconds": 2.0 ** -nth, "tokens": 100, "decode_s": 0.5}}), flush=True)
"""


@pytest.fixture
def engine():
    made = []

    def start(before="pass", name="peer", is_peer=True, command=None, timeout_s=60):
        code = PEER.format(arguments=name, before=before)
        made.append(EngineProcess(name, command or [sys.executable, "-c", code], is_peer=is_peer, timeout_s=timeout_s))
        return made[-1]

    yield start
    for process in made:
        process.close()


def rows(engines, equal=False):
    return {line[:52].strip(): line[52:].split() for line in cpu.table_of(engines, equal=equal).splitlines()}


def test_the_table_has_rates_and_ratios_to_the_fastest_peer(engine):
    fast, ours = engine(name="fast"), engine(name="ours", is_peer=False)
    for process in (fast, ours):
        process.run(keep=False)
    for _ in range(3):
        fast.run()
    ours.run()
    assert fast.rates() == [200, 400, 800], "the first run is no more than a warm-up"
    table = rows([fast, ours])
    assert table["output tokens/s"] == ["min", "median", "max", "vs", "peer", "quiet", "vs", "peer", "steps", "host"]
    assert table["fast"] == ["200", "400", "800", "1.00x", "-", "-", "-", "-"], (
        "a peer need not tell steps and host time"
    )
    assert table["ours"] == ["200", "200", "200", "0.50x", "-", "-", "-", "-"]
    told = json.loads(cpu.record_of("bf16", [fast, ours], equal=False))["engines"]
    assert told["ours"] == {
        "runs": [{"seconds": 0.5, "tokens": 100, "decode_s": 0.5}],
        "failure": None,
        "is_peer": False,
    }


STEPS = """
    print(json.dumps({{"seconds": 9, "tokens": 60, "step_s": {each}[nth]}}), flush=True)
    continue
"""


@pytest.mark.parametrize(
    ("each", "quiet"),
    [
        ([[1, 4, 2], [3, 1, 2], [2, 2, 1]], 60 / 3),
        ([[1, 4, 2]], 60 / 7),
        ([[1, 4, 2], [3, 1]], math.nan),
        ([[], []], math.nan),
        ([[0], [1]], math.nan),
    ],
)
def test_the_quickest_of_each_step(engine, each, quiet):
    process = engine(STEPS.format(each=each))
    for _ in each:
        process.run()
    assert process.failure is None
    assert process.quiet_rate() == pytest.approx(quiet, nan_ok=True)
    assert rows([process])["peer"][4:6] == ([f"{quiet:.0f}", "1.00x"] if quiet == quiet else ["-", "-"])


def test_equal_sequences_are_counted_by_the_time_of_their_decodes(engine):
    process = engine()
    process.run()
    table = rows([process], equal=True)
    assert table["peer"][-2:] == [f"{(100 - 64) / 0.5:.0f}", "-"]
    assert "decode 705" in cpu.table_of([process], equal=True)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("import no_such_engine", "exit status 1: ModuleNotFoundError: No module named 'no_such_engine'"),
        ("sys.exit(3)", "exit status 3: no message"),
        ("import time; time.sleep(60)", "no answer in 1 s"),
        ("nth == 1 and sys.exit('too much memory')", "exit status 1: too much memory"),
        ("import os, time; os.write(1, b'\\xff\\n'); time.sleep(60)", "no answer in 1 s"),
        ("import os, time; os.fork() or time.sleep(60); time.sleep(60)", "no answer in 1 s"),
        ("import os, time; os.close(1); time.sleep(60)", "exit status -9: no message"),
        ('print(\'{"seconds": 0, "tokens": 1}\')', 'figures that can\'t be: {"seconds": 0, "tokens": 1}'),
        (
            'print(\'{"seconds": 1, "tokens": 1, "step_s": [[1]]}\')',
            'figures that can\'t be: {"seconds": 1, "tokens": 1, "step_s": [[1]]}',
        ),
        ('print(\'{"seconds": [1], "tokens": 1}\')', 'figures that can\'t be: {"seconds": [1], "tokens": 1}'),
        (
            'print(\'{"seconds": 1, "tokens": 1, "step_s": 1}\')',
            'figures that can\'t be: {"seconds": 1, "tokens": 1, "step_s": 1}',
        ),
        ('print(\'{"seconds": 1, "tokens": null}\')', 'figures that can\'t be: {"seconds": 1, "tokens": null}'),
    ],
)
def test_a_peer_that_fails_is_a_row(engine, before, message):
    process, ours = engine(before, timeout_s=1 if "sleep" in before else 60), engine(name="ours", is_peer=False)
    began = time.monotonic()
    for _ in range(3):
        process.run()
        ours.run()
    assert time.monotonic() - began < 30, "nobody waited for a peer's sleep to end"
    assert process.failure == message
    table = rows([process, ours])
    assert " ".join(table["peer"]) == f"failed: {message}"
    assert table["ours"][3] == "-", "there is no peer to compare with"
    assert json.loads(cpu.record_of("f32", [process], equal=False))["engines"]["peer"]["failure"] == message


def test_a_peer_without_interpreter_is_a_row(engine):
    process = engine(command=["/nowhere/python", "serve.py"])
    process.run()
    assert process.failure == "/nowhere/python: No such file or directory"
    assert "failed: /nowhere/python" in cpu.table_of([process], equal=False)


@pytest.mark.parametrize("text", ["vllm", "vllm=", "vlm=python", "=python"])
def test_a_peer_is_a_name_and_an_interpreter(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be NAME=PYTHON with one of openvino_genai, vllm"):
        cpu.peer_of(text)
    assert cpu.peer_of("vllm=/a=b/python") == ("vllm", "/a=b/python")


def test_every_peer_has_a_script():
    for name in cpu.PEERS:
        assert (cpu.HERE / f"serve_{name}.py").is_file()


def test_workloads_are_what_they_say():
    prompts, lengths, budget = WORKLOADS["common"]()
    assert (len(prompts), sum(map(len, prompts)), sum(lengths), budget) == (64, 4676, 4538, 512)
    prompts, lengths, budget = WORKLOADS["equal"]()
    assert ({len(p) for p in prompts}, set(lengths), len(prompts)) == ({64}, {33}, 64)
    assert budget == sum(map(len, prompts)), "all prompts in one step"


def test_decodes_are_timed_from_the_end_of_the_first_step(monkeypatch):
    clock = iter([0.0, 3.0, 4.0, 6.0])
    monkeypatch.setattr("workload.perf_counter", lambda: next(clock))
    going = iter([True, True, True, False])
    assert timed(lambda: None, lambda: next(going)) == {
        "seconds": 6.0,
        "decode_s": 3.0,
        "step_s": [3.0, 1.0, 2.0],
        "steps": 3,
    }


def test_peers_get_the_same_weights(tmp_path):
    (tmp_path / "copy").mkdir()
    source = write_tiny(tmp_path)
    copy, model = load_model(huggingface_copy.write(source, tmp_path / "copy")), load_model(source)
    assert copy.weights.keys() == model.weights.keys()
    assert all(np.array_equal(copy.weights[name], array) for name, array in model.weights.items())
    assert copy.config == model.config
