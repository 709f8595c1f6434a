"""The repository keeps its own promises: one place for pins, a README that runs as printed."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_environment_yml_has_the_pins_of_pyproject():
    check = subprocess.run([sys.executable, ROOT / "scripts" / "environment.py", "--check"], check=False)
    assert check.returncode == 0, "run scripts/environment.py"


def test_every_dependency_is_pinned_exactly():
    groups = [project()["dependencies"], *project()["optional-dependencies"].values()]
    exact = r"[a-z0-9-]+==[0-9][0-9a-z.]*(; sys_platform == 'linux')?"
    loose = [pin for group in groups for pin in group if not re.fullmatch(exact, pin)]
    assert loose == []


def test_no_dependency_needs_torch():
    pins = " ".join(pin for group in project()["optional-dependencies"].values() for pin in group)
    assert "torch" not in pins
    assert "transformers" not in pins


def sources():
    return [p for folder in ("contbatch", "plugins", "scripts", "benchmarks") for p in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short_enough_to_read(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_short_docstrings_aside(path):
    long = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            told = node.body[0] if ast.get_docstring(node) is not None else None
            lines = node.end_lineno - node.lineno + 1 - (told.end_lineno - told.lineno + 1 if told else 0)
            if lines > 50:
                long.append((node.name, lines))
    assert long == []


NOTEBOOKS = pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)


@NOTEBOOKS
def test_who_does_not_run_a_notebook_sees_pictures_in_place_of_widgets(path):
    assert "vnd.jupyter.widget" not in path.read_text(encoding="utf-8")  # see scripts/static_outputs.py


@NOTEBOOKS
def test_no_path_of_the_machine_that_ran_a_notebook_is_in_it(path):
    assert re.findall(r"(?:/tmp|/root|/home|/Users)/[\w.-]*", path.read_text(encoding="utf-8")) == []


def test_a_folder_of_the_same_name_is_not_the_package(tmp_path):
    """As where Python starts in the folder that the clone lies in."""
    (tmp_path / "contbatch").mkdir()
    command = [sys.executable, "-c", "import contbatch, contbatch.plugins; print(contbatch.LLM.__name__)"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout == "LLM\n"
