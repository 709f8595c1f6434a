"""What the op's inputs must satisfy; shared by the executable spec and the kernels."""

import math

import numpy as np

from contbatch.errors import RunnerError

INT32 = np.dtype(np.int32)


def _error(message: str) -> RunnerError:
    return RunnerError(f"PagedAttention: {message}")


def require_attributes(num_heads: int, kv_num_heads: int, scale: float, softcap: float, local_window_size: int) -> None:
    """Raise `RunnerError` unless the attributes are within the op's limits."""
    if kv_num_heads < 1:
        raise _error(f"kv_num_heads must be ≥ 1, got {kv_num_heads}")
    if num_heads < 1 or num_heads % kv_num_heads:
        raise _error(f"num_heads must be a multiple of kv_num_heads {kv_num_heads}, got {num_heads}")
    if not math.isfinite(scale):
        raise _error(f"scale must be finite, got {scale}")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise _error(f"softcap must be a finite number ≥ 0, got {softcap}")
    if local_window_size != -1 and local_window_size < 1:
        raise _error(f"local_window_size must be -1 (none) or ≥ 1, got {local_window_size}")


def require_pages(shape: tuple[int, ...], kv_num_heads: int) -> None:
    """Raise `RunnerError` unless this is the shape of a cache."""
    if len(shape) != 4 or min(shape) < 1 or shape[2] != kv_num_heads:
        raise _error(f"a cache must be (num_pages, page_size, {kv_num_heads} = kv_num_heads, head_size), got {shape}")


