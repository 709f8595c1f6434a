import ast
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

import contbatch.build
import contbatch.model
from contbatch.build import build
from contbatch.errors import ModelFileError, UnsupportedModelError
from contbatch.export import read_config, read_metadata
from contbatch.model import random_model


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"some weights")
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "a new" / "cache"


@pytest.fixture
def loads(monkeypatch):
    """Paths given to load_model, which is replaced: how files are read is tested elsewhere."""
    calls = []

    def load(path):
        calls.append(path)
        return random_model(len(Path(path).read_bytes()) if Path(path).is_file() else 0)

    monkeypatch.setattr(contbatch.model, "load_model", load)
    return calls


def test_folder_is_complete_and_reused(source, cache, loads, caplog):
    caplog.set_level(logging.INFO, "contbatch")
    folder = build(source, cache_dir=cache)
    assert folder.parent == cache
    assert folder.name.startswith("tiny-float32-")
    onnx.checker.check_model(folder / "model.onnx")
    manifest = json.loads((folder / "manifest.json").read_text())
    config = read_config(folder / "model.onnx")
    assert contbatch.model.ModelConfig(**manifest["config"]) == config == random_model(12).config
    assert manifest["weights_sha256"] == read_metadata(folder / "model.onnx")["weights_sha256"]
    assert manifest["files"]["model.onnx.data"]["size"] == (folder / "model.onnx.data").stat().st_size
    assert manifest["source"]["name"] == "tiny.gguf"
    assert manifest["versions"]["onnx"] == onnx.__version__
    assert [r.message for r in caplog.records] == [f"exporting tiny.gguf to {folder}"]
    start = time.perf_counter()
    assert build(source, cache_dir=cache) == folder
    assert time.perf_counter() - start < 0.5
    assert (len(loads), len(caplog.records)) == (1, 1)
    assert {p.name for p in cache.iterdir()} == {folder.name, "sha256.json"}


def test_default_cache(source, cache, loads, monkeypatch):
    monkeypatch.setattr("contbatch.catalog.cache_dir", lambda: cache)
    assert build(source).parent == cache


def test_each_source_and_dtype_has_its_folder(source, cache, loads, tmp_path):
    other = tmp_path / "other" / "tiny.gguf"
    other.parent.mkdir()
    other.write_bytes(b"other weights")
    directory = tmp_path / "hf"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    calls = [(source, "float32"), (source, "bfloat16"), (other, "float32"), (directory, "float32")]
    folders = [build(path, dtype, cache) for path, dtype in calls]
    assert len(set(folders)) == 4
    assert [read_metadata(f / "model.onnx")["dtype"] for f in folders] == [dtype for _, dtype in calls]
    (directory / "model.safetensors").write_text("weights")
    assert build(directory, cache_dir=cache) not in folders
    assert [build(path, dtype, cache) for path, dtype in calls[:3]] == folders[:3]
    assert len(loads) == 5


def test_source_is_hashed_once_until_it_changes(source, cache, loads, monkeypatch):
    hashed = []
    sha256 = contbatch.build.sha256_of
    monkeypatch.setattr(contbatch.build, "sha256_of", lambda path: hashed.append(path.name) or sha256(path))
    folder = build(source, cache_dir=cache)
    build(source, cache_dir=cache)
    assert hashed.count("tiny.gguf") == 1
    os.utime(source, ns=(0, 0))
    assert build(source, cache_dir=cache) == folder
    assert hashed.count("tiny.gguf") == 2
    source.write_bytes(b"SOME WEIGHTS")
    assert build(source, cache_dir=cache) != folder
    assert hashed.count("tiny.gguf") == 3


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": [1, 2]}', '{"a": ["x", 2, "y"]}', "\0"])
def test_damaged_hash_memory_costs_only_time(content, source, cache, loads):
    folder = build(source, cache_dir=cache)
    (cache / "sha256.json").write_text(content)
    assert build(source, cache_dir=cache) == folder
    assert len(loads) == 1


