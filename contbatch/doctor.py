"""What this machine can run: packages against the pins of this one, GPUs, and the backend that `LLM` would take."""

import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from contbatch.errors import MissingDependencyError

PURPOSE = {
    "": "the scheduler, tables",
    "cpu": "models on the CPU",
    "notebooks": "notebooks and plots",
    "simulation": "sweeps, fitted cost models, parquet files",
    "ptx": "GPU kernels as PTX; no GPU needed",
    "tensorrt": "TensorRT and PyCUDA, on a machine with an NVIDIA GPU",
}
"""What each group of dependencies is for, by the name of the extra; "" is what is always installed."""
CONDA = {
    "": "environment.yml",
    "cpu": "environment.yml",
    "notebooks": "environment.yml",
    "simulation": "environment.yml",
}
"""The file with a conda environment that has the group; the others are in environment-gpu.yml."""
_PIN = re.compile(r"([\w.-]+)==([\w.]+)(.*)")


@dataclass(frozen=True, slots=True)
class Package:
    """A dependency: its name, the version pinned, and the one installed, None if it is missing."""

    name: str
    pinned: str
    installed: str | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `diagnose` found."""

    packages: dict[str, list[Package]]
    """By extra, as in `PURPOSE`."""
    gpus: list[str]
    """Name, compute capability, memory and driver of each NVIDIA GPU, as nvidia-smi prints them."""
    gpu_problem: str
    """Why `gpus` is empty, else ""."""
    backend: str | None
    """The backend that would be chosen; None if none can run."""
    reason: str

    def missing(self, extra: str) -> list[str]:
        """Names of the group's packages that are not installed."""
        return [package.name for package in self.packages[extra] if package.installed is None]


@contextmanager
def missing_packages_named() -> Iterator[None]:
    """Raise `MissingDependencyError`, with the line that installs it, where a package of an extra can't be imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0].replace("_", "-")
        for extra, packages in find_packages().items():
            if extra and name in [package.name for package in packages]:
                how = f"pip install 'contbatch[{extra}]' (in a checkout: pip install -e {_checkout(extra)})"
                told = f"{name} is not installed; {PURPOSE[extra]} need it: {how}; `contbatch doctor` tells what else"
                raise MissingDependencyError(told) from error
        raise


def find_packages() -> dict[str, list[Package]]:
    """Look up the dependencies by extra, as in `PURPOSE`; imports none of them."""
    packages: dict[str, list[Package]] = {extra: [] for extra in PURPOSE}
    for requirement in requires("contbatch") or ():
        name, pinned, marker = _split(requirement)
        extra = re.search(r"""extra == ["'](\w+)["']""", marker)
        group = extra[1] if extra else ""
        if group in packages and ("linux" not in marker or sys.platform == "linux"):
            packages[group].append(Package(name, pinned, _installed(name)))
    return packages


def diagnose() -> Diagnosis:
    """Look at the installed packages and the GPUs; imports none of the packages and starts nothing on a GPU."""
    packages = find_packages()
    gpus, gpu_problem = _gpus()
    missing = [package.name for extra in ("", "cpu") for package in packages[extra] if package.installed is None]
    if missing:
        return Diagnosis(packages, gpus, gpu_problem, None, f"not installed: {', '.join(missing)}")
    reason = "its packages are installed" + (
        "; there is a GPU: backend 'tensorrt' can be asked for by name, but has never run on one" if gpus else ""
    )
    return Diagnosis(packages, gpus, gpu_problem, "cpu", reason)


def report(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text, with the lines that install what is missing."""
    lines = [f"contbatch {version('contbatch')}, Python {platform.python_version()}, {platform.platform()}", ""]
    for extra, packages in diagnosis.packages.items():
        missing = diagnosis.missing(extra)
        state = f"{len(missing)} of {len(packages)} missing: {', '.join(missing)}" if missing else "installed"
        lines.append(f"{extra or 'core'} ({PURPOSE[extra]}): {state}")
        others = [p for p in packages if p.installed not in (None, p.pinned)]
        lines += [f"  {p.name} {p.installed} is installed, tested with {p.pinned}" for p in others]
        if missing:
            target = f"'contbatch[{extra}]'" if extra else "contbatch"
            lines.append(f"  pip:   pip install {target}     (in a checkout: pip install -e {_checkout(extra)})")
            lines.append(f"  conda: conda env create -f {CONDA.get(extra, 'environment-gpu.yml')}")
    lines += ["", *(f"GPU: {gpu}" for gpu in diagnosis.gpus)]
    if not diagnosis.gpus:
        lines.append(f"GPU: none ({diagnosis.gpu_problem})")
    lines.append(f"backend: {diagnosis.backend or 'none'} ({diagnosis.reason})")
    return "\n".join(lines)


def _checkout(extra: str) -> str:
    return f"'.[{extra}]'" if extra else "."


def _split(requirement: str) -> tuple[str, str, str]:
    """Split a pinned requirement into name, version and marker."""
    match = _PIN.match(requirement)
    return (match[1], match[2], match[3]) if match else (requirement, "", "")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpus() -> tuple[list[str], str]:
    """Return a line per GPU, or why there is none."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        return [], "no nvidia-smi: no NVIDIA driver, or it is not on the PATH"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"
    if done.returncode:
        return [], f"nvidia-smi: {(done.stdout + done.stderr).strip()}"
    gpus = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return gpus, "" if gpus else "nvidia-smi lists none"
