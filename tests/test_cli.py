"""The command line: what it prints, where it exits, and what the doctor sees."""

import re
import subprocess
import sys
from importlib.metadata import metadata

import pytest

import contbatch as cb
from contbatch import cli, doctor


def test_export_prints_the_folder(tmp_path, monkeypatch, capsys):
    from test_gpu_kernels import SIZES

    import contbatch.model
    from contbatch.model import random_model

    monkeypatch.setattr(contbatch.model, "load_model", lambda path: random_model(0, **SIZES))
    source = tmp_path / "tiny.gguf"
    source.write_bytes(b"some weights")
    arguments = ["export", str(source), "--cache-dir", str(tmp_path / "cache")]
    assert cli.main(arguments) == 0
    folder = capsys.readouterr().out.strip()
    assert [str(path) for path in (tmp_path / "cache").glob("tiny-float32-*")] == [folder]
    pytest.importorskip("triton", reason="PTX is made by Triton: pip install 'contbatch[ptx]' (Linux)")
    assert cli.main([*arguments, "--page-size", "8", "--ptx", "80"]) == 0
    model, kernels = capsys.readouterr().out.split()
    assert "tiny-float16-" in model
    assert kernels == f"{model}/ptx"
    assert cli.main([*arguments, "--dtype", "float32", "--ptx", "80"]) == 1
    assert "contbatch: error: the GPU kernel takes float16 or bfloat16" in capsys.readouterr().err


def test_a_page_that_can_not_be_written_is_one_line(tmp_path, capsys):
    log = cb.DecisionLog()
    cb.run(cb.Experiment(workload=cb.Poisson(rate=4, num_requests=2, seed=0), policy=cb.OneAtATime()), log=log)
    log.save(tmp_path / "run.jsonl")
    page = tmp_path / "none" / "page.html"
    assert cli.main(["replay", str(tmp_path / "run.jsonl"), "-o", str(page)]) == 1
    assert capsys.readouterr().err.splitlines() == [f"contbatch: error: [Errno 2] No such file or directory: '{page}'"]


def test_errors_are_one_line(capsys):
    assert cli.main(["export", "no/such/model.gguf"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("contbatch: error: 'no/such/model.gguf' is no existing file") for line in lines] == [True]
    for arguments in ([], ["export"], ["dance"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(arguments)
        assert "usage: contbatch" in capsys.readouterr().err


def put_nvidia_smi(folder, monkeypatch, script):
    folder.mkdir(exist_ok=True)
    path = folder / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_doctor_on_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "core (the scheduler, tables): installed" in text
    assert "cpu (models on the CPU): installed" in text
    assert "GPU: none (no nvidia-smi: no NVIDIA driver, or it is not on the PATH)" in text
    assert "backend: cpu (its packages are installed)" in text


def test_doctor_names_what_is_missing_and_how_to_install_it(monkeypatch, capsys):
    versions = {"openvino": None, "numpy": "1.0"}
    installed = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda name: versions.get(name, installed(name)))
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"cpu \(models on the CPU\): 1 of \d+ missing: openvino\n", text)
    assert "pip install 'contbatch[cpu]'" in text
    assert "conda env create -f environment.yml" in text
    assert "numpy 1.0 is installed, tested with" in text
    assert "backend: none (not installed: openvino)" in text


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        (
            "print('NVIDIA H100, 9.0, 81559 MiB, 580.1')",
            ["GPU: NVIDIA H100, 9.0, 81559 MiB, 580.1", "has never run on one"],
        ),
        ("print('NVIDIA A, 8.0, 1, 2'); print('NVIDIA B, 8.6, 1, 2')", ["GPU: NVIDIA A", "GPU: NVIDIA B"]),
        ("print('no devices were found'); exit(6)", ["GPU: none (nvidia-smi: no devices were found)"]),
        ("pass", ["GPU: none (nvidia-smi lists none)"]),
    ],
)
def test_doctor_reads_nvidia_smi(script, shown, tmp_path, monkeypatch):
    put_nvidia_smi(tmp_path, monkeypatch, script)
    text = doctor.report(doctor.diagnose())
    assert [line for line in shown if line not in text] == []


def test_every_group_of_dependencies_but_the_developers_is_described():
    groups = {"", *metadata("contbatch").get_all("Provides-Extra")}
    assert set(doctor.PURPOSE) == groups - {"dev"}


def test_the_doctor_loads_nothing_heavy():
    code = "import sys, contbatch.cli, contbatch.doctor as d; d.diagnose(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"numpy", "onnx", "triton", "openvino"}.isdisjoint(loaded)