def require_array(name: str, array: np.ndarray, shape: tuple[int, ...], *dtypes: np.dtype) -> None:
    """Raise `RunnerError` unless `array` has this shape and one of these dtypes."""
    if array.shape != shape:
        raise _error(f"{name} must have shape {shape}, got {array.shape}")
    if array.dtype not in dtypes:
        raise _error(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {array.dtype}")


def require_scales(
    cache: np.ndarray, key_scales: np.ndarray | None, value_scales: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the scales of int8 caches, checked; None for other caches, which may have none."""
    if cache.dtype != np.int8 and key_scales is None and value_scales is None:
        return None
    if cache.dtype != np.int8 or key_scales is None or value_scales is None:
        given = [name for name, x in (("key_scales", key_scales), ("value_scales", value_scales)) if x is not None]
        raise _error(f"int8 caches, and only they, have key_scales and value_scales, got {cache.dtype} and {given}")
    require_array("key_scales", key_scales, cache.shape[:3], np.dtype(np.float32))
    require_array("value_scales", value_scales, cache.shape[:3], np.dtype(np.float32))
    return key_scales, value_scales


def rotary_tables(
    cos_cache: np.ndarray | None, sin_cache: np.ndarray | None, head_size: int, num_positions: int, *dtypes: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tables (max_position, rotary_dim / 2), checked; when absent, tables that rotate no dimension."""
    if cos_cache is None and sin_cache is None:
        return (np.empty((num_positions, 0), np.float32),) * 2
    if cos_cache is None or sin_cache is None or cos_cache.ndim != 2:
        shapes = ", ".join(f"{None if table is None else table.shape}" for table in (cos_cache, sin_cache))
        raise _error(f"cos_cache and sin_cache must both be (max_position, rotary_dim / 2) or absent, got {shapes}")
    require_array("cos_cache", cos_cache, cos_cache.shape, *dtypes)
    require_array("sin_cache", sin_cache, cos_cache.shape, cos_cache.dtype)
    if not 0 < 2 * cos_cache.shape[1] <= head_size:
        raise _error(f"rotary_dim must be in 2..head_size {head_size}, got {2 * cos_cache.shape[1]}")
    return cos_cache, sin_cache


def validate(
    cumulative_sequence_length: np.ndarray,
    past_seqlens: np.ndarray,
    block_table: np.ndarray,
    num_tokens: int,
    num_pages: int,
    page_size: int,
    max_position: int,
    local_window_size: int = -1,
) -> None:
    """Check one step's indices; what passes is read and written inside the pool and nowhere else.

    The arrays are inputs 5 to 7 of the op. `num_tokens` is the query's rows, `max_position` the rows of the rotary
    tables. Pages wholly before every query's window may be unmapped.

    Raises
    ------
    RunnerError
        Naming the value and the limit: a wrong shape or dtype; lengths that are negative, decrease or exceed the
        query; a position beyond the block table or the rotary tables; a page id outside the pool, -1 included, where a
        token is read or written; a page that is written for one sequence and used in a second place.
    """
    new = _new_tokens(cumulative_sequence_length, past_seqlens, block_table, num_tokens)
    active = np.flatnonzero(new)
    if not active.size:
        return
    past = past_seqlens[active].astype(np.int64)
    last = past + new[active] - 1
    for name, limit in (("block_table's row", block_table.shape[1] * page_size), ("rotary tables", max_position)):
        if last.max() >= limit:
            i = int(np.argmax(last))
            raise _error(f"position {last[i]} of sequence {active[i]} is beyond the {name}, limit {limit}")
    first = np.maximum(past - local_window_size + 1, 0) if local_window_size > 0 else np.zeros_like(past)
    columns = first // page_size, past // page_size, last // page_size
    _require_pages(block_table[active, : columns[2].max() + 1], active, *columns, num_pages)


def _new_tokens(
    cumulative_sequence_length: np.ndarray, past_seqlens: np.ndarray, block_table: np.ndarray, num_tokens: int
) -> np.ndarray:
    """Return the tokens each sequence adds in this step, (num_seqs,) int64."""
    if past_seqlens.ndim != 1 or block_table.ndim != 2:
        shapes = f"{past_seqlens.shape} and {block_table.shape}"
        raise _error(f"past_seqlens must be (num_seqs,) and block_table (num_seqs, max_pages), got {shapes}")
    num_seqs = past_seqlens.size
    require_array("past_seqlens", past_seqlens, (num_seqs,), INT32)
    require_array("cumulative_sequence_length", cumulative_sequence_length, (num_seqs + 1,), INT32)
    require_array("block_table", block_table, (num_seqs, block_table.shape[1]), INT32)
    new = np.diff(cumulative_sequence_length.astype(np.int64))
    if cumulative_sequence_length[0] != 0 or (new < 0).any():
        raise _error(f"cumulative_sequence_length must start at 0 and not decrease, got {cumulative_sequence_length}")
    if (end := cumulative_sequence_length[-1]) > num_tokens:
        raise _error(f"cumulative_sequence_length must end within the query's {num_tokens} rows, got {end}")
    if (past_seqlens < 0).any():
        seq = int(np.argmin(past_seqlens))
        raise _error(f"past_seqlens must be ≥ 0, got {past_seqlens[seq]} for sequence {seq}")
    return new


def _require_pages(
    pages: np.ndarray,
    active: np.ndarray,
    first: np.ndarray,
    first_written: np.ndarray,
    last: np.ndarray,
    num_pages: int,
) -> None:
    """Columns first..last of each row of `pages` are read, from first_written on written."""
    column = np.arange(pages.shape[1])
    used = (column >= first[:, None]) & (column <= last[:, None])
    outside = used & ((pages < 0) | (pages >= num_pages))
    if outside.any():
        i, c = np.argwhere(outside)[0]
        what = "is not mapped (-1)" if pages[i, c] == -1 else f"is page {pages[i, c]}, outside 0..{num_pages - 1}"
        raise _error(f"block_table[{active[i]}, {c}] {what}, but its tokens are read or written")
    written = pages[used & (column >= first_written[:, None])]
    shared = written[np.bincount(pages[used])[written] > 1]
    if shared.size:
        raise _error(f"page {shared[0]} is written for one sequence and used in a second place of block_table")
