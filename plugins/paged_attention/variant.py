"""What the GPU kernel is compiled for: shapes, attributes and tile sizes. No compiler is needed to describe one."""

import hashlib
from dataclasses import dataclass

from contbatch.errors import RunnerError, UnsupportedModelError
from contbatch.plugins.paged_attention.contract import require_attributes

HEAD_SIZES = (64, 80, 96, 128, 256)
DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
"""Types of query and caches, and Triton's names for them."""


@dataclass(frozen=True, slots=True)
class Tactic:
    """One way to cut the same work into tiles; a builder times them and keeps the fastest."""

    block_rows: int
    """Query rows (tokens × heads of a group) of a program: a power of two, at least 16, as tensor cores want."""
    block_keys: int
    """Positions per iteration: a power of two."""
    num_warps: int
    num_stages: int


TACTICS = {
    64: {1: Tactic(16, 32, 4, 2), 2: Tactic(64, 64, 4, 1)},
    128: {1: Tactic(16, 32, 4, 1), 2: Tactic(64, 32, 8, 1)},
    256: {1: Tactic(16, 32, 4, 1), 2: Tactic(32, 32, 8, 1)},
}
"""By padded head size and number: 1 is meant for decoding, 2 for prompts. Chosen to spill no registers and to fit in
48 KiB of shared memory, see docs/tensorrt.md; which is faster where has never been measured."""


def default_tactics(head_size: int) -> dict[int, Tactic]:
    """Return the tactics of a head size by number; one without a kernel raises `UnsupportedModelError`."""
    if head_size not in HEAD_SIZES:
        raise UnsupportedModelError(f"the GPU kernel takes head sizes {HEAD_SIZES}, got {head_size}")
    return TACTICS[power_of_two(head_size)]


def power_of_two(at_least: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (at_least - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Variant:
    """Everything the kernel knows at compile time; lengths, pages and sequences are arguments of each launch.

    Raises
    ------
    RunnerError
        Attributes outside the op's limits, see `contract.require_attributes`.
    UnsupportedModelError
        A dtype, head size, page size or rotary dimension the kernel has no code for.
    """

    dtype: str
    num_heads: int
    kv_num_heads: int
    head_size: int
    page_size: int
    tactic: Tactic
    scale: float = 0.0
    softcap: float = 0.0
    local_window_size: int = -1
    rotary_dim: int = 0
    """Dimensions that are rotated, the first ones of each head; 0: none, and no rotary tables among the arguments."""
    rotary_interleaved: bool = False
    packed: bool = True
    """Query, key and value side by side in one input, the key and value inputs absent."""
    num_splits: int = 1
    """Programs that share one sequence's pages; more than 1: outputs are partial, see `triton_kernel.combine`."""

    def __post_init__(self) -> None:
        require_attributes(self.num_heads, self.kv_num_heads, self.scale, self.softcap, self.local_window_size)
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(f"the GPU kernel takes {' or '.join(DTYPES)}, got dtype {self.dtype!r}")
        default_tactics(self.head_size)
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_size:
            limit = f"an even number in 0..head_size {self.head_size}"
            raise UnsupportedModelError(f"rotary_dim must be {limit}, got {self.rotary_dim}")
        if self.page_size < 1 or self.num_splits < 1:
            raise RunnerError(f"page_size and num_splits must be ≥ 1, got {self.page_size} and {self.num_splits}")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.kv_num_heads

    @property
    def block_heads(self) -> int:
        """Query heads of a program; a larger group is shared out among `parts` programs."""
        return min(self.group, self.tactic.block_rows)

    @property
    def parts(self) -> int:
        """Programs that share the query heads of one KV head."""
        return -(-self.group // self.block_heads)

    @property
    def block_tokens(self) -> int:
        """Tokens of a program: rows that do not make a whole token, as with 3 heads in 16 rows, stay idle."""
        return self.tactic.block_rows // self.block_heads

    @property
    def block_tokens_padded(self) -> int:
        """`block_tokens` as a vector's length, a power of two."""
        return power_of_two(self.block_tokens)

    @property
    def head_size_padded(self) -> int:
        """`head_size` as a vector's length, a power of two; the excess is masked and counts as zero."""
        return power_of_two(self.head_size)

    @property
    def query_stride(self) -> int:
        """Elements from a token's query to the next one's."""
        return (self.num_heads + 2 * self.kv_num_heads * self.packed) * self.head_size

    @property
    def kv_stride(self) -> int:
        """Elements from a token's new key to the next one's."""
        return self.query_stride if self.packed else self.kv_num_heads * self.head_size

    @property
    def multiplier(self) -> float:
        """What multiplies q·k."""
        return self.scale or self.head_size**-0.5

    def mangle(self) -> str:
        """Return the part of a compiled function's name that tells variants apart (Triton asks for it)."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]
