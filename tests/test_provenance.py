"""Results that say where they come from, are saved, read back and made again."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
from tiny_llm import write_tiny

import contbatch as cb
from contbatch import cli
from contbatch.cached_folder import sha256_of
from contbatch.description import code_version
from contbatch.errors import ExperimentError, ResultFileError
from contbatch.result_file import TABLES

WORK = cb.Poisson(rate=8, num_requests=12, seed=3, client=cb.Client(client_id="a"))
NEVER = cb.OpenLoop(arrivals=cb.arrivals.AllAtOnce(), num_requests=1, prompt=9000, output=1)
EXPERIMENT = cb.Experiment(workload=cb.Mixture((WORK, NEVER)), policy=cb.FairShare(), num_pages=80, max_num_seqs=4)


@pytest.fixture(scope="module")
def result():
    return cb.run(EXPERIMENT)


@pytest.fixture
def saved(result, tmp_path):
    result.save(tmp_path / "saved")
    return tmp_path / "saved"


class Newest(cb.Policy):
    """Serves who came last."""

    def __init__(self):
        self.seen = []

    def plan(self, waiting, running, budget):
        for r in [*running, *reversed(list(waiting))]:
            yield r, r.num_uncomputed_tokens


def assert_same(one, other):
    for name in ("requests", "steps", "segments"):
        pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).attrs == getattr(other, name).attrs
    for field in fields(cb.Result):
        if field.name not in (
            "requests",
            "steps",
            "segments",
            "decisions",
            "end_s",
            "experiment",
        ):  # not saved as it is
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert one.end_s == other.end_s or (np.isnan(one.end_s) and np.isnan(other.end_s))


# ---- what a result carries ---------------------------------------------------------------------------------------


def test_a_result_carries_seed_versions_hardware_and_the_hash_of_its_experiment(result):
    p = result.provenance
    assert p.hash == EXPERIMENT.hash
    assert cb.Experiment.from_json(json.dumps(p.description)) == EXPERIMENT
    assert p.seed == (3, 0)
    assert p.versions["python"] == sys.version.split()[0]
    assert p.versions["numpy"] == np.__version__
    assert p.hardware["cores"] == os.cpu_count()
    assert p.code == code_version()
    assert p.is_measured is False


def test_simulate_tells_of_the_same_experiment(result):
    limits = {"num_pages": 80, "max_num_seqs": 4}
    direct = cb.simulate(EXPERIMENT.workload, EXPERIMENT.policy, **limits)
    assert direct.provenance == result.provenance or direct.provenance.hash == result.provenance.hash
    contiguous = cb.simulate(EXPERIMENT.workload, cb.Orca(), layout="contiguous", **limits)
    assert contiguous.provenance.description["layout"] == "contiguous"


def test_the_tables_know_what_was_run_for_their_pictures(result):
    title = "FairShare(), Mixture(Poisson(num_requests=12, rate=8), OpenLoop(num_requests=1)), "
    title += "opt-13b on A100-40GB, simulated"
    for table in (result.requests, result.steps, result.segments, result.waste(), result.finished):
        assert table.attrs["run"] == title
    points = [EXPERIMENT.replace(policy=p) for p in (cb.Orca(), cb.FairShare())]
    table = cb.sweep(points, cache=False, progress=False)
    assert table.attrs["run"] == title.removeprefix("FairShare(), ")


def test_a_policy_is_described_as_it_was_before_the_run():
    experiment = EXPERIMENT.replace(policy=Newest())
    before = experiment.hash
    result = cb.run(experiment)
    experiment.policy.seen.append("later")
    assert result.provenance.hash == before != experiment.hash


def test_a_policy_without_source_runs_but_can_not_be_saved(tmp_path):
    made = {}
    exec("import contbatch as cb\nclass P(cb.ChunkedPrefill):\n    def rank(self, request): return 1", made)
    result = cb.run(EXPERIMENT.replace(policy=made["P"]()))
    assert len(result.finished) == 12
    with pytest.raises(ResultFileError, match=r"the source of its class .*P is nowhere"):
        result.save(tmp_path / "r")


# ---- on disk -----------------------------------------------------------------------------------------------------


def test_what_is_saved_is_read_back(result, saved, tmp_path):
    assert_same(cb.load_result(saved), result)
    pd.testing.assert_series_equal(cb.load_result(saved).summary(), result.summary())
    result.save(saved)  # again, in its place
    cb.load_result(saved).save(tmp_path / "copy")
    assert_same(cb.load_result(tmp_path / "copy"), result)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "saved"]


@pytest.mark.parametrize("detail", [True, False])
@pytest.mark.parametrize("num_requests", [1, 12])
def test_runs_without_detail_or_without_anybody_served(detail, num_requests, tmp_path):
    load = NEVER if num_requests == 1 else WORK
    result = cb.run(EXPERIMENT.replace(workload=load), detail=detail)
    result.save(tmp_path / "r")
    again = cb.load_result(tmp_path / "r")
    assert again.token_s == result.token_s
    for name in ("requests", "steps", "segments"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(result, name), check_dtype=num_requests > 1)
    assert cb.verify(tmp_path / "r").is_same


def test_a_result_of_no_experiment_is_not_saved(tmp_path):
    scheduler = cb.Scheduler(cb.ChunkedPrefill(), num_pages=40)
    result = cb.Engine(scheduler, cb.Simulated().runner()).run([cb.Request("a", [1], cb.SamplingParams(max_tokens=2))])
    assert result.provenance is None
    assert result.token_ids == {"a": [0, 0]}
    with pytest.raises(ResultFileError, match="nothing says where it comes from"):
        result.save(tmp_path / "r")


def test_nothing_else_is_overwritten(result, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ResultFileError, match="is there already, and is no saved result"):
            result.save(taken)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def edit(folder, **changes):
    manifest = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    manifest = {name: value for name, value in (manifest | changes).items() if value is not ...}
    (folder / "result.json").write_text(json.dumps(manifest), encoding="utf-8")


def cut(file):
    file.write_bytes(file.read_bytes()[:-9])


DAMAGE = {
    "nothing there": (shutil.rmtree, "is no saved result"),
    "cut json": (lambda p: cut(p / "result.json"), "result.json is damaged"),
    "binary json": (lambda p: (p / "result.json").write_bytes(b"\xff\xfe\x00"), "result.json is damaged"),
    "foreign json": (lambda p: (p / "result.json").write_text("[1]"), "must have format 1, got 'list'"),
    "other format": (lambda p: edit(p, format=2), "must have format 1, got 2"),
    "field gone": (lambda p: edit(p, end_s=...), "lacks end_s"),
    "another experiment": (lambda p: edit(p, experiment={"seed": 1}), "not the one noted"),
    "no hashes": (lambda p: edit(p, sha256={}), "sha256 must name requests"),
    **{
        f"cut {name}": (lambda p, name=name: cut(p / f"{name}.parquet"), f"{name}.parquet was changed or cut")
        for name in TABLES
    },
    "table gone": (lambda p: (p / "steps.parquet").unlink(), "steps.parquet: No such file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind, saved, capsys):
    damage, message = DAMAGE[kind]
    damage(saved)
    with pytest.raises(ResultFileError, match=message):
        cb.load_result(saved)
    assert cli.main(["verify", str(saved)]) == 1
    assert capsys.readouterr().err.startswith("contbatch: error: ")


# ---- again -------------------------------------------------------------------------------------------------------


def tamper(folder, table, column, change, row=0):
    """Change a cell as somebody would who also mends the checksum."""
    file = folder / f"{table}.parquet"
    frame = pd.read_parquet(file)
    values = frame[column].to_list()
    values[row] = change(values[row])
    frame[column] = pd.Series(values, dtype=frame[column].dtype)
    frame.to_parquet(file)
    manifest = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    edit(folder, sha256=manifest["sha256"] | {table: sha256_of(file)})


def test_the_same_again(saved, capsys):
    assert cb.verify(saved) == cb.Verification(None, (), None)
    assert cli.main(["verify", str(saved)]) == 0
    assert capsys.readouterr().out == "the same result again\n"


@pytest.mark.parametrize(
    ("table", "column", "change", "told"),
    [
        ("requests", "output_tokens", lambda n: n + 1, r"requests\.output_tokens differs first, in row 3"),
        ("requests", "finish_reason", lambda _: "abort", r"requests\.finish_reason differs first, in row 3"),
        ("requests", "ttft_s", lambda s: s + 1e-6, r"requests\.ttft_s differs first, in row 3"),
        ("requests", "client_id", lambda _: None, r"requests\.client_id differs first, in row 3: .*'a'"),
        ("steps", "tokens", lambda n: n - 1, r"steps\.tokens differs first, in row 3"),
        ("segments", "kind", lambda _: "held", r"segments\.kind differs first, in row 3"),
        ("tokens", "token_s", lambda s: s - 2e-9, "times of request .* differ first at 3"),
        ("tokens", "token_id", lambda n: n + 1, "token ids of request .* differ first at 3"),
    ],
)
def test_the_first_difference_is_named(table, column, change, told, saved, capsys):
    tamper(saved, table, column, change, row=3)
    verification = cb.verify(saved)
    assert not verification.is_same
    assert pd.Series([verification.difference]).str.match(told).all()
    assert cli.main(["verify", str(saved)]) == 1
    assert capsys.readouterr().out.startswith("another result: ")


def test_columns_are_compared_in_their_order_and_times_to_a_billionth(saved):
    tamper(saved, "requests", "ttft_s", lambda s: s + 5e-10)
    assert cb.verify(saved).is_same
    tamper(saved, "steps", "seats", lambda n: n + 1, row=2)
    tamper(saved, "steps", "seats", lambda n: n + 1, row=5)
    tamper(saved, "steps", "left", lambda n: n + 1)
    assert cb.verify(saved).difference.startswith("steps.seats differs first, in row 2: ")
    assert cb.verify(saved).difference.endswith(", and 1 other rows")
    tamper(saved, "requests", "preemptions", lambda n: n + 1)
    assert cb.verify(saved).difference.startswith("requests.preemptions")


def test_what_has_changed_since_is_told(saved):
    manifest = json.loads((saved / "result.json").read_text(encoding="utf-8"))
    edit(saved, versions=manifest["versions"] | {"numpy": "1.0"}, code="another")
    verification = cb.verify(saved)
    assert verification.is_same
    assert verification.changed == (
        f"numpy 1.0, now {np.__version__}",
        f"the code of contbatch: another, now {code_version()}",
    )
    assert "changed since: numpy 1.0" in str(verification)


def test_a_policy_of_ones_own_is_given_again(tmp_path):
    cb.run(EXPERIMENT.replace(policy=Newest())).save(tmp_path / "r")
    with pytest.raises(ExperimentError, match="class Newest was defined outside this package"):
        cb.verify(tmp_path / "r")
    assert cb.verify(tmp_path / "r", policy=Newest()).is_same
    with pytest.raises(ExperimentError, match="policy must be what made the result"):
        cb.verify(tmp_path / "r", policy=cb.Orca())


def test_it_is_the_same_in_another_process(saved):
    command = [sys.executable, "-m", "contbatch.cli", "verify", str(saved)]
    code = f"import sys; from contbatch.cli import main; sys.exit(main({command[3:]}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "the same result again\n")


def test_a_measured_result_tokens_and_counts_are_compared_times_stand_side_by_side(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    folder = write_tiny(tmp_path / "model")
    work = cb.Poisson(rate=500, num_requests=6, prompt=9, output=4)
    with cb.LLM(folder, num_pages=40, page_size=4, max_num_seqs=3) as llm:
        result = cb.run(cb.Experiment(workload=work, backend=llm, max_num_seqs=2))
    provenance = result.provenance
    assert provenance.is_measured
    assert "openvino" in provenance.versions
    assert dict(provenance.description["backend"]["items"])["backend"] == "cpu"
    result.save(tmp_path / "r")
    assert_same(cb.load_result(tmp_path / "r"), result)
    with pytest.raises(ExperimentError, match="model 'model' is none of the catalogue"):
        cb.verify(tmp_path / "r")
    assert cli.main(["verify", str(tmp_path / "r"), "--model", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("the same result again\nmeasured, not compared:\n")
    assert "output_tokens_per_s" in shown
    tamper(tmp_path / "r", "tokens", "token_id", lambda n: n + 1)
    assert cb.verify(tmp_path / "r", model=str(folder)).difference.startswith("token ids of request")
    tamper(tmp_path / "r", "requests", "output_tokens", lambda n: n + 1)
    assert cb.verify(tmp_path / "r", model=str(folder)).difference.startswith("requests.output_tokens")


def test_a_list_of_requests_served_by_a_model_comes_out_again(tmp_path):
    (tmp_path / "model").mkdir()
    folder = write_tiny(tmp_path / "model")
    sampling = [cb.SamplingParams(max_tokens=5, temperature=0.9, seed=s, n=1 + s % 2) for s in (4, 7)]
    with cb.LLM(folder, num_pages=40, page_size=4) as llm:
        requests = llm.requests(["the", [5, 6, 7, 8, 9]], sampling, [0.0, 0.01], client_id="a")
        result = llm.run(requests, cb.Orca(), max_num_seqs=2)
        follow = llm.run(llm.requests(["the"]), on_finish=lambda *_: ())
    assert follow.provenance is None
    provenance = result.provenance
    assert provenance.title == "Orca(), 2 requests, model, measured"
    assert provenance.seed == (4, 7)
    assert result.token_ids == {s.request_id: s.output_token_ids for r in requests for s in r.samples}
    assert set(result.token_ids) == {0, 1, "1#1"}  # numbers and texts in one table
    result.save(tmp_path / "r")
    assert_same(cb.load_result(tmp_path / "r"), result)
    assert cb.verify(tmp_path / "r", model=str(folder)).is_same
    tamper(tmp_path / "r", "tokens", "token_id", lambda n: n + 1)
    assert not cb.verify(tmp_path / "r", model=str(folder)).is_same
