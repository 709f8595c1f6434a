"""An exported model on the CPU: OpenVINO runs the graph, a Numba kernel on numpy pages runs its PagedAttention nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino.frontend.onnx import ConversionExtension
from openvino.opset13 import concat

from contbatch.errors import InvalidRequestError, RunnerError
from contbatch.export import read_config
from contbatch.graph import rotary_tables

PRECISIONS = {"f32": np.float32, "bf16": np.uint16}
"""Type of a page's elements: bfloat16 is stored as its 16 bits."""
KEPT_INPUTS = ("input_ids", "logits_indices")


class _Pages:
    """Keys and values of all layers, and the step that is being computed: what the graph's attention nodes share."""

    def __init__(self, config, shape: tuple[int, ...], precision: str) -> None:
        self.key_caches, self.value_caches = (np.zeros(shape, PRECISIONS[precision]) for _ in range(2))
        self.config = config
        self.cos, self.sin = (np.float32(t) for t in rotary_tables(config))
        self.step = None
        self.error: BaseException | None = None

    def attend(self, layer: int, qkv, output) -> None:
        from contbatch.plugins.paged_attention.reference import paged_attention

        c = self.config
        o, k, v = paged_attention(
            qkv,
            None,
            None,
            self.key_caches[layer],
            self.value_caches[layer],
            *self.step,
            self.cos,
            self.sin,
            num_heads=c.num_heads,
            kv_num_heads=c.kv_num_heads,
            do_rotary=1,
        )
        output[:] = o
        self.key_caches[layer] = k
        self.value_caches[layer] = v


class _Attention(ov.Op):
    """A PagedAttention node inside OpenVINO's graph: packed queries, keys and values in, attention out."""

    def __init__(self, inputs: list[ov.Output] | None, pages: _Pages, layer: int, size: int) -> None:
        self._pages, self._layer, self._size = pages, layer, size
        super().__init__(self, inputs)

    def validate_and_infer_types(self) -> None:
        shape = ov.PartialShape([self.get_input_partial_shape(0)[0], self._size])
        self.set_output_type(0, ov.Type.f32, shape)

    def clone_with_new_inputs(self, new_inputs: list[ov.Output]) -> _Attention:
        return _Attention(new_inputs, self._pages, self._layer, self._size)

    def has_evaluate(self) -> bool:
        return True

    def visit_attributes(self, visitor: Any) -> bool:
        return True

    def evaluate(self, outputs: list[ov.Tensor], inputs: list[ov.Tensor]) -> bool:
        try:
            qkv = inputs[0].data
            outputs[0].shape = [len(qkv), self._size]
            self._pages.attend(self._layer, qkv, outputs[0].data)
        except BaseException as error:  # OpenVINO would turn an interrupt into an error of its own
            self._pages.error = error
            return False
        return True


def _read(path: str, pages: _Pages) -> ov.Model:
    """Read the graph; its attention nodes work on `pages`, so the caches are no inputs and outputs any more."""
    layers = iter(range(pages.config.num_layers))

    def convert(node: ov.frontend.NodeContext) -> list[ov.Output]:
        packed = node.get_input(0)
        if pages.config.qk_norm:
            packed = concat([node.get_input(i) for i in range(3)], axis=1).output(0)
        size = pages.config.num_heads * pages.config.head_size
        attention = _Attention([packed], pages, next(layers), size)
        return [attention.output(0), node.get_input(3), node.get_input(4)]

    core = ov.Core()
    core.add_extension(ConversionExtension("PagedAttention", "com.microsoft", convert))
    graph = core.read_model(path)
    for result in graph.get_results()[1:]:
        graph.remove_result(result)
    for parameter in graph.get_parameters():
        if not parameter.output(0).names & set(KEPT_INPUTS):
            graph.remove_parameter(parameter)
    return core, graph


class CPUModel:
    def __init__(
        self,
        path: str | os.PathLike[str],
        num_pages: int,
        page_size: int = 16,
        *,
        precision: str = "f32",
        num_threads: int | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise InvalidRequestError(f"precision must be 'f32' or 'bf16', got {precision!r}")
        self.config = config = read_config(path)
        self.num_pages, self.page_size = num_pages, page_size
        shape = (config.num_layers, num_pages, page_size, config.kv_num_heads, config.head_size)
        self._pages = _Pages(config, shape, precision)
        core, graph = _read(str(path), self._pages)
        options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
        if num_threads:
            options["INFERENCE_NUM_THREADS"] = num_threads
        self._request = core.compile_model(graph, "CPU", options).create_infer_request()

    def forward(self, inputs: Mapping[str, np.ndarray]) -> NDArray[np.float32]:
        if self._request is None or self._pages is None:
            raise RunnerError("forward() after close()")
        pages = self._pages
        pages.step = [inputs[n] for n in ("cumulative_sequence_length", "past_seqlens", "block_table")]
        try:
            self._request.infer({name: inputs[name] for name in KEPT_INPUTS}, share_inputs=True)
        except RuntimeError as error:
            if (cause := pages.error) is not None:
                pages.error = None
                raise cause from None
            if "KeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from None
            raise
        return self._request.get_output_tensor().data

    def close(self) -> None:
        self._request = self._pages = None
