"""The GPU kernels as PTX, one text per variant and architecture: made by Triton on any Linux machine, no GPU needed.

PTX (parallel thread execution) is NVIDIA's portable assembly language; the driver turns it into machine code.
"""

import re
from dataclasses import dataclass
from typing import Any

from contbatch.errors import KernelBuildError, MissingDependencyError, UnsupportedModelError
from contbatch.plugins.paged_attention.variant import DTYPES, Variant

PTX_VERSIONS = {80: 80, 86: 80, 89: 80, 90: 80, 100: 86, 120: 87}
"""By architecture (compute capability without its dot) ten times the PTX version asked for, the oldest that will do.

From 90 on the code is for that architecture alone: its target ends in "a"."""
MAX_REGISTERS = 255
"""The hardware's limit, stated in the PTX: without it ptxas spills a few in the hope of more programs at once."""
MAX_SHARED_MEMORY = 49_152
"""Bytes a launch may use without opting in to more."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel and what a launch of it needs; its grid is that of the Triton function of the same name."""

    name: str
    ptx: str
    num_threads: int
    shared_memory: int
    """Bytes of dynamic shared memory."""


def compile_attention(variant: Variant, sm: int) -> Kernel:
    """Compile `triton_kernel.paged_attention` for compute capability `sm`, such as 90.

    Raises
    ------
    MissingDependencyError
        Triton is not installed.
    UnsupportedModelError
        An architecture that is not among `PTX_VERSIONS`.
    KernelBuildError
        The code needs more shared memory than a plain launch has, or hidden parameters that no launcher passes.
    """
    require(sm)
    from contbatch.plugins.paged_attention.triton_kernel import paged_attention

    absent = [*["key", "value"] * variant.packed, *["lse"] * (variant.num_splits == 1)]
    absent += ["cos_cache", "sin_cache"] * (variant.rotary_dim == 0)
    types = dict.fromkeys(paged_attention.arg_names, f"*{DTYPES[variant.dtype]}")
    types |= dict.fromkeys(("cumulative_sequence_length", "past_seqlens", "block_table"), "*i32")
    types |= {name: "i32" for name in types if name.startswith(("num_", "max_"))}
    if variant.num_splits > 1:
        types |= {"output": "*fp32", "lse": "*fp32"}
    constants = {"variant": variant, **dict.fromkeys(absent)}
    return _compile(paged_attention, types, constants, sm, variant.tactic.num_warps, variant.tactic.num_stages)


def compile_combine(dtype: str, head_size: int, num_splits: int, sm: int) -> Kernel:
    """Compile `triton_combine.combine`, whose output has this dtype; raises as `compile_attention` does."""
    require(sm)
    from contbatch.plugins.paged_attention.triton_combine import combine

    types = {"partial": "*fp32", "lse": "*fp32", "num_rows": "i32", "output": f"*{DTYPES[dtype]}"}
    return _compile(combine, types, {"head_size": head_size, "num_splits": num_splits}, sm, num_warps=1, num_stages=1)


def require(sm: int) -> None:
    """Raise `UnsupportedModelError` or `MissingDependencyError` unless kernels for `sm` can be compiled here."""
    if sm not in PTX_VERSIONS:
        raise UnsupportedModelError(f"kernels exist for SM {', '.join(map(str, PTX_VERSIONS))}, got {sm}")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("PTX needs Triton (Linux): pip install 'contbatch[ptx]'") from error


def _compile(
    function: Any, types: dict[str, str], constants: dict[str, Any], sm: int, num_warps: int, num_stages: int
) -> Kernel:
    """Compile one Triton function; `types` are those of its arguments, some of which may be `constants`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = types | dict.fromkeys(constants, "constexpr")
    # Launchers align their buffers to 256 bytes, so pointers may be taken for multiples of 16.
    pointers = [i for i, name in enumerate(function.arg_names) if signature[name].startswith("*")]
    source = ASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in pointers})
    options = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "ptx_version": PTX_VERSIONS[sm],
        "maxnreg": MAX_REGISTERS,
        "enable_fp_fusion": True,
    }
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # paths of this machine mean nothing elsewhere
        compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    metadata = compiled.metadata
    if metadata.shared > MAX_SHARED_MEMORY:
        needed = f"{metadata.name} needs {metadata.shared} bytes of shared memory on SM {sm}"
        raise KernelBuildError(f"{needed}, a plain launch has {MAX_SHARED_MEMORY}; constants {constants}")
    num_arguments = len(signature) - len(constants)
    ptx = strip_hidden_parameters(compiled.asm["ptx"], metadata.name, num_arguments)
    return Kernel(metadata.name, ptx, metadata.num_warps * 32, metadata.shared)


def strip_hidden_parameters(ptx: str, name: str, num_arguments: int) -> str:
    """Remove the parameters of a kernel from number `num_arguments` on, having proved that nothing reads them.

    Triton appends pointers to scratch memory of its own, which TensorRT and plain launches know nothing of. The proof:
    parameters have addresses only by their names, and outside the list every mention of one is a load of exactly that
    name, no offset and no address taken; so a parameter whose name occurs nowhere is read nowhere.

    Raises
    ------
    KernelBuildError
        The kernel is missing or has fewer parameters, a hidden one is used, or a parameter is used in another way.
    """
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", ptx)
    if entry is None:
        raise KernelBuildError(f"the PTX has no kernel {name!r}")
    declared = [parameter.strip() for parameter in entry[1].split(",") if parameter.strip()]
    names = [parameter.split()[-1] for parameter in declared]
    if len(names) < num_arguments:
        raise KernelBuildError(f"kernel {name!r} has {len(names)} parameters, expected at least {num_arguments}")
    rest = ptx[: entry.start()] + ptx[entry.end() :]
    loaded = re.findall(r"ld\.param\.[^\[\];]*\[\s*([\w$]+)\s*\]\s*;", rest)
    for parameter in names:
        uses = len(re.findall(rf"(?<![\w$]){re.escape(parameter)}(?![\w$])", rest))
        if uses != loaded.count(parameter):
            raise KernelBuildError(f"kernel {name!r} uses its parameter {parameter} other than by a plain load")
        if uses and parameter in names[num_arguments:]:
            raise KernelBuildError(f"kernel {name!r} reads {parameter}, a hidden parameter that no launcher passes")
    visible = ",\n\t".join(declared[:num_arguments])
    return f"{ptx[: entry.start(1)]}\n\t{visible}\n{ptx[entry.end(1) :]}"
