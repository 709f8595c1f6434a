"""An exported model in the form that TensorRT parses: its PagedAttention nodes become the plugins', or ONNX's own.

At its end the largest logits are found, so that only they need to leave the GPU.
"""

import os
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, helper

from contbatch.checks import is_int, require, require_counts
from contbatch.errors import UnsupportedModelError
from contbatch.export import read_config, read_metadata
from contbatch.tensorrt_gather import gather_pages
from contbatch.tensorrt_weights import widen_weights

DOMAIN = "contbatch"
ATTRIBUTES = (
    "num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved",
)  # fmt: skip
"""All must be there, in this order: TensorRT hands their values over by position."""


TOP_K = 64
"""Logits of a row that come back by themselves."""
MOST_TOP_K = 3840
"""What TensorRT's TopK can do, see its operator reference."""
ATTENTION = ("paged", "gather")


def write_tensorrt_onnx(
    model: str | os.PathLike[str],
    page_size: int = 16,
    num_splits: int = 1,
    *,
    attention: str = "paged",
    top_k: int = TOP_K,
) -> Path:
    """Write `model.tensorrt.onnx` beside an exported model.onnx, whose weights file it shares. W8A8 stays as it is.

    "paged": each com.microsoft::PagedAttention becomes contbatch::PagedAttention, or with num_splits > 1
    PagedAttentionSplit and PagedAttentionCombine, see `contbatch.plugins.paged_attention.tensorrt_plugin`. Queries,
    keys and values that are inputs of their own are concatenated. "gather": it becomes operators of ONNX alone, see
    `contbatch.tensorrt_gather`, in `model.gather.onnx`, with packed weights widened. The page size becomes a constant.

    The graph gets three outputs more: of each row of logits the top_k largest, largest first, `top_logits` float32
    and `top_ids` int32 (num_logits, top_k); and `log_total` float32 (num_logits), the logarithm of the sum of the
    exponentials of all.

    Parameters
    ----------
    model : path
        A file that `contbatch.export.export_onnx` wrote, for "paged" in float16 or bfloat16.
    page_size, num_splits : int
        Positions per page; programs that share one sequence's pages, of "paged" alone. Both ≥ 1.
    attention : {"paged", "gather"}
    top_k : int
        In [1, 3840]; not more than the vocabulary are taken.

    Returns
    -------
    Path
        The new file; an existing one is replaced.

    Raises
    ------
    ModelFileError, UnsupportedModelError, InvalidRequestError
        The model is not an exported one, is in float32, or a number is out of range.
    """
    require_counts(page_size=page_size, num_splits=num_splits)
    require_form(attention, num_splits, top_k)
    path, config, dtype = Path(model), read_config(model), read_metadata(model)["dtype"]
    proto = onnx.load(path, load_external_data=False)
    if attention == "gather":
        widen_weights(proto.graph, path)
        gather_pages(proto, page_size)
    else:
        _use_plugins(proto, path, dtype, num_splits)
    _fix_page_size(proto.graph, page_size)
    _find_largest(proto.graph, min(top_k, config.vocab_size))
    return _write(proto, path.with_name(f"{path.stem}.{'tensorrt' if attention == 'paged' else attention}.onnx"))


def require_form(attention: str, num_splits: int, top_k: int) -> None:
    """Raise `InvalidRequestError` for a form of the graph that there isn't."""
    require(attention in ATTENTION, "attention", attention, "'paged' or 'gather'")
    require(attention == "paged" or num_splits == 1, "num_splits", num_splits, "1 where pages are gathered")
    require(is_int(top_k, 1, MOST_TOP_K), "top_k", top_k, f"an integer in [1, {MOST_TOP_K}]")


