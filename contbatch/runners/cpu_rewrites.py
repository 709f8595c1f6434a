"""What a W8A8 graph is changed to before OpenVINO compiles it: the same numbers, or more exact ones, in fewer nodes."""

from typing import Any

import openvino as ov
from openvino.opset13 import convert, minimum


def hand_over_codes(attention: Any) -> None:
    """Let an attention node whose output is rounded to 8 bits, and nothing else, write the codes.

    Its `with_codes` makes a node like it that writes int8 codes of a step, the distance between two.
    """
    users = _users(attention)
    if _kinds(users) == ["Convert"]:  # of bfloat16
        users = _users(users[0])
    if _kinds(users) == ["FakeQuantize"] and _kinds(codes := _users(users[0])) == ["Convert"]:
        least: Any = users[0].input_value(1).get_node()
        codes[0].output(0).replace(attention.with_codes(float(least.get_data().flat[0]) / -128).output(0))


def join_rounding(graph: ov.Model) -> None:
    """Let the rest be rounded to 8 bits by the node that makes it, or by one that takes bfloat16.

    OpenVINO's own node of rounding takes float32, for which another must widen, but it becomes part of an elementwise
    node that comes before it: here one that cuts off what is beyond the largest code.
    """
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "FakeQuantize":
            node.input(0).replace_source_output(minimum(node.input_value(0), node.input_value(2)).output(0))


def keep_residuals(graph: ov.Model) -> None:
    """Keep OpenVINO from moving scales through the sums of the residual stream, which takes a node more for each layer.

    It doesn't move them through a conversion; one to bfloat16 and back is none in a graph that computes in bfloat16.
    """
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "Add" and node.get_friendly_name().endswith("_residual"):
            narrow = convert(node.input_value(1), "bf16")
            node.input(1).replace_source_output(convert(narrow, "f32").output(0))


def _kinds(nodes: list[ov.Node]) -> list[str]:
    return [node.get_type_name() for node in nodes]


def _users(node: ov.Node) -> list[ov.Node]:
    return [target.get_node() for target in node.output(0).get_target_inputs()]
