"""PagedAttention in ONNX's own operators: each token's pages are gathered, and ONNX's Attention (opset 24) reads them.

Needs no plugin, and pays for it: in every layer each token of a step brings all pages that its sequence's row of the
block table may name, block_table's width · page_size positions, into memory of its own, tokens of a prompt too; and
the caches are copied, as ScatterND does not work in place. See docs/tensorrt.md for the bytes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

OPSET, IR_VERSION = 24, 11
_FLOAT, _INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def gather_pages(proto: ModelProto, page_size: int) -> None:
    """Replace each com.microsoft::PagedAttention of an exported model, within float rounding of what it computes.

    Rows of padding compute what the last token does, write the same to the same place, and come out as zeros. So one
    token at least must be no padding. Pages that a token can't see are zeroed before they are read: whatever is in
    them, NaN too, does not matter.
    """
    graph, build = proto.graph, _Builder(page_size)
    types = {value.name: value.type.tensor_type for value in graph.input}
    columns = {initializer.name: initializer.dims[-1] for initializer in graph.initializer if initializer.dims}
    for node in list(graph.node):
        if node.op_type == "PagedAttention":
            half = columns[node.input[8]] if len(node.input) > 8 else 0
            build.attention(node, types[node.input[3]], half)
        else:
            build.nodes.append(node)
    del graph.node[:]
    graph.node.extend(build.nodes)
    graph.initializer.extend(build.constants.values())
    proto.ir_version = max(proto.ir_version, IR_VERSION)
    del proto.opset_import[:]
    proto.opset_import.append(helper.make_opsetid("", OPSET))


class _Builder:
    """Collects nodes; what all layers need of a step's indices is made once, before the first."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._step: dict[str, str] = {}

    def op(self, op_type: str, *inputs: str, name: str = "", num_outputs: int = 1, **attributes: Any) -> str:
        """Append a node and return the name of its (first) output."""
        output = name or f"gather.{len(self.nodes)}.{op_type.lower()}"
        outputs = [output, *(f"{output}.{i}" for i in range(1, num_outputs))]
        self.nodes.append(helper.make_node(op_type, inputs, outputs, output, **attributes))
        return output

    def ints(self, *values: int) -> str:
        """Return a constant of one dimension."""
        return self._constant("x".join(map(str, values)), np.array(values, np.int64))

    def _constant(self, name: str, array: np.ndarray) -> str:
        name = f"gather.constant.{name}.{array.dtype}"
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def step(self, query: str, indices: Sequence[str], window: int) -> dict[str, str]:
        """Return, by name, what of a step's indices each layer needs; T tokens, C = width of the table · page_size.

        real (T) bool, and row (T), itself or for padding the last real one; position (T); pages (T, width), slot (T, 1)
        into all pages' positions, visible (T, C) bool.
        """
        if self._step:
            return self._step
        cumulative, past, table = (self.op("Cast", name, to=_INT64) for name in indices)
        num_tokens = self.op("Shape", query, start=0, end=1)
        last = self.op("Slice", cumulative, self.ints(-1), self.ints(2**31))
        rows = self.op("Range", self._scalar(0), self.op("Squeeze", num_tokens), self._scalar(1))
        row = self.op("Min", rows, self.op("Sub", last, self.ints(1)))
        # Sequences that end at a row or before it: as many as stand before the one it belongs to.
        ends = self.op("Slice", cumulative, self.ints(1), self.ints(2**31))
        ended = self.op("GreaterOrEqual", self.op("Unsqueeze", row, self.ints(1)), ends)
        sequence = self.op("ReduceSum", self.op("Cast", ended, to=_INT64), self.ints(1), keepdims=0)
        offset = self.op("Sub", row, self.op("Gather", cumulative, sequence))
        position = self.op("Add", self.op("Gather", past, sequence), offset)
        column = self.op("Unsqueeze", position, self.ints(1))
        pages = self.op("Max", self.op("Gather", table, sequence), self.ints(0))
        number = self.op("Div", column, self.ints(self.page_size))
        first = self.op("Mul", self.op("GatherElements", pages, number, axis=1), self.ints(self.page_size))
        within = self.op("Sub", column, self.op("Mul", number, self.ints(self.page_size)))
        width = self.op("Squeeze", self.op("Shape", table, start=1))
        seen = self.op("Range", self._scalar(0), self.op("Mul", width, self._scalar(self.page_size)), self._scalar(1))
        visible = self.op("LessOrEqual", seen, column)
        if window > 0:
            within_window = self.op("Greater", seen, self.op("Sub", column, self.ints(window)))
            visible = self.op("And", visible, within_window)
        self._step = {"real": self.op("Less", rows, last), "row": row, "position": position}
        self._step |= {"pages": pages, "slot": self.op("Add", first, within), "visible": visible}
        return self._step

    def _scalar(self, value: int) -> str:
        return self._constant(f"scalar.{value}", np.array(value, np.int64))

    def attention(self, node: NodeProto, cache: onnx.TypeProto.Tensor, half: int) -> None:
        """Append what stands for one node, whose rotary tables have `half` columns."""
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        heads, kv_heads = given["num_heads"], given["kv_num_heads"]
        head_size, kind = cache.shape.dim[3].dim_value, cache.elem_type
        step = self.step(node.input[0], node.input[5:8], given["local_window_size"])
        query, *new = self._heads(node, step, heads, kv_heads, head_size)
        if given["do_rotary"]:
            tables = [self._rows(name, step) for name in node.input[8:10]]
            turn = partial(self._rotate, tables=tables, half=half, interleaved=given["rotary_interleaved"], kind=kind)
            query, new[0] = turn(query), turn(new[0])
        seen = []
        for x, before, after in zip(new, node.input[3:5], node.output[1:3], strict=True):
            flat = self.op("Reshape", before, self.ints(-1, kv_heads, head_size))
            updated = self.op("ScatterND", flat, step["slot"], x)
            self.op("Reshape", updated, self.ints(-1, self.page_size, kv_heads, head_size), name=after)
            gathered = self.op(
                "Reshape", self.op("Gather", after, step["pages"]), self.ints(0, -1, kv_heads, head_size)
            )
            by_head = self.op("Transpose", gathered, perm=[0, 2, 1, 3])
            readable = self.op("Unsqueeze", step["visible"], self.ints(1, 3))
            seen.append(self.op("Where", readable, by_head, self._number(0, kind)))
        scale = given["scale"] or head_size**-0.5
        if given["softcap"]:
            grouped = self.op("Reshape", query, self.ints(0, kv_heads, heads // kv_heads, head_size))
            output = self._attend_capped(grouped, seen, step["visible"], scale, given["softcap"], kind)
        else:
            output = self._attend(query, seen, step["visible"], scale)
        output = self.op("Reshape", output, self.ints(-1, heads * head_size))
        real = self.op("Unsqueeze", step["real"], self.ints(1))
        self.op("Where", real, output, self._number(0, kind), name=node.output[0])

    def _heads(self, node: NodeProto, step: dict[str, str], heads: int, kv_heads: int, size: int) -> list[str]:
        """Return queries, keys and values of each row, (T, heads, head_size)."""
        parts = [self.op("Gather", name, step["row"]) for name in node.input[:3] if name]
        if len(parts) == 1:
            sizes = self.ints(heads * size, kv_heads * size, kv_heads * size)
            first = self.op("Split", parts[0], sizes, axis=1, num_outputs=3)
            parts = [first, f"{first}.1", f"{first}.2"]
        counts = heads, kv_heads, kv_heads
        return [self.op("Reshape", x, self.ints(0, n, size)) for x, n in zip(parts, counts, strict=True)]

    def _rows(self, table: str, step: dict[str, str]) -> str:
        """Return a rotary table at each token's position, float32 (T, 1, rotary_dim / 2)."""
        rows = self.op("Gather", table, step["position"])
        return self.op("Unsqueeze", self.op("Cast", rows, to=_FLOAT), self.ints(1))

    def _rotate(self, x: str, tables: list[str], half: int, interleaved: int, kind: int) -> str:
        """Rotate rows (T, heads, head_size) in float32; `half` pairs of each head, the rest stays."""
        wide = self.op("Cast", x, to=_FLOAT)
        first = self.op("Slice", wide, self.ints(0), self.ints(2 * half), self.ints(2))
        rest = self.op("Slice", wide, self.ints(2 * half), self.ints(2**31), self.ints(2))
        if interleaved:
            pairs = self.op("Reshape", first, self.ints(0, 0, half, 2))
            a, b = (self.op("Squeeze", self._part(pairs, i, 1, axis=3), self.ints(3)) for i in range(2))
        else:
            a, b = (self._part(first, i * half, half, axis=2) for i in range(2))
        cos, sin = tables
        turned = [
            self.op("Sub", self.op("Mul", a, cos), self.op("Mul", b, sin)),
            self.op("Add", self.op("Mul", b, cos), self.op("Mul", a, sin)),
        ]
        if interleaved:
            pairs = self.op("Concat", *(self.op("Unsqueeze", y, self.ints(3)) for y in turned), axis=3)
            turned = [self.op("Reshape", pairs, self.ints(0, 0, 2 * half))]
        return self.op("Cast", self.op("Concat", *turned, rest, axis=2), to=kind)

    def _part(self, x: str, start: int, size: int, axis: int) -> str:
        return self.op("Slice", x, self.ints(start), self.ints(start + size), self.ints(axis))

    def _attend(self, query: str, seen: list[str], visible: str, scale: float) -> str:
        """Attend with queries (T, heads, head_size) to keys and values (T, kv_heads, C, head_size)."""
        mask = self.op("Unsqueeze", visible, self.ints(1, 2))
        return self.op("Attention", self.op("Unsqueeze", query, self.ints(2)), *seen, mask, scale=scale)

    def _attend_capped(self, query: str, seen: list[str], visible: str, scale: float, softcap: float, kind: int) -> str:
        """Do as `_attend` operator by operator: TensorRT's Attention has no softcap. Scores are float32."""
        keys, values = seen
        mask = self.op("Unsqueeze", visible, self.ints(1, 2))
        scores = self.op(
            "MatMul", self.op("Mul", query, self._number(scale, kind)), self.op("Transpose", keys, perm=[0, 1, 3, 2])
        )
        cap = self._number(softcap, _FLOAT)
        capped = self.op("Mul", self.op("Tanh", self.op("Div", self.op("Cast", scores, to=_FLOAT), cap)), cap)
        weights = self.op("Softmax", self.op("Where", mask, capped, self._number(-np.inf, _FLOAT)), axis=3)
        return self.op("MatMul", self.op("Cast", weights, to=kind), values)

    def _number(self, value: float, kind: int) -> str:
        return self._constant(f"{value}", np.array(value, helper.tensor_dtype_to_np_dtype(kind)))
