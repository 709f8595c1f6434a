"""What a notebook shows of the large objects: one line that says what they are."""

import subprocess
import sys
from importlib.metadata import version

import pytest
from tiny_llm import greedy, write_tiny

import contbatch as cb
from contbatch.doctor import missing_packages_named


def test_scheduler_and_result():
    scheduler = cb.Scheduler(cb.ContinuousBatching(), num_pages=10, page_size=4, max_num_seqs=2)
    for i in range(3):
        scheduler.add(cb.Request(i, [1, 2, 3, 4, 5], cb.SamplingParams(max_tokens=4)))
    scheduler.schedule()
    assert repr(scheduler) == "<Scheduler ContinuousBatching(): 2 running, 1 waiting, 6 of 10 pages free>"
    result = cb.simulate(cb.Poisson(rate=4, num_requests=3, seed=0))
    took = f"{result.duration_s:.3g} s"
    steps = len(result.steps)
    assert repr(result) == f"<Result: 3 of 3 requests finished, {steps} steps, {took}>"
    summed = cb.simulate(cb.Poisson(rate=4, num_requests=3, seed=0), detail=False)
    assert repr(summed) == repr(result)


def test_llm(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny").mkdir()
    with cb.LLM(write_tiny(tmp_path / "tiny"), num_pages=40, page_size=4, max_num_seqs=2) as llm:
        assert repr(llm) == f"<LLM tiny: cpu f32, 40 pages of 4 tokens, 2 seats, {cb.ChunkedPrefill()!r}>"
        assert llm.generate("the", greedy(1), progress=False)


def test_version():
    assert cb.__version__ == version("contbatch")


@pytest.mark.parametrize("module", ["onnx_ir", "openvino"])
def test_an_llm_without_its_packages_says_how_to_install_them(module, tmp_path, monkeypatch):
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny").mkdir()
    source = write_tiny(tmp_path / "tiny")
    code = f"import sys, contbatch as cb; sys.modules[{module!r}] = None; cb.LLM({str(source)!r}, num_pages=4)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    [last] = run.stderr.splitlines()[-1:]
    name = module.replace("_", "-")
    told = f"contbatch.errors.MissingDependencyError: {name} is not installed; models on the CPU need it: pip install "
    assert last.startswith(f"{told}'contbatch[cpu]'"), run.stderr


def test_other_missing_modules_are_not_explained():
    with pytest.raises(ModuleNotFoundError), missing_packages_named():
        import a_module_that_nobody_has  # noqa: F401
