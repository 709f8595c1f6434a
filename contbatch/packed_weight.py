"""Matrices in the 4 or 8 bits a model file stores them in: a quarter of the memory traffic, the same values."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

GROUP = 32
"""Consecutive weights of a row that share a scale, in all of GGUF's plain (not K) quantisations."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """Weights (rows, columns) as codes: weight = (code - zero) · scale.

    Blocks and their formulas: ggml's Q4_0 (d · (q - 8)), Q4_1 (d · q + m) and Q8_0 (d · q), `ggml-quants.h`.
    """

    codes: NDArray[np.int8] | NDArray[np.uint8]
    """(rows, columns / 32, 32): int8, or uint8 below 16."""
    scales: NDArray[np.float32]
    """(rows, columns / 32, 1)."""
    zeros: NDArray[np.float32] | None
    """(rows, columns / 32, 1), not rounded to integers: -m / d; None where all are 0."""

    @property
    def bits(self) -> int:
        """8 if the codes are signed, else 4."""
        return 8 if self.codes.dtype == np.int8 else 4

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.codes), self.codes.shape[1] * GROUP

    def dense(self) -> NDArray[np.float32]:
        """Return the weights, float32 (rows, columns)."""
        codes = self.codes.astype(np.float32)
        return ((codes if self.zeros is None else codes - self.zeros) * self.scales).reshape(self.shape)

    def take(self, rows: NDArray[np.integer]) -> Self:
        """Return these rows, in this order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return type(self)(self.codes[rows], self.scales[rows], zeros)


def stacked(parts: list[PackedWeight]) -> PackedWeight | None:
    """Put weights one below the other; None unless all have the same columns and kind of codes."""
    kinds = {(part.codes.dtype, part.codes.shape[1:], part.zeros is None) for part in parts}
    if len(kinds) != 1:
        return None
    zeros = None if parts[0].zeros is None else np.concatenate([part.zeros for part in parts if part.zeros is not None])
    codes = np.concatenate([part.codes for part in parts])
    return PackedWeight(codes, np.concatenate([part.scales for part in parts]), zeros)


def from_blocks(quantization: str, blocks: NDArray[np.uint8], rows: int) -> PackedWeight | None:
    """Read GGUF blocks without widening them.

    Parameters
    ----------
    quantization : str
        A GGUF type by name; None is returned for all but Q4_0, Q4_1 and Q8_0.
    blocks : ndarray
        Bytes (num_blocks, bytes of a block), those of row 0 first.
    rows : int
    """
    if quantization not in ("Q4_0", "Q4_1", "Q8_0"):
        return None
    shape = rows, len(blocks) // rows
    head = 4 if quantization == "Q4_1" else 2
    halves = np.ascontiguousarray(blocks[:, :head]).view("<f2").astype(np.float32)
    scales, body = halves[:, :1], blocks[:, head:]
    if quantization == "Q8_0":
        return PackedWeight(
            np.ascontiguousarray(body).view(np.int8).reshape(*shape, GROUP), _column(scales, shape), None
        )
    codes = np.concatenate([body & 15, body >> 4], axis=1)  # the first half of a block is in the low nibbles
    if quantization == "Q4_0":
        zeros = np.full_like(scales, 8)
    else:
        # A block of equal weights has no step: its codes, all taken as 0, are one step of size m away from zero.
        offset, flat = halves[:, 1:], scales[:, 0] == 0
        zeros = np.where(scales == 0, np.float32(-1), -offset / np.where(scales == 0, np.float32(1), scales))
        codes[flat] = 0
        scales = np.where(scales == 0, offset, scales)
    return PackedWeight(codes.reshape(*shape, GROUP), _column(scales, shape), _column(zeros, shape))


def _column(values: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, np.float32).reshape(*shape, 1)
