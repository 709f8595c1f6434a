"""An exported graph compiled by OpenVINO, its PagedAttention nodes handed to the pages of a runner."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import proxy

import numpy as np
import openvino as ov
from openvino.frontend import FrontEndManager
from openvino.frontend.onnx import ConversionExtension
from openvino.opset13 import concat, constant, convert
from openvino.opset13 import slice as slice_of
from openvino.passes import ConstantFolding, Manager

from contbatch.errors import ModelFileError, RunnerError
from contbatch.model import ModelConfig
from contbatch.runners.cpu_pages import CPUPages
from contbatch.runners.cpu_rewrites import hand_over_codes, join_rounding, keep_residuals
from contbatch.runners.mapped_weights import MappedWeights

KEPT_INPUTS = ("input_ids", "logits_indices")
"""Inputs that OpenVINO sees; the others describe the step to the attention kernel alone."""
_NAMED = type("PagedAttention", (), {})()
"""Its type's name is how OpenVINO calls the operator."""
_KIND = ov.DiscreteTypeInfo("BatchNormInference", "opset5")
"""What the operator passes for. Of a kind that it doesn't know OpenVINO makes a copy in each layer of each step, to ask
that for its shape; of this one it knows that the shape is that of the first input, and nothing else."""


class _Attention(ov.Op):  # type: ignore[misc]
    """A PagedAttention node inside OpenVINO's graph: packed queries, keys and values in, attention out.

    The first input is there for its shape, (num_tokens, num_heads · head_size). The second is of `pages.qkv_type`; the
    output has a type of its own, see `plugins.paged_attention.cpu.paged_attention`.
    """

    def __init__(self, inputs: list[ov.Output] | None, pages: CPUPages, layer: int, kind: ov.Type) -> None:
        self._pages, self._layer, self._kind = pages, layer, kind
        # OpenVINO would have `self` here and hold it for ever, in a cycle that no garbage collector sees: weights and
        # pages would never be freed. So the model holds the nodes, and these know the pages by a weak proxy.
        super().__init__(_NAMED, inputs)
        pages.nodes.append(self)

    def get_type_info(self) -> ov.DiscreteTypeInfo:
        return _KIND

    def validate_and_infer_types(self) -> None:
        self.set_output_type(0, self._kind, self.get_input_partial_shape(0))

    def clone_with_new_inputs(self, new_inputs: list[ov.Output]) -> ov.Op:
        return _Attention(new_inputs, self._pages, self._layer, self._kind)

    def with_codes(self, step: float) -> ov.Op:
        """Return a node like this whose output is int8 codes."""
        self._pages.steps[self._layer] = step
        return _Attention([self.input_value(i) for i in range(2)], self._pages, self._layer, ov.Type.i8)

    def has_evaluate(self) -> bool:
        return True

    def visit_attributes(self, _visitor: Any) -> bool:
        return True

    def evaluate(self, outputs: list[ov.Tensor], inputs: list[ov.Tensor]) -> bool:
        # Nothing is raised or refused: OpenVINO would leave the nodes behind in a state of their own, or not tell.
        pages = self._pages
        try:
            if pages.error is None:
                pages.attend(self._layer, inputs[1].data, outputs[0].data)
                if pages.between_layers is not None:
                    pages.between_layers()
        except BaseException as error:
            pages.error = error
        pages.layers_done += 1
        return True


def compiled(
    path: str, config: ModelConfig, pages: CPUPages, precision: str, num_threads: int | None, observed: Sequence[str]
) -> tuple[ov.InferRequest, MappedWeights]:
    """Compile the graph with its attention nodes working on `pages`; the caches are no inputs any more.

    Raises `ModelFileError` where OpenVINO can't read it. See `contbatch.runners.cpu.CPUModel` for the arguments.
    """
    # Of a graph that computes in bfloat16 attention takes and gives just that. On a CPU without it nothing does.
    bfloat16 = precision != "f32" and "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if bfloat16:
        pages.qkv_type = np.dtype(np.uint16)
    graph = _read(path, config, pages, bfloat16)
    weights = MappedWeights(Path(f"{path}.data"), graph)
    for result in graph.get_results()[1:]:  # the first is the logits
        graph.remove_result(result)
    for parameter in graph.get_parameters():
        if not parameter.output(0).names & set(KEPT_INPUTS):
            graph.remove_parameter(parameter)
    if observed:
        graph.add_outputs(list(observed))
    if precision == "w8a8":
        for node in list(pages.nodes):
            hand_over_codes(node)
        if bfloat16:
            join_rounding(graph)
            keep_residuals(graph)
    if precision == "bf16":
        # Widened now: OpenVINO's kernels for packed weights are slower in bf16 from about 8 tokens on.
        folding = Manager()
        folding.register_pass(ConstantFolding())
        folding.run_passes(graph)
    options: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32" if precision == "f32" else "bf16",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",  # else activations become int8 wherever weights are packed
    }
    if num_threads is not None:
        options["INFERENCE_NUM_THREADS"] = num_threads
    request = core().compile_model(graph, "CPU", options).create_infer_request()
    weights.release()
    return request, weights


def _read(path: str, config: ModelConfig, pages: CPUPages, bfloat16: bool) -> ov.Model:
    """Read a graph, with nodes of attention that take and give bfloat16, or float32."""
    layers, shared, shapes = iter(range(config.num_layers)), proxy(pages), list[ov.Output]()
    width = config.num_heads * config.head_size

    def attention(node: Any) -> list[ov.Output]:
        packed = node.get_input(0)
        if config.qk_norm:
            packed = concat([node.get_input(i) for i in range(3)], axis=1).output(0)
        if bfloat16:
            packed = convert(packed, "bf16").output(0)
        if not shapes:  # the same in all layers
            shapes.append(slice_of(packed, *(constant([i]) for i in (0, width, 1, 1))).output(0))
        output = _Attention([*shapes, packed], shared, next(layers), ov.Type.bf16 if bfloat16 else ov.Type.f32)
        caches = node.get_input(3), node.get_input(4)
        return [(convert(output, "f32") if bfloat16 else output).output(0), *caches]

    frontend = FrontEndManager().load_by_framework("onnx")
    frontend.add_extension(ConversionExtension("PagedAttention", "com.microsoft", attention))
    try:
        return frontend.convert(frontend.load(path))
    except Exception as error:  # of OpenVINO, some of which are RuntimeErrors
        raise ModelFileError(f"{path}: OpenVINO can't read it or its weights: {error}") from None


def core() -> ov.Core:
    """Return the process's, which is never freed; `RunnerError` in a child forked from a process that had one.

    Each installs a stack for signal handlers and puts back the one before it when it goes. With two, that may be gone
    as well, and the next Ctrl-C is a segmentation fault.
    """
    core, process = _core()
    if process != os.getpid():  # it hands work to threads that models of the parent left behind, and waits for ever
        raise RunnerError("process was forked from one that used OpenVINO: start it with multiprocessing's 'spawn'")
    return core


@functools.cache
def _core() -> tuple[ov.Core, int]:
    return ov.Core(), os.getpid()
