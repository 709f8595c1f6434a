"""The GPU kernels of an exported model as PTX files, beside a manifest of what it takes to launch them."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from contbatch.errors import InvalidRequestError
from contbatch.export import read_config, read_metadata
from contbatch.model import ModelConfig
from contbatch.plugins.paged_attention import ptx, ptxas
from contbatch.plugins.paged_attention.variant import Variant, default_tactics

MANIFEST = "kernels.json"
SMS = tuple(ptx.PTX_VERSIONS)
"""Compute capabilities, without their dot, that kernels can be made for."""


def export_ptx(
    model: str | os.PathLike[str], sms: Sequence[int] = SMS, page_size: int = 16, num_splits: int = 1
) -> Path:
    """Write the kernels that a model's PagedAttention nodes need, for each architecture and tactic; no GPU needed.

    Parameters
    ----------
    model : path
        A file that `contbatch.export.export_onnx` wrote in float16 or bfloat16.
    sms : sequence of int
        Compute capabilities without their dot, such as 90; all known ones by default.
    page_size : int
        Positions per page, ≥ 1.
    num_splits : int
        More than 1: the split form for few long sequences, and the kernel that combines its outputs.

    Returns
    -------
    Path
        The folder `ptx` beside the model, made anew as a whole: PTX files, and kernels.json with the file, the variant,
        threads, shared memory, registers and spilled bytes of each kernel, and its grid: (num_tokens //
        block_tokens + num_seqs + 1, grid_y, grid_z), of `combine` (num_tokens · num_heads, 1, 1).

    Raises
    ------
    MissingDependencyError
        Triton is not installed.
    ModelFileError, UnsupportedModelError, RunnerError, KernelBuildError, InvalidRequestError
        The model is not an exported one, has no GPU kernel (float32, a head size), or a parameter is out of range.
    """
    path = Path(model)
    if not sms:
        raise InvalidRequestError(f"sms must name an architecture among {SMS}, got none")
    made = [
        kernel
        for sm in sms
        for kernel in _compile(read_config(path), read_metadata(path)["dtype"], sm, page_size, num_splits)
    ]
    tools = {"triton": version("triton"), "ptxas": {sm: ptxas.version(sm) for sm in sms}}
    manifest = {"tools": tools, "page_size": page_size, "kernels": [entry for _, entry in made]}
    return _write(path.parent / "ptx", {entry["file"]: kernel.ptx for kernel, entry in made}, manifest)


def _write(folder: Path, texts: Mapping[str, str], manifest: Mapping[str, Any]) -> Path:
    """Put files and a manifest in place of a folder, which is never seen half-written."""
    with TemporaryDirectory(prefix=".ptx-", dir=folder.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        (new / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            os.replace(folder, Path(temporary) / "old")
        os.replace(new, folder)
    return folder


def variants(config: ModelConfig, dtype: str, page_size: int, num_splits: int = 1) -> dict[int, Variant]:
    """Return what the kernel is compiled for in a model, by tactic; raises as `Variant` does."""
    return {
        number: Variant(
            dtype=dtype,
            num_heads=config.num_heads,
            kv_num_heads=config.kv_num_heads,
            head_size=config.head_size,
            page_size=page_size,
            tactic=tactic,
            scale=config.head_size**-0.5,
            softcap=float(config.attention_softcap),
            local_window_size=config.sliding_window or -1,
            rotary_dim=config.rotary_dim or config.head_size,
            rotary_interleaved=config.rotary_interleaved,
            packed=not config.qk_norm,  # normed queries and keys are inputs of their own, see `contbatch.graph`
            num_splits=num_splits,
        )
        for number, tactic in default_tactics(config.head_size).items()
    }


def _compile(
    config: ModelConfig, dtype: str, sm: int, page_size: int, num_splits: int
) -> list[tuple[ptx.Kernel, dict[str, Any]]]:
    """Return the kernels for one architecture, each with its entry of the manifest."""
    made = []
    for number, variant in variants(config, dtype, page_size, num_splits).items():
        grid = {"block_tokens": variant.block_tokens, "grid_y": variant.kv_num_heads * variant.parts}
        details = {"tactic": number, **grid, "grid_z": num_splits, "variant": asdict(variant)}
        kernel = ptx.compile_attention(variant, sm)
        made.append((kernel, _entry(kernel, sm, f"sm{sm}-tactic{number}", details)))
    if num_splits > 1:
        kernel = ptx.compile_combine(dtype, config.head_size, num_splits, sm)
        made.append((kernel, _entry(kernel, sm, f"sm{sm}", {"head_size": config.head_size, "num_splits": num_splits})))
    return made


def _entry(kernel: ptx.Kernel, sm: int, suffix: str, details: dict[str, Any]) -> dict[str, Any]:
    return {
        "file": f"{kernel.name}-{suffix}.ptx",
        "sha256": hashlib.sha256(kernel.ptx.encode()).hexdigest(),
        "name": kernel.name,
        "sm": sm,
        "num_threads": kernel.num_threads,
        "shared_memory": kernel.shared_memory,
        **asdict(ptxas.assemble(kernel.ptx)),
        **details,
    }
