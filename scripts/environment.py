"""Write environment.yml and environment-gpu.yml from the pins of pyproject.toml; `--check` only compares."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = {
    "environment.yml": ("cpu", "notebooks", "simulation", "dev"),
    "environment-gpu.yml": ("cpu", "notebooks", "simulation", "ptx", "tensorrt", "dev"),
}
"""Optional dependencies by file; the second needs a machine with an NVIDIA GPU and CUDA."""
HEADER = """\
# Made by scripts/environment.py from pyproject.toml, where the pins are. Afterwards: pip install --no-deps -e .
name: contbatch
channels: [conda-forge]
dependencies:
  - python=3.12
  - pip
  - pip:
"""


def environment(extras: tuple[str, ...]) -> str:
    """Make the text of a conda environment with these extras, every package pinned."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return HEADER + "".join(f"      - {pin}\n" for pin in sorted(pin for group in groups for pin in group))


def main() -> None:
    stale = [
        name for name, extras in EXTRAS.items() if (ROOT / name).read_text(encoding="utf-8") != environment(extras)
    ]
    if "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(stale)}; run scripts/environment.py" if stale else 0)
    for name, extras in EXTRAS.items():
        (ROOT / name).write_text(environment(extras), encoding="utf-8")


if __name__ == "__main__":
    main()
