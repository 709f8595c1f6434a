"""What a kernel takes of a GPU, by NVIDIA's assembler ptxas, copies of which come with Triton."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from contbatch.errors import KernelBuildError


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one kernel as `ptxas -v` reports them."""

    target: str
    """The architecture assembled for, such as sm_90a."""
    registers: int
    """Per thread; a multiprocessor has 65,536."""
    spilled_bytes: int
    """Stack per thread for what did not fit in registers, stores and loads together."""


def assemble(ptx: str) -> Usage:
    """Assemble PTX for the architecture it names; what ptxas refuses raises `KernelBuildError` with its words."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target\s+(sm_(\d+)\w*)", ptx, re.MULTILINE)
    if target is None:
        raise KernelBuildError("the PTX names no target architecture")
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [
            get_ptxas(int(target[2])).path,
            "-v",
            f"-arch={target[1]}",
            source,
            "-o",
            Path(folder) / "kernel.cubin",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelBuildError(f"ptxas refuses the PTX for {target[1]}: {done.stderr.strip()}")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    return Usage(target[1], int(re.findall(r"Used (\d+) registers", done.stderr)[0]), sum(map(int, spills)))


def version(sm: int) -> str:
    """Return the release of the assembler used for an architecture, such as 12.9."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(sm).version)
