"""Write a model as ONNX with com.microsoft::PagedAttention, and read back what an exported file says of itself."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from contbatch.errors import ModelFileError, UnsupportedModelError
from contbatch.model import Model, ModelConfig

if TYPE_CHECKING:
    import onnx_ir as ir

_DTYPES = {"float32": "FLOAT", "bfloat16": "BFLOAT16", "float16": "FLOAT16"}
"""Names that `onnx_ir.DataType` has for them."""


def export_onnx(
    model: Model,
    path: str | os.PathLike[str],
    dtype: str = "float32",
    max_position: int | None = None,
    steps: Mapping[str, float] | None = None,
) -> Path:
    """Write `path` and, beside it, its weights as `path` + ".data"; see `contbatch.graph.decoder` for the graph.

    Neither file is ever seen half-written: both are completed in a folder of their own and then moved. float16 and
    bfloat16 files satisfy ONNX Runtime's schema of the operator; float32 is for runners that bring their own kernel.

    Parameters
    ----------
    model : Model
    path : path
        The .onnx file; an existing one is replaced.
    dtype : {"float32", "bfloat16", "float16"}
        Type of weights, activations and caches.
    max_position : int, optional
        Positions that the rotary tables hold, 1 ≤ max_position ≤ model.config.max_position, which is the default.
    steps : mapping of str to float, optional
        Of a quantised model (W8A8): where its linear layers take their input in 8 bits, `quantize.Quantized.steps`.

    Returns
    -------
    Path
        The .onnx file. Its metadata_props hold config (JSON), dtype, quantization, source, weights_sha256 and versions.

    Raises
    ------
    UnsupportedModelError
        An unknown dtype, a max_position out of range, or weights too large for float16.
    """
    require_dtype(dtype)
    import onnx_ir as ir  # loads sympy: 38 MB that nobody needs who only reads a file

    from contbatch.graph import decoder

    path, limit = Path(path), model.config.max_position
    if max_position is not None and not 1 <= max_position <= limit:
        raise UnsupportedModelError(f"max_position must be in [1, {limit}], got {max_position}")
    config = replace(model.config, max_position=max_position or limit)
    graph = decoder(replace(model, config=config), ir.DataType[_DTYPES[dtype]], steps or {})
    graph.producer_name, graph.producer_version = "contbatch", version("contbatch")
    graph.metadata_props.update(
        config=json.dumps(asdict(config)),
        dtype=dtype,
        quantization="w8a8" if steps else "none",
        source=model.source,
        weights_sha256=weights_sha256(model),
        versions=json.dumps(versions()),
    )
    _save(graph, path)
    return path


def _save(graph: "ir.Model", path: Path) -> None:
    import onnx_ir as ir

    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        data = path.with_name(f"{path.name}.data")
        # Aligned so that runtimes can map large weights into memory instead of copying them.
        ir.save(graph, Path(folder) / path.name, external_data=data.name, alignment=65536)
        path.unlink(missing_ok=True)  # so that a crash between the moves leaves no file rather than a mismatched pair
        os.replace(Path(folder) / data.name, data)
        os.replace(Path(folder) / path.name, path)


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Return the configuration stored in an exported .onnx file, its max_position being that of the rotary tables.

    Raises `ModelFileError` where the file is missing, is no ONNX or was not written by `export_onnx`.
    """
    metadata = read_metadata(path)
    try:
        return ModelConfig(**json.loads(metadata["config"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{path}: no readable contbatch config in its metadata ({error!r})") from None


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata_props of an .onnx file without reading its weights; raises `ModelFileError`."""
    try:
        return {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    except (OSError, DecodeError) as error:
        raise ModelFileError(f"{path}: not a readable ONNX file ({error})") from None


def require_dtype(dtype: str) -> None:
    """Raise `UnsupportedModelError` for a type that nothing is exported in."""
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")


def versions() -> dict[str, str]:
    """Return the versions that shape an exported file, by package."""
    return {package: version(package) for package in ("contbatch", "onnx", "onnx-ir")}


def weights_sha256(model: Model) -> str:
    """Hash names, types, shapes and values of all weights: equal for equal weights whatever file they came from."""
    digest = hashlib.sha256()
    for name in sorted(model.weights):
        array = np.ascontiguousarray(model.weights[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()
