"""From what a model file says to a `Model`: fields, names, shapes and values checked in the file's own terms."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from contbatch.errors import ModelFileError
from contbatch.model import Model, ModelConfig, weight_shapes


def configure(path: Path, **fields: Any) -> ModelConfig:
    """Make a `ModelConfig`; its `ModelFileError` gets the path of the file that the fields come from."""
    try:
        return ModelConfig(**fields)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from error


def assemble(
    path: Path,
    config: ModelConfig,
    tensor_names: Collection[str],
    name_in_file: Callable[[str], str],
    read: Callable[[str], np.ndarray],
) -> Model:
    """Read every weight the configuration asks for and nothing else.

    Parameters
    ----------
    path : Path
        The file or directory, for messages and `Model.source`.
    config : ModelConfig
    tensor_names : collection of str
        What the file holds.
    name_in_file : callable
        The file's name for a name of `weight_shapes`.
    read : callable
        A tensor as a float32 array, by its name in the file.

    Raises
    ------
    ModelFileError
        Tensors are missing, left over, of another shape, or hold NaN or infinity.
    """
    shapes = weight_shapes(config)
    sources = {name: name_in_file(name) for name in shapes}
    _no_names(path, "lacks the tensor", set(sources.values()) - set(tensor_names))
    _no_names(path, f"has a tensor that {config.architecture} doesn't use:", set(tensor_names) - set(sources.values()))
    weights = {}
    for name, shape in shapes.items():
        array = read(sources[name])
        if array.shape != shape:
            raise ModelFileError(
                f"{path}: tensor {sources[name]} must be {shape} by the configuration, is {array.shape}"
            )
        # A maximum or minimum is NaN if any value is, and infinite only if one is.
        if not (np.isfinite(array.max()) and np.isfinite(array.min())):
            raise ModelFileError(f"{path}: tensor {sources[name]} holds NaN or infinity")
        weights[name] = array
    return Model(config, weights, str(path))


def _no_names(path: Path, problem: str, names: set[str]) -> None:
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ModelFileError(f"{path}: {problem} {min(names)}{others}")
