"""Run notebooks/00_quickstart.ipynb from end to end and show what came out: the first thing a newcomer runs."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from static_outputs import without_widgets

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "00_quickstart.ipynb"
TARGET = ROOT / "build" / "quickstart"


def tagged_outputs(notebook: nbformat.NotebookNode, tag: str) -> str:
    """Text of the outputs of the cells with this tag."""
    lines = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and tag in cell.metadata.get("tags", []):
            for output in cell.outputs:
                lines.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    print("Running the quickstart notebook on the real model; the first time it downloads 93 MB and compiles ...")
    sys.stdout.flush()
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    quiet = ["--IPKernelApp.log_level=40"]  # no word about its transport
    where = {"metadata": {"path": NOTEBOOK.parent}}
    NotebookClient(notebook, timeout=1800, resources=where, extra_arguments=quiet).execute()
    without_widgets(notebook)
    TARGET.mkdir(parents=True, exist_ok=True)
    executed, page = TARGET / NOTEBOOK.name, TARGET / f"{NOTEBOOK.stem}.html"
    nbformat.write(notebook, executed)  # type: ignore[no-untyped-call]
    exporter = HTMLExporter()  # type: ignore[no-untyped-call]
    page.write_text(exporter.from_notebook_node(notebook)[0], encoding="utf-8")
    print(f"\n{tagged_outputs(notebook, 'result')}\n")
    print(f"executed notebook  {executed.relative_to(ROOT)}\nas a page          {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
