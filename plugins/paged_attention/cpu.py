"""The op on numpy pages in place, a layer at a time: `plan_step`, then `paged_attention`, which checks its arrays.

A runner, whose arrays are as they should be, takes a `Team` for all layers of a step.
"""

import math

import numpy as np

from contbatch.errors import RunnerError
from contbatch.plugins.paged_attention.contract import require_array, require_scales
from contbatch.plugins.paged_attention.step_plan import StepPlan
from contbatch.plugins.paged_attention.team import NO_SCALES, Team

FLOAT32, BFLOAT16_BITS, INT8 = np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.int8)


def paged_attention(
    plan: StepPlan,
    qkv: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    output: np.ndarray,
    key_scales: np.ndarray | None = None,
    value_scales: np.ndarray | None = None,
    output_step: float = 0.0,
) -> None:
    """One layer: store this step's K/V in its pages, then fill `output`; safe to call from several threads at once.

    Parameters
    ----------
    plan : StepPlan
    qkv : array
        (num_rows, (num_heads + 2·kv_num_heads)·head_size): float32, or uint16 holding bfloat16.
    key_cache, value_cache : array
        `plan.pages_shape`, updated in place: float32, uint16 holding bfloat16, or int8.
    output : array
        (num_rows, num_heads·head_size), overwritten; rows of padding become zero. float32, uint16 holding bfloat16, or
        int8 codes as of ONNX's QuantizeLinear: to nearest, half to even, in -128..127.
    key_scales, value_scales : float32 array
        (num_pages, page_size, kv_num_heads), with int8 caches only and updated as they are, see `int8.quantize`.
    output_step : float
        Distance between two codes, > 0, for an output of int8.

    Raises
    ------
    RunnerError
        For a wrong shape, dtype, memory layout or step; nothing is written then.
    """
    _, _, kv_num_heads, head_size = plan.pages_shape
    require_array("qkv", qkv, (plan.num_rows, (plan.num_heads + 2 * kv_num_heads) * head_size), FLOAT32, BFLOAT16_BITS)
    require_array("output", output, (plan.num_rows, plan.num_heads * head_size), FLOAT32, BFLOAT16_BITS, INT8)
    if output.dtype == INT8 and not (output_step > 0 and math.isfinite(output_step)):
        raise RunnerError(f"PagedAttention: output_step must be a finite number > 0, got {output_step}")
    require_array("key_cache", key_cache, plan.pages_shape, FLOAT32, BFLOAT16_BITS, INT8)
    require_array("value_cache", value_cache, plan.pages_shape, key_cache.dtype)
    scales = require_scales(key_cache, key_scales, value_scales)
    key_scales, value_scales = scales or (NO_SCALES, NO_SCALES)
    arrays = {"qkv": qkv, "key_cache": key_cache, "value_cache": value_cache, "output": output}
    for name, array in (arrays | {"key_scales": key_scales, "value_scales": value_scales}).items():
        if not array.flags.carray:
            raise RunnerError(f"PagedAttention: {name} must be C-contiguous and writable, got strides {array.strides}")
    layers = key_cache[None], value_cache[None], key_scales[None], value_scales[None]
    with Team(plan, layers, qkv.dtype, np.array([output_step], np.float32)) as team:
        team.attend(0, qkv, output)