def change_manifest(**changes):
    def damage(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def shorten_data(folder):
    os.truncate(folder / "model.onnx.data", 100)


def alter_model(folder):
    path = folder / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


DAMAGE = {
    "data missing": (lambda folder: (folder / "model.onnx.data").unlink(), "FileNotFoundError"),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "malformed manifest"),
    "manifest cut off": (write("manifest.json", b'{"dtype": "flo'), "malformed manifest"),
    "manifest no object": (write("manifest.json", b"[1]"), "malformed manifest"),
    "manifest no text": (write("manifest.json", b"\xff\xfe"), "malformed manifest"),
    "files not listed": (change_manifest(files={}), "malformed manifest"),
    "files no object": (change_manifest(files=[3]), "malformed manifest"),
    "data cut off": (shorten_data, "100 bytes of model.onnx.data, not"),
    "model altered": (alter_model, "another model.onnx"),
    "old version": (change_manifest(versions={"contbatch": "0.0.1"}), "'contbatch': '0.0.1'}, now"),
    "old code": (change_manifest(exporter="abc"), "exporter abc, now"),
    "other dtype": (change_manifest(dtype="float16"), "dtype float16, now float32"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_bad_folder_is_made_anew(damage, reason, source, cache, loads, caplog):
    folder = build(source, cache_dir=cache)
    good = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"}
    damage(folder)
    (folder / "left over").write_text("from the bad folder")
    assert build(source, cache_dir=cache) == folder
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert reason in record.message
    assert "\n" not in record.message
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"} == good
    assert build(source, cache_dir=cache) == folder
    assert len(loads) == 2
    assert {p.name for p in cache.iterdir()} == {folder.name, "sha256.json"}


@pytest.mark.parametrize("stale", [False, True])
def test_the_faster_of_two_builds_wins(stale, source, cache, monkeypatch):
    if stale:
        monkeypatch.setattr(contbatch.model, "load_model", lambda path: random_model(0))
        (build(source, cache_dir=cache) / "manifest.json").unlink()
    finished = []

    def load(path):
        if not finished:
            finished.append(None)
            finished[0] = build(source, cache_dir=cache)  # another process that began later and is done sooner
            finished.append((finished[0] / "manifest.json").stat().st_ino)
        return random_model(1)

    monkeypatch.setattr(contbatch.model, "load_model", load)
    folder = build(source, cache_dir=cache)
    assert [folder, (folder / "manifest.json").stat().st_ino] == finished
    assert {p.name for p in cache.iterdir()} == {folder.name, "sha256.json"}


def test_two_processes_at_once(source, cache):
    code = """
import sys, contbatch.model
from contbatch.build import build
contbatch.model.load_model = lambda path: contbatch.model.random_model(0)
for dtype in ("float32", "float16"):
    print(build(sys.argv[1], dtype, sys.argv[2]))
"""
    args = [sys.executable, "-c", code, source, cache]
    processes = [subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [p.communicate(timeout=60) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], outputs
    assert outputs[0] == outputs[1]
    for folder in outputs[0][0].split("\n")[:-1]:
        onnx.checker.check_model(Path(folder) / "model.onnx")
    assert not list(cache.glob(".*"))


def test_failed_build_leaves_nothing(source, cache, monkeypatch):
    def load(path):
        raise ModelFileError(f"{path}: truncated")

    monkeypatch.setattr(contbatch.model, "load_model", load)
    with pytest.raises(ModelFileError, match="truncated"):
        build(source, cache_dir=cache)
    assert {p.name for p in cache.iterdir()} == {"sha256.json"}


def test_leftovers_of_killed_builds_are_removed(source, cache, loads):
    old, live = cache / ".build-old", cache / ".build-live"
    for folder in (old, live):
        folder.mkdir(parents=True)
        (folder / "model.onnx.data").write_text("half")
    os.utime(old, (0, 0))
    build(source, cache_dir=cache)
    assert not old.exists()
    assert live.exists()


def test_bad_arguments(source, cache, loads, tmp_path):
    with pytest.raises(ModelFileError, match=r"nothing\.gguf"):
        build(tmp_path / "nothing.gguf", cache_dir=cache)
    with pytest.raises(UnsupportedModelError, match="int4"):
        build(source, "int4", cache)
    assert not loads


def test_every_module_that_shapes_an_export_is_hashed():
    # Follow imports, also those inside functions, from loading and exporting on.
    package = Path(contbatch.model.__file__).parent
    found, pending = set(), ["model", "export"]
    while pending:
        name = pending.pop()
        found.add(name)
        for node in ast.walk(ast.parse((package / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("contbatch."):
                pending += {node.module.removeprefix("contbatch.")} - found
    assert found - {"errors", "checks"} == set(contbatch.build._EXPORTER)