def _use_plugins(proto: ModelProto, path: Path, dtype: str, num_splits: int) -> None:
    if dtype not in ("float16", "bfloat16"):
        raise UnsupportedModelError(f"{path}: the GPU kernel takes float16 or bfloat16, got {dtype}")
    nodes = [new for node in proto.graph.node for new in _rewrite(node, dtype, num_splits)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    domains = [opset for opset in proto.opset_import if opset.domain != "com.microsoft"]
    del proto.opset_import[:]
    proto.opset_import.extend([*domains, helper.make_opsetid(DOMAIN, 1)])


def _find_largest(graph: GraphProto, top_k: int) -> None:
    """Append the outputs top_logits, top_ids and log_total."""
    float32, int32, int64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32, onnx.TensorProto.INT64
    graph.initializer.extend(
        [helper.make_tensor("top_k", int64, [1], [top_k]), helper.make_tensor("vocabulary_axis", int64, [1], [1])]
    )
    # Step by step: TensorRT makes ReduceLogSumExp an exponential of the logits as they are, which overflows at 89.
    for op_type, inputs, output, attributes in (
        ("TopK", ["logits", "top_k"], "top_logits", {"axis": 1}),
        ("Cast", ["top_ids.wide"], "top_ids", {"to": int32}),
        ("ReduceMax", ["logits", "vocabulary_axis"], "largest_logit", {"keepdims": 1}),
        ("Sub", ["logits", "largest_logit"], "log_total.below", {}),
        ("Exp", ["log_total.below"], "log_total.weights", {}),
        ("ReduceSum", ["log_total.weights", "vocabulary_axis"], "log_total.sum", {"keepdims": 1}),
        ("Log", ["log_total.sum"], "log_total.above", {}),
        ("Add", ["log_total.above", "largest_logit"], "log_total.column", {}),
        ("Squeeze", ["log_total.column", "vocabulary_axis"], "log_total", {}),
    ):
        made = [output, "top_ids.wide"] if op_type == "TopK" else [output]
        graph.node.append(helper.make_node(op_type, inputs, made, output, **attributes))
    outputs: dict[str, tuple[int, list[str | int]]] = {
        "top_logits": (float32, ["num_logits", top_k]),
        "top_ids": (int32, ["num_logits", top_k]),
        "log_total": (float32, ["num_logits"]),
    }
    graph.output.extend(helper.make_tensor_value_info(name, *described) for name, described in outputs.items())


def write_without_attention(model: str | os.PathLike[str]) -> Path:
    """Write `model.segments.onnx` beside an exported model.onnx: all of it but the PagedAttention nodes.

    What attention reads is an output then (`layers.0.qkv`, ...), what it makes an input (`layers.0.attention`, ...). A
    compiler that has no such operator can build the rest, as TensorRT-RTX does in the tests, without a GPU.

    Returns
    -------
    Path
        The new file; it shares the weights of the exported one, but for packed ones, which are widened.
    """
    path = Path(model)
    read_config(path)
    proto = onnx.load(path, load_external_data=False)
    widen_weights(proto.graph, path)
    graph = proto.graph
    nodes = [node for node in graph.node if node.op_type == "PagedAttention"]
    rest = [node for node in graph.node if node.op_type != "PagedAttention"]
    types = {value.name: value.type for value in graph.value_info}
    used = {name for node in rest for name in node.input}
    inputs = [value for value in graph.input if value.name in used]
    inputs += [helper.make_value_info(node.output[0], types[node.output[0]]) for node in nodes]
    outputs = [value for value in graph.output if value.name == "logits"]
    for node in nodes:
        kind = types[node.output[0]].tensor_type.elem_type
        outputs += [helper.make_tensor_value_info(name, kind, ["num_tokens", None]) for name in node.input[:3] if name]
    initializers = [initializer for initializer in graph.initializer if initializer.name in used]
    for field, values in (
        *((graph.node, rest), (graph.input, inputs), (graph.output, outputs), (graph.initializer, initializers)),
        (graph.value_info, []),
        (proto.opset_import, [opset for opset in proto.opset_import if not opset.domain]),
    ):
        del field[:]
        field.extend(values)
    return _write(proto, path.with_name(f"{path.stem}.segments.onnx"))


def _write(proto: ModelProto, target: Path) -> Path:
    part = target.with_suffix(".part")
    part.write_bytes(proto.SerializeToString())
    os.replace(part, target)
    return target


def _rewrite(node: NodeProto, dtype: str, num_splits: int) -> list[NodeProto]:
    """Return what stands for a node in the new graph."""
    if (node.domain, node.op_type) != ("com.microsoft", "PagedAttention"):
        return [node]
    before, query, (output, *caches) = [], node.input[0], node.output
    if node.input[1]:
        query = f"{node.name}.packed"
        before = [helper.make_node("Concat", node.input[:3], [query], f"{node.name}.concat", axis=1)]
    given: dict[str, AttributeProto] = {attribute.name: attribute for attribute in node.attribute}
    inputs = [query, *node.input[3:]]
    if num_splits == 1:
        attention = helper.make_node("PagedAttention", inputs, node.output, node.name, domain=DOMAIN)
        attention.attribute.extend(given[name] for name in ATTRIBUTES)
        return [*before, attention]
    parts = [f"{node.name}.partial", f"{node.name}.lse"]
    split = helper.make_node("PagedAttentionSplit", inputs, [*parts, *caches], node.name, domain=DOMAIN)
    split.attribute.extend(given[name] for name in ATTRIBUTES)
    split.attribute.append(helper.make_attribute("num_splits", num_splits))
    to = getattr(onnx.TensorProto, dtype.upper())
    combine = helper.make_node(
        "PagedAttentionCombine", parts, [output], f"{node.name}.combine", domain=DOMAIN, to=int(to)
    )
    return [*before, split, combine]


def _fix_page_size(graph: GraphProto, page_size: int) -> None:
    for value in [*graph.input, *graph.output, *graph.value_info]:
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "page_size":
                dimension.dim_value = page_size
