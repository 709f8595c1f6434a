"""How large a step may be that a TensorRT engine is built for, and the ranges of shapes that follow from it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from contbatch.checks import require_counts, take_python_numbers
from contbatch.model import ModelConfig

Shape = tuple[int, ...]
Range = tuple[Shape, Shape, Shape]
"""Smallest, most likely and largest shape of an input: TensorRT tunes for the second and takes whatever is between."""
TUNED_PAGES = 1024
"""Pages that the builder allocates for timing: how many there are makes no difference to the kernel."""

MOST_ELEMENTS = 2**31 - 1
"""Of a tensor. NVIDIA's answer in TensorRT's issue 1948; later versions lift it in part (issue 4408)."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The scheduler's limits, and those of its page pool; all integers ≥ 1, else `InvalidRequestError`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    page_size: int

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_counts(**asdict(self))

    def profiles(self, config: ModelConfig) -> dict[str, dict[str, Range]]:
        """Return the ranges of all inputs, for steps of decoding alone and for steps that hold prompts as well.

        A step of at most one token per seat takes the first. There are never zero rows of logits, and never more than
        tokens: whoever runs the engine sees to that. Sequences have no more pages than the model has positions.
        """
        seats, tokens = self.max_num_seqs, max(self.max_num_batched_tokens, self.max_num_seqs)
        width = min(-(-config.max_position // self.page_size), self.num_pages)
        return {
            "decode": self._ranges(config, seats, seats, seats, width),
            "prompts": self._ranges(config, tokens, seats, tokens, width),
        }

    def _ranges(self, config: ModelConfig, tokens: int, seats: int, logits: int, width: int) -> dict[str, Range]:
        page = self.page_size, config.kv_num_heads, config.head_size
        cache = (1, *page), (min(self.num_pages, TUNED_PAGES), *page), (self.num_pages, *page)
        likely_logits = min(logits, seats)
        ranges: dict[str, Range] = {
            "input_ids": ((1,), (tokens,), (tokens,)),
            "cumulative_sequence_length": ((2,), (seats + 1,), (seats + 1,)),
            "past_seqlens": ((1,), (seats,), (seats,)),
            "block_table": ((1, 1), (seats, -(-width // 2)), (seats, width)),
            "logits_indices": ((1,), (likely_logits,), (logits,)),
        }
        for layer in range(config.num_layers):
            ranges |= {f"{name}_cache.{layer}": cache for name in ("key", "value")}
        return ranges


def pages_within(num_bytes: int, config: ModelConfig, page_size: int, itemsize: int = 2) -> int:
    """Return how many pages, of all layers, so many bytes hold, as far as TensorRT takes a cache of that size."""
    elements = page_size * config.kv_num_heads * config.head_size
    return min(num_bytes // (2 * config.num_layers * elements * itemsize), MOST_ELEMENTS // elements)


def buckets(largest: int) -> list[int]:
    """Return the sizes that steps are padded to, ascending: the powers of two below `largest`, and `largest`."""
    return [2**i for i in range((largest - 1).bit_length())] + [largest]


def fitting(profiles: Mapping[str, Mapping[str, Range]], shapes: Mapping[str, Shape]) -> str | None:
    """Return the first profile that takes these shapes of inputs, None if none does."""
    for name, ranges in profiles.items():
        if all(_within(shape, ranges[tensor]) for tensor, shape in shapes.items()):
            return name
    return None


def _within(shape: Shape, limits: Range) -> bool:
    low, _, high = limits
    return len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
