"""The op in TensorRT: quickly deployable plugins; their kernels are compiled ahead of time and launched by the engine.

`register` makes three ops known, in the namespace (ONNX domain) "contbatch":

- PagedAttention: the op of README.md with a packed query, so without inputs 1 and 2, and always with rotary tables.
- PagedAttentionSplit: the same for few long sequences, with one more attribute, num_splits. It returns partial
  outputs, float32 (num_splits, num_tokens, num_heads, head_size), and their log2 weights (num_splits, num_tokens,
  num_heads).
- PagedAttentionCombine: those two to (num_tokens, num_heads · head_size); its attribute `to` is the type, as in Cast.

Both caches come back as outputs that alias the inputs: the same addresses must be bound to them. Page size, head size
and width of the rotary tables must be known when the engine is built. An ONNX node must carry every attribute: TensorRT
passes them by position. Nothing of this has run on a GPU.
"""
# ruff: noqa: ARG001 - TensorRT checks names and order of the arguments

from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp
from tensorrt.plugin import AutoTuneCombination, KernelLaunchParams, SymExprs
from tensorrt.plugin import TensorDesc as Tensor

from contbatch.errors import KernelBuildError, UnsupportedModelError
from contbatch.plugins.paged_attention.ptx import Kernel, compile_attention, compile_combine
from contbatch.plugins.paged_attention.variant import Variant, default_tactics

NAMESPACE = "contbatch"
TYPES = {trt.float16: ("float16", "FP16"), trt.bfloat16: ("bfloat16", "BF16")}
"""TensorRT's types, with the names that kernels and format strings have for them."""
ONNX_TYPES = {10: trt.float16, 16: trt.bfloat16}
"""Values of the attribute `to`: onnx.TensorProto.FLOAT16 and BFLOAT16."""
Implementation = tuple[str | bytes, str | bytes, KernelLaunchParams, SymExprs]
_targets: list[int] = []
"""The architecture to compile for: TensorRT tells the functions below nothing of the GPU it builds for."""


def register(sm: int) -> None:
    """Make the ops known to TensorRT, with kernels for GPUs of compute capability `sm`, such as 90; once per process.

    Raises `KernelBuildError` if they are registered already, for another architecture.
    """
    if _targets:
        if _targets != [sm]:
            raise KernelBuildError(
                f"the plugins are registered for SM {_targets[0]}, a process builds for one; got {sm}"
            )
        return
    for name, describe, tune, implement in OPS:
        plugin = f"{NAMESPACE}::{name}"
        trtp.register(plugin)(describe)
        trtp.autotune(plugin)(tune)
        trtp.aot_impl(plugin)(implement)
    _targets.append(sm)


