"""The notebooks as files: made by these pins, all in the index, with parameters, and copied to who has a wheel."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import nbformat
import pytest

from contbatch import cli, notebook_files
from contbatch.errors import NotebookError
from contbatch.notebook_files import copy_notebooks, notebooks_folder

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture
def script(monkeypatch):
    """scripts/notebooks.py as a module of its own."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    spec = importlib.util.spec_from_file_location("notebooks_script", ROOT / "scripts" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path):
    return nbformat.read(path, as_version=4)


# ---- pins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_were_made_by_the_pins(path, script):
    assert read(path).metadata.get("contbatch", {}).get("versions") == script.pins(), "run scripts/notebooks.py"


def test_the_pins_that_count(script):
    pins = script.pins()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    every = [pin for group in project["optional-dependencies"].values() for pin in group] + project["dependencies"]
    assert {f"{name}=={version}" for name, version in pins.items()} <= {pin.partition(";")[0] for pin in every}
    assert {"numpy", "pandas", "openvino", "numba", "tokenizers", "triton", "matplotlib", "scipy"} <= pins.keys()
    assert {"jupyterlab", "nbval", "pytest", "pycuda"}.isdisjoint(pins)


def test_other_pins_a_stale_index_and_a_missing_picture_are_told(script, tmp_path, monkeypatch):
    shutil.copytree(FOLDER, tmp_path / "notebooks")
    monkeypatch.setattr(script, "FOLDER", tmp_path / "notebooks")
    assert list(script.problems()) == []
    path = tmp_path / "notebooks" / "04_sweeps.ipynb"
    notebook = read(path)
    notebook.metadata["contbatch"]["versions"]["numpy"] = "1.0"
    nbformat.write(notebook, path)
    (tmp_path / "notebooks" / "pictures" / "00_quickstart.png").unlink()
    shutil.copy(tmp_path / "notebooks" / "04_sweeps.py", tmp_path / "notebooks" / "99_more.py")
    shutil.copy(path, tmp_path / "notebooks" / "99_more.ipynb")
    found = "\n".join(script.problems())
    assert f"04_sweeps: outputs of numpy 1.0, pinned is {script.pins()['numpy']}" in found
    assert "00_quickstart: no picture for the index" in found
    assert "index: not what scripts/notebooks.py makes of the notebooks" in found


# ---- index -------------------------------------------------------------------------------------------------------


def test_every_notebook_is_in_the_index_with_a_line_and_a_picture(script):
    text = "\n".join(cell.source for cell in read(FOLDER / "index.ipynb").cells if cell.cell_type == "markdown")
    links = re.findall(r"\[(\w+)\]\((\w+)\.ipynb\)\n(.+)\n\n<img src=\"pictures/(\w+)\.png\" alt=\"\" width", text)
    assert [name for name, _, _, _ in links] == [path.stem for path in NOTEBOOKS if path.stem != "index"]
    for name, target, line, picture in links:
        assert name == target == picture
        assert line == script.title(name)
        image = (FOLDER / "pictures" / f"{picture}.png").read_bytes()
        assert image.startswith(b"\x89PNG")
    assert len(list(FOLDER.glob("pictures/*"))) == len(links)
    assert sum(path.stat().st_size for path in FOLDER.glob("pictures/*")) < 300_000


# ---- parameters --------------------------------------------------------------------------------------------------


def is_experiment(notebook):
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return re.search(r"cb\.(run|sweep|simulate)\(|llm\.run\(", code) is not None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_experiment_has_one_cell_of_parameters(path):
    notebook = read(path)
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert is_experiment(notebook) <= len(tagged) <= 1
    for cell in tagged:
        assert all(re.match(r"[\w, ]+ = ", line) for line in cell.source.splitlines())


def test_papermill_runs_one_with_other_parameters(tmp_path):
    pytest.importorskip("papermill")
    shutil.copy(FOLDER / "04_sweeps.ipynb", tmp_path / "in.ipynb")
    command = [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", "--no-progress-bar", "--no-log-output"]
    command += ["-p", "num_requests", "15", "-p", "model", "mistral-7b"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    out = read(tmp_path / "out.ipynb")
    assert [cell.source for cell in out.cells if "injected-parameters" in cell.metadata.get("tags", [])] == [
        '# Parameters\nnum_requests = 15\nmodel = "mistral-7b"\n'
    ]
    text = json.dumps(out.cells)
    assert "15 requests in " in text
    assert "200 requests in " not in text


# ---- copies ------------------------------------------------------------------------------------------------------


def test_a_copy_has_all_notebooks_and_pictures(tmp_path, capsys):
    assert cli.main(["notebooks", "copy", str(tmp_path / "mine")]) == 0
    wanted = {*(p.name for p in NOTEBOOKS), *(f"pictures/{p.name}" for p in FOLDER.glob("pictures/*.png"))}
    copied = {str(p.relative_to(tmp_path / "mine")) for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    assert copied == wanted
    for name in wanted:
        assert (tmp_path / "mine" / name).read_bytes() == (FOLDER / name).read_bytes()
    out = capsys.readouterr().out
    assert out == f"{len(wanted)} files; begin with: jupyter lab {tmp_path}/mine/index.ipynb\n"


def test_nothing_is_overwritten_unless_forced(tmp_path, capsys):
    mine, other = tmp_path / "04_sweeps.ipynb", tmp_path / "notes.txt"
    mine.write_text("my work")
    other.write_text("mine too")
    assert cli.main(["notebooks", "copy", str(tmp_path)]) == 1
    assert "already has 04_sweeps.ipynb; force (--force) replaces them" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["04_sweeps.ipynb", "notes.txt"]
    assert mine.read_text() == "my work"
    assert cli.main(["notebooks", "copy", "--force", str(tmp_path)]) == 0
    assert mine.read_bytes() == (FOLDER / mine.name).read_bytes()
    assert other.read_text() == "mine too"


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotebookError, match="can't be written to"):
        copy_notebooks(tmp_path / "file")


def test_an_installed_package_brings_them_along(tmp_path):
    """As pyproject.toml maps it: contbatch/notebooks beside the modules, with these files, and no checkout around."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "contbatch.notebooks" in setuptools["packages"]
    assert setuptools["package-dir"]["contbatch.notebooks"] == "notebooks"
    globs = setuptools["package-data"]["contbatch.notebooks"]
    files = [*FOLDER.glob("*.ipynb"), *FOLDER.glob("pictures/*")]
    names = [str(path.relative_to(FOLDER)) for path in files]
    assert [name for name in names if not any(fnmatch(name, glob) for glob in globs)] == []
    site = tmp_path / "site"
    shutil.copytree(ROOT / "contbatch", site / "contbatch", ignore=shutil.ignore_patterns("__pycache__"))
    for path, name in zip(files, names, strict=True):
        (site / "contbatch" / "notebooks" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, site / "contbatch" / "notebooks" / name)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from contbatch.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(site), "notebooks", "copy", str(tmp_path / "mine")]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert len(list((tmp_path / "mine").rglob("*.*"))) == len(files)


def test_an_installation_without_them_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook_files, "__file__", str(tmp_path / "contbatch" / "notebook_files.py"))
    with pytest.raises(NotebookError, match="has no notebooks: this installation of contbatch is incomplete"):
        notebooks_folder()
