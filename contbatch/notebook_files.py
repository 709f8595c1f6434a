"""The notebooks that come with the package: where they lie, and copies to work in."""

import os
import shutil
from pathlib import Path

from contbatch.errors import NotebookError


def notebooks_folder() -> Path:
    """Return where the notebooks lie: at the top of a checkout, inside an installed package."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "notebooks"
    folder = checkout if (package.parent / "pyproject.toml").is_file() else package / "notebooks"
    if not (folder / "index.ipynb").is_file():
        raise NotebookError(f"{folder} has no notebooks: this installation of contbatch is incomplete")
    return folder


def copy_notebooks(target: str | os.PathLike[str], *, force: bool = False) -> list[Path]:
    """Copy the notebooks, and the pictures of their index, into a folder, which is made if need be.

    Parameters
    ----------
    target : path
    force : bool
        Whether files of these names that are there already are replaced.

    Returns
    -------
    list of Path
        What was written.

    Raises
    ------
    NotebookError
        Some are there already (nothing is written then), or the folder can't be written to.
    """
    source, target = notebooks_folder(), Path(target)
    files = sorted([*source.glob("*.ipynb"), *source.glob("pictures/*.png")])
    copies = {file: target / file.relative_to(source) for file in files}
    there = [str(copy.relative_to(target)) for copy in copies.values() if copy.exists()]
    if there and not force:
        raise NotebookError(f"{target} already has {', '.join(there)}; force (--force) replaces them")
    try:
        for file, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    except OSError as error:
        raise NotebookError(f"{target} can't be written to: {error.filename}: {error.strerror}") from None
    return list(copies.values())
