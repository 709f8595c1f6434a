"""What the op's inputs must satisfy; shared by the executable spec and the kernels."""

import math

import numpy as np

from contbatch.errors import RunnerError

INT32 = np.dtype(np.int32)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise RunnerError(f"PagedAttention: {message}")


def require_attributes(
    num_heads: int, kv_num_heads: int, scale: float, softcap: float, local_window_size: int, max_position: int | None
) -> None:
    """Raise `RunnerError` unless the attributes are within the op's limits; `max_position` None means no rotation."""
    _require(kv_num_heads >= 1, f"kv_num_heads must be ≥ 1, got {kv_num_heads}")
    ratio_ok = num_heads >= 1 and num_heads % kv_num_heads == 0
    _require(ratio_ok, f"num_heads must be a multiple of kv_num_heads {kv_num_heads}, got {num_heads}")
    _require(math.isfinite(scale), f"scale must be finite, got {scale}")
    _require(math.isfinite(softcap) and softcap >= 0, f"softcap must be a finite number ≥ 0, got {softcap}")
    window_ok = local_window_size == -1 or local_window_size >= 1
    _require(window_ok, f"local_window_size must be -1 (none) or ≥ 1, got {local_window_size}")
    _require(max_position is None or max_position >= 1, f"the rotary tables must have a row, got {max_position}")


def require_array(name: str, array: np.ndarray, shape: tuple[int, ...], *dtypes: np.dtype) -> None:
    """Raise `RunnerError` unless `array` has this shape and one of these dtypes."""
    _require(array.shape == shape, f"{name} must have shape {shape}, got {array.shape}")
    _require(array.dtype in dtypes, f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {array.dtype}")


def require_rotary(cos_cache: np.ndarray, sin_cache: np.ndarray, head_size: int) -> None:
    """Raise `RunnerError` unless both tables are (max_position, rotary_dim / 2) with rotary_dim ≤ head_size."""
    _require(cos_cache.ndim == 2, f"cos_cache must be (max_position, rotary_dim / 2), got shape {cos_cache.shape}")
    require_array("sin_cache", sin_cache, cos_cache.shape, cos_cache.dtype)
    rotary_dim = 2 * cos_cache.shape[1]
    _require(0 < rotary_dim <= head_size, f"rotary_dim must be in 2..head_size {head_size}, got {rotary_dim}")


def validate(
    cumulative_sequence_length: np.ndarray,
    past_seqlens: np.ndarray,
    block_table: np.ndarray,
    *,
    num_tokens: int,
    num_pages: int,
    page_size: int,
    local_window_size: int = -1,
    max_position: int | None = None,
) -> None:
    """Check one step's index arrays; what passes reads and writes inside the pool only.

    Parameters
    ----------
    cumulative_sequence_length, past_seqlens, block_table : int32 arrays
        Shapes (num_seqs + 1), (num_seqs) and (num_seqs, max_pages).
    num_tokens, num_pages, page_size : int
        Rows of the query; pages of the pool; tokens per page.
    local_window_size : int
        -1, or tokens a query sees including itself: pages wholly before every window may be unmapped.
    max_position : int, optional
        Rows of the rotary tables; None when the step is not rotated.

    Raises
    ------
    RunnerError
        Naming the value and the limit: wrong shape or dtype, lengths that are negative or decrease, more tokens than
        the query has, a position beyond the block table or the rotary tables, a page id outside the pool (or -1) where
        a token is read or written, a page written for one sequence and used in a second place.
    """
    num_seqs = past_seqlens.shape[0] if past_seqlens.ndim == 1 else 0
    require_array("past_seqlens", past_seqlens, (num_seqs,), INT32)
    require_array("cumulative_sequence_length", cumulative_sequence_length, (num_seqs + 1,), INT32)
    _require(block_table.ndim == 2, f"block_table must be (num_seqs, max_pages), got shape {block_table.shape}")
    require_array("block_table", block_table, (num_seqs, block_table.shape[1]), INT32)
    first_length, last_length = int(cumulative_sequence_length[0]), int(cumulative_sequence_length[-1])
    _require(first_length == 0, f"cumulative_sequence_length must start at 0, got {first_length}")
    new = np.diff(cumulative_sequence_length.astype(np.int64))
    _require((new >= 0).all(), f"cumulative_sequence_length must not decrease, got {cumulative_sequence_length}")
    _require(last_length <= num_tokens, f"{last_length} tokens in cumulative_sequence_length, but {num_tokens} rows")
    for seq in np.flatnonzero(past_seqlens < 0)[:1]:
        _require(False, f"past_seqlens must be ≥ 0, got {past_seqlens[seq]} for sequence {seq}")

    active = np.flatnonzero(new)
    past = past_seqlens[active].astype(np.int64)
    last = past + new[active] - 1
    limit = block_table.shape[1] * page_size
    for name, most in (("block_table's row", limit), ("rotary tables", max_position)):
        for i in np.flatnonzero(last >= most)[:1] if most is not None else ():
            _require(False, f"position {last[i]} of sequence {active[i]} is beyond the {name}, limit {most}")
    _require_pages(block_table, active, past, last, num_pages, page_size, local_window_size)


def _require_pages(
    block_table: np.ndarray,
    active: np.ndarray,
    past: np.ndarray,
    last: np.ndarray,
    num_pages: int,
    page_size: int,
    local_window_size: int,
) -> None:
    if not active.size:
        return
    column = np.arange(last.max() // page_size + 1)
    first = np.maximum(past - local_window_size + 1, 0) if local_window_size > 0 else np.zeros_like(past)
    upto = column <= (last // page_size)[:, None]
    used = upto & (column >= (first // page_size)[:, None])
    pages = block_table[active, : column.size]
    outside = used & ((pages < 0) | (pages >= num_pages))
    for i, c in np.argwhere(outside)[:1] if outside.any() else ():
        what = "is not mapped (-1)" if pages[i, c] == -1 else f"is page {pages[i, c]}, outside 0..{num_pages - 1}"
        _require(False, f"block_table[{active[i]}, {c}] {what}, but its tokens are read or written")
    written = pages[upto & (column >= (past // page_size)[:, None])]
    shared = written[np.bincount(pages[used])[written] > 1]
    _require(not shared.size, f"page {shared[:1]} is written by one sequence and used in a second place")
