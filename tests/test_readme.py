"""The README's snippet runs as printed."""

import re
from fnmatch import fnmatch
from pathlib import Path

from smollm2 import model_path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_snippet_runs_as_printed(capsys, monkeypatch):
    model_path()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    [snippet] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(snippet, "README.md", "exec"), {})
    first, static, continuous = capsys.readouterr().out.strip().rsplit("\n", 2)
    assert "Paris" in first
    # Two seats, answers of 3, 40, 6 and 12 tokens: batches of 40 and 12 steps, 37 + 6 seat-steps of them wasted.
    assert "StaticBatching" in static
    assert "'steps': 52.0" in static
    assert f"'wasted_seats': {43 / 104}" in static
    assert "ContinuousBatching" in continuous
    assert "'steps': 40.0, 'wasted_seats': 0.0" in continuous


def test_the_file_tree_names_what_exists_and_every_module():
    tree = README.read_text(encoding="utf-8").split("## What is where")[1].split("```")[1]
    named = re.findall(r"[\w*-]+\.(?:py|yml)\b", tree)
    root, package = README.parent, README.parent / "contbatch"
    assert [name for name in named if not [*root.glob(name), *package.glob(name)]] == []
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if not any(fnmatch(name, pattern) for pattern in named)} == set()
