"""Run notebooks anew, write their outputs into them with the versions that made them, and make the index.

python scripts/notebooks.py              all of them
python scripts/notebooks.py 03 index     those whose names begin so
python scripts/notebooks.py --check      runs nothing: says which outputs came from other pins, or are not in the index
"""

import base64
import io
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image
from static_outputs import without_widgets

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
COUNTED = ("cpu", "simulation", "ptx")
"""Extras whose packages can change an output, besides what is always needed and matplotlib.

Not counted: Jupyter and its tools, which show outputs and make none; the developers' tools; TensorRT, which runs in no
committed output."""
QUIET = ["--IPKernelApp.log_level=40"]  # no word about its transport
WIDTH, SHADES = 400, 48
"""Pixels across, and colours, of a picture of the index: about 8 kB each."""
HEAD = """\
# %% [markdown]
# # contbatch: the notebooks
#
# Continuous batching and paged attention you can read, run and measure. All run on the CPU, in any order; every number
# that is not called measured comes out the same each time.
"""
ENTRY = """
# %% [markdown]
# ### [{name}]({name}.ipynb)
# {title}
#
# <img src="pictures/{name}.png" alt="" width="{width}">
"""
TAIL = """
# %% [markdown]
# ## Is everything there?
#
# What would run a model on this machine; `contbatch doctor` in a terminal says more.

# %%
from contbatch.doctor import diagnose

print("backend:", diagnose().backend)
"""


def pins() -> dict[str, str]:
    """Read the pinned versions that can change an output from pyproject.toml, by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    groups = [project["dependencies"], *(extras[name] for name in COUNTED)]
    groups.append([pin for pin in extras["notebooks"] if pin.startswith("matplotlib==")])
    return dict(pin.partition(";")[0].strip().split("==") for group in groups for pin in group)


def installed() -> dict[str, str]:
    """Return the versions of these packages that are here."""
    found = {}
    for name in pins():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def names() -> list[str]:
    """Return the names of the notebooks, but for the index, in order."""
    return sorted({path.stem for path in FOLDER.glob("[0-9]*.py")})


def read(name: str) -> NotebookNode:
    """Read a notebook."""
    notebook: NotebookNode = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def write(notebook: NotebookNode, name: str) -> None:
    """Write a notebook."""
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")  # type: ignore[no-untyped-call]


def pair(name: str, suffix: str) -> None:
    """Bring the notebook and its text to the state of the one with this suffix."""
    os.utime(FOLDER / f"{name}{suffix}")
    command = [sys.executable, "-m", "jupytext", "--quiet", "--sync", str(FOLDER / f"{name}{suffix}")]
    subprocess.run(command, check=True)


def run(name: str) -> None:
    """Run a notebook as its text has it, and write outputs and versions into it."""
    pair(name, ".py")
    notebook = read(name)
    began = time.perf_counter()
    where = {"metadata": {"path": FOLDER}}
    NotebookClient(notebook, timeout=1800, resources=where, record_timing=False, extra_arguments=QUIET).execute()
    notebook.metadata["contbatch"] = {"versions": installed()}
    write(without_widgets(notebook), name)
    pair(name, ".ipynb")
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


def title(name: str) -> str:
    """Return the first heading of a notebook."""
    lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("# # ") for line in lines if line.startswith("# # "))


def pictures(notebook: NotebookNode) -> Iterator[tuple[bool, str]]:
    """Yield the images among the outputs, in base64, each with whether its cell is tagged "picture"."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                yield "picture" in cell.metadata.get("tags", []), output["data"]["image/png"]


def draw(name: str) -> None:
    """Make the small picture of a notebook: of the tagged cell, else the first."""
    found = list(pictures(read(name)))
    if not found:
        sys.exit(f"{name} has no picture for the index")
    data = next((image for tagged, image in found if tagged), found[0][1])
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    target = FOLDER / "pictures" / f"{name}.png"
    target.parent.mkdir(exist_ok=True)
    image.quantize(SHADES).save(target, optimize=True)


def index() -> str:
    """Write the text of the index: a line and a picture for each notebook."""
    entries = [ENTRY.format(name=name, title=title(name), width=WIDTH) for name in names()]
    return "".join([HEAD, *entries, TAIL])


def body(text: str) -> str:
    """Return a paired text without its header."""
    return text.partition("\n# ---\n")[2].lstrip("\n") or text


def problems() -> Iterator[str]:
    """Yield what is wrong with the notebooks as they are."""
    for name in [*names(), "index"]:
        made = read(name).metadata.get("contbatch", {}).get("versions", {})
        for package, pinned in pins().items():
            if made.get(package) != pinned:
                yield f"{name}: outputs of {package} {made.get(package, 'unknown')}, pinned is {pinned}"
    for name in names():
        if not (FOLDER / "pictures" / f"{name}.png").is_file():
            yield f"{name}: no picture for the index"
    if body((FOLDER / "index.py").read_text(encoding="utf-8")) != index():
        yield "index: not what scripts/notebooks.py makes of the notebooks"


def main() -> None:
    if "--check" in sys.argv:
        found = list(problems())
        sys.exit("\n".join([*found, "run scripts/notebooks.py"]) if found else 0)
    wanted = tuple(sys.argv[1:]) or ("",)
    os.environ["TQDM_DISABLE"] = "1"
    for name in names():
        if name.startswith(wanted):
            run(name)
            draw(name)
    path = FOLDER / "index.py"
    if "index".startswith(wanted) or not path.exists() or body(path.read_text(encoding="utf-8")) != index():
        header, mark, _ = (FOLDER / f"{names()[0]}.py").read_text(encoding="utf-8").partition("\n# ---\n")
        path.write_text(f"{header}{mark}\n{index()}", encoding="utf-8")
        run("index")


if __name__ == "__main__":
    main()