# fmt: off
def _describe(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, cumulative_sequence_length: Tensor, past_seqlens: Tensor,
    block_table: Tensor, cos_cache: Tensor, sin_cache: Tensor, num_heads: int, kv_num_heads: int, scale: float,
    softcap: float, local_window_size: int, do_rotary: int, rotary_interleaved: int,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = key_cache.shape_expr[3] * num_heads
    output = trtp.from_shape_expr((query.shape_expr[0], columns), dtype=query.dtype)
    return output, key_cache.aliased(), value_cache.aliased()


def _describe_split(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, cumulative_sequence_length: Tensor, past_seqlens: Tensor,
    block_table: Tensor, cos_cache: Tensor, sin_cache: Tensor, num_heads: int, kv_num_heads: int, scale: float,
    softcap: float, local_window_size: int, do_rotary: int, rotary_interleaved: int, num_splits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = num_splits, query.shape_expr[0], num_heads
    partial = trtp.from_shape_expr((*rows, key_cache.shape_expr[3]), dtype=trt.float32)
    lse = trtp.from_shape_expr(rows, dtype=trt.float32)
    return partial, lse, key_cache.aliased(), value_cache.aliased()


def _tune(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, cumulative_sequence_length: Tensor, past_seqlens: Tensor,
    block_table: Tensor, cos_cache: Tensor, sin_cache: Tensor, outputs: tuple[Tensor],
) -> list[AutoTuneCombination]:
    activation = _type_of(query)[1]
    others = "FP32" if len(outputs) == 4 else activation
    types = [activation] * 3 + ["INT32"] * 3 + [activation] * 2 + [others] * (len(outputs) - 2) + [activation] * 2
    tactics = default_tactics(_constant(key_cache, "key_cache", 3))
    return [AutoTuneCombination(", ".join(types), "LINEAR", list(tactics))]


def _implement(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, cumulative_sequence_length: Tensor, past_seqlens: Tensor,
    block_table: Tensor, cos_cache: Tensor, sin_cache: Tensor, num_heads: int, kv_num_heads: int, scale: float,
    softcap: float, local_window_size: int, do_rotary: int, rotary_interleaved: int,
    outputs: tuple[Tensor], tactic: int,
) -> Implementation:
    attributes = num_heads, kv_num_heads, scale, softcap, local_window_size, do_rotary, rotary_interleaved
    return _attention(query, key_cache, past_seqlens, block_table, cos_cache, attributes, 1, tactic)


def _implement_split(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, cumulative_sequence_length: Tensor, past_seqlens: Tensor,
    block_table: Tensor, cos_cache: Tensor, sin_cache: Tensor, num_heads: int, kv_num_heads: int, scale: float,
    softcap: float, local_window_size: int, do_rotary: int, rotary_interleaved: int, num_splits: int,
    outputs: tuple[Tensor], tactic: int,
) -> Implementation:
    attributes = num_heads, kv_num_heads, scale, softcap, local_window_size, do_rotary, rotary_interleaved
    return _attention(query, key_cache, past_seqlens, block_table, cos_cache, attributes, num_splits, tactic)
# fmt: on


def _attention(
    query: Tensor,
    key_cache: Tensor,
    past_seqlens: Tensor,
    block_table: Tensor,
    cos_cache: Tensor,
    attributes: tuple[Any, ...],
    num_splits: int,
    tactic: int,
) -> Implementation:
    num_heads, kv_num_heads, scale, softcap, local_window_size, do_rotary, rotary_interleaved = attributes
    if not do_rotary:
        raise UnsupportedModelError(
            "contbatch::PagedAttention without do_rotary = 1: every input is needed, tables too"
        )
    head_size = _constant(key_cache, "key_cache", 3)
    variant = Variant(
        dtype=_type_of(query)[0],
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        head_size=head_size,
        page_size=_constant(key_cache, "key_cache", 1),
        tactic=default_tactics(head_size)[tactic],
        scale=scale,
        softcap=softcap,
        local_window_size=local_window_size,
        rotary_dim=2 * _constant(cos_cache, "cos_cache", 1),
        rotary_interleaved=bool(rotary_interleaved),
        num_splits=num_splits,
    )
    num_tokens, num_seqs = query.shape_expr[0], past_seqlens.shape_expr[0]
    dimensions = num_tokens, num_seqs, key_cache.shape_expr[0], block_table.shape_expr[1], cos_cache.shape_expr[0]
    kernel = compile_attention(variant, _targets[0])
    launch = KernelLaunchParams(
        grid_x=trtp.SymInt32(num_tokens // variant.block_tokens + num_seqs + 1),
        grid_y=kv_num_heads * variant.parts,
        grid_z=num_splits,
    )
    return _implementation(kernel, launch, *dimensions)


def _describe_combine(partial: Tensor, lse: Tensor, to: int) -> tuple[Tensor]:
    if to not in ONNX_TYPES:
        raise UnsupportedModelError(
            f"contbatch::PagedAttentionCombine: `to` must be one of {list(ONNX_TYPES)}, got {to}"
        )
    columns = partial.shape_expr[2] * partial.shape_expr[3]
    return (trtp.from_shape_expr((partial.shape_expr[1], columns), dtype=ONNX_TYPES[to]),)


def _tune_combine(partial: Tensor, lse: Tensor, outputs: tuple[Tensor]) -> list[AutoTuneCombination]:
    return [AutoTuneCombination(f"FP32, FP32, {_type_of(outputs[0])[1]}", "LINEAR", [1])]


def _implement_combine(partial: Tensor, lse: Tensor, to: int, outputs: tuple[Tensor], tactic: int) -> Implementation:
    num_splits, head_size = (_constant(partial, "partial", axis) for axis in (0, 3))
    kernel = compile_combine(_type_of(outputs[0])[0], head_size, num_splits, _targets[0])
    num_rows = partial.shape_expr[1] * partial.shape_expr[2]
    return _implementation(kernel, KernelLaunchParams(grid_x=trtp.SymInt32(num_rows)), num_rows)


def _implementation(kernel: Kernel, launch: KernelLaunchParams, *scalars: Any) -> Implementation:
    """Return what TensorRT wants of an implementation; the scalars stand between inputs and outputs."""
    launch.block_x, launch.shared_mem = kernel.num_threads, kernel.shared_memory
    return kernel.name, kernel.ptx, launch, trtp.SymIntExprs.from_tuple([trtp.SymInt32(s) for s in scalars])


def _type_of(tensor: Tensor) -> tuple[str, str]:
    if tensor.dtype not in TYPES:
        raise UnsupportedModelError(f"the GPU kernel takes float16 or bfloat16, got {tensor.dtype}")
    return TYPES[tensor.dtype]


def _constant(tensor: Tensor, name: str, axis: int) -> int:
    """Return a dimension that the kernel is compiled for."""
    dimension = tensor.shape_expr[axis]
    if not dimension.is_constant:
        raise UnsupportedModelError(f"dimension {axis} of {name} must be known when the engine is built, it is dynamic")
    return int(dimension.constant_value())


OPS = (
    ("PagedAttention", _describe, _tune, _implement),
    ("PagedAttentionSplit", _describe_split, _tune, _implement_split),
    ("PagedAttentionCombine", _describe_combine, _tune_combine, _implement_combine),
)
"""Of each op the name, and the functions that describe it, list its tactics and return its kernel."""
