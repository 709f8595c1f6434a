"""Weights packed in 4 or 8 bits, widened: TensorRT takes codes before DequantizeLinear alone."""

import os
from pathlib import Path

import numpy as np
from onnx import GraphProto, TensorProto, helper, numpy_helper

_ALIGNMENT = 65536
_STAGES = ("", ".wide", ".centred", ".groups", ".0", ".1", ".2")
"""What `contbatch.linear_layers` calls the steps from codes to weights, behind the name of those."""


def widen_weights(graph: GraphProto, path: Path) -> None:
    """Replace packed weights of an exported file by float32 ones in `model.wide.data` beside it; W8A8's codes stay.

    Parameters
    ----------
    graph : GraphProto
        That of the file, without its external data.
    path : Path
        The file itself, model.onnx.
    """
    quantised = {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    held = {tensor.name: tensor for tensor in graph.initializer}
    packed = [name.removesuffix(".codes") for name in held if name.endswith(".codes") and name not in quantised]
    if not packed:
        return
    _gather_whole_rows(graph, packed)
    parts = [f"{name}.{part}" for name in packed for part in ("codes", "scales", "zeros")]
    kept = [tensor for tensor in graph.initializer if tensor.name not in parts]
    data = path.with_name(f"{path.stem}.wide.data")
    part = data.with_suffix(".part")
    with part.open("wb") as file:
        for name in packed:
            weights = _dense(held, name, path.parent)
            file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
            kept.append(_placed(name, weights, data.name, file.tell()))
            file.write(weights.data)
    os.replace(part, data)
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _gather_whole_rows(graph: GraphProto, packed: list[str]) -> None:
    """Take the nodes away that widen; where they widened rows of an embedding, these are gathered from its weights."""
    sources = {f"{name}.codes": name for name in packed}
    made, nodes = set(packed), []
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] in sources:
            rows = node.output[0].removesuffix(".0")
            made.add(rows)
            nodes.append(helper.make_node("Gather", [sources[node.input[0]], node.input[1]], [rows], rows))
        else:
            nodes.append(node)
    gone = {name + stage for name in made for stage in _STAGES}
    kept = [node for node in nodes if (node.op_type == "Gather" and node.name in made) or node.output[0] not in gone]
    del graph.node[:]
    graph.node.extend(kept)


def _dense(held: dict[str, TensorProto], name: str, folder: Path) -> np.ndarray:
    codes, scales, *zeros = (
        numpy_helper.to_array(held[part], str(folder)).astype(np.float32)
        for part in (f"{name}.codes", f"{name}.scales", f"{name}.zeros")
        if part in held
    )
    centred = codes - zeros[0] if zeros else codes
    return (centred * scales).reshape(len(codes), -1)


def _placed(name: str, weights: np.ndarray, location: str, offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=weights.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", weights.nbytes)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    return tensor
