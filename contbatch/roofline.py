"""A cost model from first principles: arithmetic and bytes against what the hardware can do (Williams et al. 2009)."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from contbatch.checks import (
    is_int,
    is_one_of,
    is_real,
    python_number,
    replaced,
    require,
    require_seconds,
    take_python_numbers,
)
from contbatch.cost import SecondsOf
from contbatch.errors import CostModelError
from contbatch.hardware import DTYPE_BYTES, Hardware, hardware
from contbatch.model import ModelConfig
from contbatch.model_shape import ModelShape, model_shape
from contbatch.step_shape import StepShape

_require = partial(require, error=CostModelError)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a step on `tensor_parallel` equal devices, each holding its share of every layer.

    Each part of a step takes the longer of its arithmetic and its bytes; the parts follow one another:

    - linear layers: 2 FLOPs per weight and token; the weights are read once per step;
    - last layer: the same, for the rows that need logits; nothing if there are none;
    - decode attention: 4·layers·heads·head_size FLOPs and the bytes of the keys and values per position read;
    - prefill attention: the same FLOPs per pair of a query and a position; each sequence's keys and values read once;
    - tensor parallelism: two all-reduces a layer (Shoeybi et al. 2019) of the hidden states, as rings: 2(t - 1)/t of
      the bytes over the link, and a latency each.

    Left out: activations' bytes, norms, sampling, quantisation. The efficiencies and overheads are assumptions, round
    numbers, not fitted to anything: set all to 1 and 0 for the limits of the hardware.

    Parameters
    ----------
    gpu : str or Hardware
    model : str, ModelShape or ModelConfig
    dtype : str
        Of weights and arithmetic, a key of `hardware.DTYPE_BYTES`; the keys and values have 16 bits if it has 8.
    tensor_parallel : int
        Devices; must divide the heads, and the KV heads, or be a multiple of these (which are then copied).
    compute_efficiency, memory_efficiency, link_efficiency : float
        Share of the peak that is reached, in (0, 1].
    step_overhead_s : float
        Of launching a step.
    all_reduce_latency_s : float
        Of each all-reduce.
    """

    gpu: str | Hardware
    model: str | ModelShape | ModelConfig
    dtype: str = "f16"
    tensor_parallel: int = 1
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    step_overhead_s: float = 1e-3
    all_reduce_latency_s: float = 10e-6
    _terms: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        take_python_numbers(self)
        gpu, shape, split = hardware(self.gpu), model_shape(self.model), self.tensor_parallel
        known = is_one_of(self.dtype, gpu.peak_flops)
        _require(known, f"dtype on {gpu.name}", self.dtype, f"one of {', '.join(gpu.peak_flops)}")
        _require(is_int(split, 1), "tensor_parallel", split, "an integer ≥ 1")
        heads, kv_heads = shape.num_heads, shape.kv_num_heads
        fits = heads % split == 0 and (kv_heads % split == 0 or split % kv_heads == 0)
        _require(fits, "tensor_parallel", split, f"one that splits {heads} heads and {kv_heads} KV heads evenly")
        for name in ("compute_efficiency", "memory_efficiency", "link_efficiency"):
            value = getattr(self, name)
            _require(is_real(value) and 0 < value <= 1, name, value, "in (0, 1]")
        overheads = {"step_overhead_s": self.step_overhead_s, "all_reduce_latency_s": self.all_reduce_latency_s}
        require_seconds(CostModelError, **overheads)
        object.__setattr__(self, "_terms", self._seconds_per_unit(gpu, shape))

    def _seconds_per_unit(self, gpu: Hardware, shape: ModelShape) -> tuple[float, ...]:
        """Compute what a step's sums are multiplied with: see `seconds`."""
        split, number = self.tensor_parallel, DTYPE_BYTES[self.dtype]
        flop_s = 1 / (gpu.peak_flops[self.dtype] * self.compute_efficiency * split)
        byte_s = 1 / (gpu.memory_bytes_per_s * self.memory_efficiency)
        attention_s = 4 * shape.num_layers * shape.num_heads * shape.head_size * flop_s
        reduces = 2 * shape.num_layers if split > 1 else 0
        moved = 2 * (split - 1) / split * shape.hidden_size * max(number, 2)
        link_s = 1 / (gpu.peer_bytes_per_s * self.link_efficiency)
        return (
            self.step_overhead_s + reduces * self.all_reduce_latency_s,
            reduces * moved * link_s,
            2 * shape.linear_params * flop_s,
            shape.linear_params * number / split * byte_s,
            2 * shape.head_params * flop_s,
            shape.head_params * number / split * byte_s,
            attention_s,
            self.kv_bytes_per_token * byte_s,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that a token leaves on each device."""
        shape = model_shape(self.model)
        whole = shape.kv_bytes_per_token(max(DTYPE_BYTES[self.dtype], 2))
        return whole // min(self.tensor_parallel, shape.kv_num_heads)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each device."""
        return -(-model_shape(self.model).num_params * DTYPE_BYTES[self.dtype] // self.tensor_parallel)

    def kv_capacity(self, memory_utilization: float = 0.9) -> int:
        """Tokens whose keys and values fit beside the weights in a share of the memory (0.9 is vLLM's default).

        Activations are taken to fit in the rest. `CostModelError` if the weights alone do not fit.
        """
        share = python_number(memory_utilization)
        _require(is_real(share) and 0 < share <= 1, "memory_utilization", share, "in (0, 1]")
        gpu = hardware(self.gpu)
        usable = int(gpu.memory_bytes * share)
        if (tokens := (usable - self.weight_bytes) // self.kv_bytes_per_token) < 1:
            raise CostModelError(
                f"{self.weight_bytes / 1e9:.1f} GB of weights on each of {self.tensor_parallel} device(s) leave no "
                f"room for keys and values in {usable / 1e9:.1f} GB, {share:.0%} of {gpu.name}"
            )
        return tokens

    def seconds(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes; 0 for an empty one."""
        tokens, _, logits, decode_context, prefill_context, pairs, _ = shape
        if not tokens:
            return 0.0
        fixed, reduced, linear, weights, head, head_weights, attention, kv = self._terms
        return (
            fixed
            + reduced * tokens
            + max(linear * tokens, weights)
            + (max(head * logits, head_weights) if logits else 0.0)
            + decode_context * max(attention, kv)
            + max(attention * pairs, kv * prefill_context)
        )

    def seconds_by_context(self, shape: StepShape) -> SecondsOf:
        """Seconds as a function of `decode_context`: see `cost.seconds_by_context`."""
        if not shape.num_tokens or shape.prefill_context:
            return partial(map, lambda context: self.seconds(shape._replace(decode_context=context)))
        *_, attention, kv = self._terms
        before, each = self.seconds(StepShape(*shape[:3], 0, 0, 0)), max(attention, kv)
        return lambda contexts: map(before.__add__, map(each.__mul__, contexts))  # before + context · each, but in C

    def swap_seconds(self, num_pages: int, page_size: int) -> float:
        """Seconds to move pages between the devices and the host, each over a link of its own."""
        link = hardware(self.gpu).host_bytes_per_s * self.link_efficiency
        return num_pages * page_size * self.kv_bytes_per_token / link

    def replace(self, **changes: Any) -> "Roofline":
        """Return a copy with some fields changed; an unknown field raises `CostModelError`."""
        return replaced(self, changes, CostModelError)
