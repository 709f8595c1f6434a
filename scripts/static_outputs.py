"""Take the widgets out of notebooks: python scripts/static_outputs.py NOTEBOOK...

A widget lives as long as its kernel: who does not run the cell sees the picture that is saved beside it.
"""

import sys
from pathlib import Path

import nbformat

VIEW = "application/vnd.jupyter.widget-view+json"


def without_widgets(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop the widgets' state, and their views from outputs; returns the notebook, changed."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(VIEW, None)
    return notebook


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        notebook = without_widgets(nbformat.read(path, as_version=4))  # type: ignore[no-untyped-call]
        nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
