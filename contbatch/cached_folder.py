"""Folders that are made once and kept: each has a manifest that says what it is made of, and is replaced as a whole."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

MANIFEST = "manifest.json"
TEMPORARY = ".build-"
"""How the names of temporary folders beside the kept ones begin."""
_DAY = 86400.0


def problem_with(folder: Path, identity: Mapping[str, Any]) -> str | None:
    """Say what keeps a folder from being used as it is; None if nothing does.

    Parameters
    ----------
    folder : Path
    identity : mapping
        JSON values that the manifest must hold, such as the versions of what makes the folder.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for key, value in identity.items():
            if manifest[key] != value:
                return f"has {key} {manifest[key]}, now {value}"
        if not manifest["files"]:
            raise LookupError("no files")
        for name, expected in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != expected["size"]:
                return f"has {size} bytes of {name}, not {expected['size']}"
            if "sha256" in expected and sha256_of(folder / name) != expected["sha256"]:
                return f"has another {name} than its manifest says"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"is incomplete or has a malformed manifest ({error!r})"
    return None


@contextmanager
def made_anew(folder: Path, identity: Mapping[str, Any]) -> Iterator[Path]:
    """Give a new folder to fill; afterwards it takes the place of `folder`, unless another process was faster."""
    _remove_leftovers(folder.parent)
    with TemporaryDirectory(prefix=TEMPORARY, dir=folder.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        yield new
        _install(new, folder, identity)


def write_manifest(
    folder: Path, identity: Mapping[str, Any], hashed: tuple[str, ...], sized: tuple[str, ...] = (), **more: Any
) -> None:
    """Write the manifest of a filled folder: identity, and size (and hash) of the files that must be there."""
    files: dict[str, dict[str, Any]] = {name: {"size": (folder / name).stat().st_size} for name in (*hashed, *sized)}
    for name in hashed:
        files[name]["sha256"] = sha256_of(folder / name)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = {**identity, **more, "files": files, "created": created}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def sha256_of(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_hash(*modules: Path) -> str:
    """Hash source files: nobody has to remember to raise a version."""
    return hashlib.sha256(b"".join(module.read_bytes() for module in modules)).hexdigest()[:12]


def _install(new: Path, folder: Path, identity: Mapping[str, Any]) -> None:
    """Move a finished folder into place, unless another process was faster; what stood there joins the temporary."""
    for attempt in range(9):
        try:
            os.replace(new, folder)
        except OSError:
            if attempt == 8 or not folder.is_dir():
                raise
        else:
            return
        if problem_with(folder, identity) is None:
            return
        with suppress(FileNotFoundError):
            os.replace(folder, new.with_name(f"stale-{attempt}"))


def _remove_leftovers(cache: Path) -> None:
    """Remove what builds that were killed left behind; a live build is never a day old."""
    for folder in cache.glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > _DAY:
                shutil.rmtree(folder, ignore_errors=True)
