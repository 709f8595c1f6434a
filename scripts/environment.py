"""Write environment.yml from the pins of pyproject.toml; `--check` only says whether it is up to date."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "environment.yml"
HEADER = """\
# Made by scripts/environment.py from pyproject.toml, where the pins are. Then: pip install --no-deps -e .
# On a machine with an NVIDIA GPU, TensorRT, CUDA and PyCUDA come on top: pip install -e '.[tensorrt]'
name: contbatch
channels: [conda-forge]
dependencies:
  - python=3.12
  - pip
  - pip:
"""


def environment() -> str:
    """Text of environment.yml: everything but the GPU packages, pinned."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][e] for e in ("cpu", "notebooks", "dev"))]
    return HEADER + "".join(f"      - {pin}\n" for pin in sorted(pin for group in groups for pin in group))


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(TARGET.read_text(encoding="utf-8") != environment())
    TARGET.write_text(environment(), encoding="utf-8")
