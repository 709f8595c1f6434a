"""The op in numpy: the executable spec, and the oracle its kernels are tested against."""

from typing import Any

import ml_dtypes
import numpy as np

from contbatch.errors import RunnerError
from contbatch.plugins.paged_attention.contract import (
    require_array,
    require_attributes,
    require_pages,
    require_scales,
    rotary_tables,
    validate,
)
from contbatch.plugins.paged_attention.int8 import quantize

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def paged_attention(
    query: np.ndarray,
    key: np.ndarray | None,
    value: np.ndarray | None,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    cumulative_sequence_length: np.ndarray,
    past_seqlens: np.ndarray,
    block_table: np.ndarray,
    cos_cache: np.ndarray | None = None,
    sin_cache: np.ndarray | None = None,
    key_scales: np.ndarray | None = None,
    value_scales: np.ndarray | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    local_window_size: int = -1,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
) -> tuple[np.ndarray, ...]:
    """Causal grouped-query attention over K/V kept in pages: `com.microsoft::PagedAttention`, see README.md.

    Arrays are float32, float16 or bfloat16; key and value are None when the query is packed. int8 caches have scales,
    (num_pages, page_size, kv_num_heads) float32. Returns the output, of the query's dtype, and updated copies of the
    caches and of the scales, if any. Anything outside the contract raises `RunnerError`.
    """
    require_attributes(num_heads, kv_num_heads, scale, softcap, local_window_size)
    q, k, v = _split_heads(query, key, value, key_cache, value_cache, num_heads, kv_num_heads)
    num_pages, page_size, _, head_size = key_cache.shape
    if do_rotary and cos_cache is None:
        raise RunnerError("PagedAttention: do_rotary = 1 needs cos_cache and sin_cache")
    tables = (cos_cache, sin_cache) if do_rotary else (None, None)
    cos, sin = rotary_tables(*tables, head_size, block_table.size * page_size, *FLOATS)
    indices = cumulative_sequence_length, past_seqlens, block_table
    validate(*indices, len(query), num_pages, page_size, len(cos), local_window_size)
    caches = [array.copy() for array in (key_cache, value_cache)]
    scales = [array.copy() for array in require_scales(key_cache, key_scales, value_scales) or ()]
    output = np.zeros(q.shape)
    for s in np.flatnonzero(np.diff(cumulative_sequence_length)):
        new = slice(cumulative_sequence_length[s], cumulative_sequence_length[s + 1])
        past = int(past_seqlens[s])
        position = past + np.arange(new.stop - new.start)
        q_s, k_s = (_rotate(x[new], cos[position], sin[position], rotary_interleaved) for x in (q, k))
        page, slot = block_table[s, position // page_size], position % page_size
        _store(caches, scales, (page, slot), (k_s, v[new]))

        seen, visible = _seen(position, local_window_size)
        page, slot = block_table[s, seen // page_size], seen % page_size
        k_s, v_s = (cache[page, slot].astype(np.float64) for cache in caches)
        if scales:
            k_s, v_s = (x * scale[page, slot, :, None] for x, scale in zip((k_s, v_s), scales, strict=True))
        output[new] = _attend(q_s, k_s, v_s, visible, scale, softcap)
    return output.reshape(len(query), num_heads * head_size).astype(query.dtype), *caches, *scales


def _seen(position: np.ndarray, local_window_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions that any of a sequence's new tokens sees, and which of them each sees."""
    window = local_window_size if local_window_size > 0 else position[-1] + 1
    seen = np.arange(max(0, position[0] - window + 1), position[-1] + 1)
    return seen, (seen <= position[:, None]) & (seen > position[:, None] - window)


def _store(
    caches: list[np.ndarray], scales: list[np.ndarray], at: tuple[np.ndarray, ...], new: tuple[Any, ...]
) -> None:
    """Write new keys and values, rounded as the caches are, at these pages and slots."""
    for i, x in enumerate(new):
        if scales:
            caches[i][at], scales[i][at] = quantize(x)
        else:
            caches[i][at] = x


def _split_heads(
    query: np.ndarray,
    key: np.ndarray | None,
    value: np.ndarray | None,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    num_heads: int,
    kv_num_heads: int,
) -> list[np.ndarray]:
    """Return query, key and value as float64 (num_tokens, heads, head_size)."""
    require_pages(key_cache.shape, kv_num_heads)
    if query.ndim != 2:
        raise RunnerError(f"PagedAttention: query must have two dimensions, got shape {query.shape}")
    if (key is None) != (value is None):
        raise RunnerError("PagedAttention: key and value must both be given, or both be absent (packed query)")
    head_size = key_cache.shape[3]
    require_array("key_cache", key_cache, key_cache.shape, *FLOATS, np.dtype(np.int8))
    require_array("value_cache", value_cache, key_cache.shape, key_cache.dtype)
    q_width, kv_width = num_heads * head_size, kv_num_heads * head_size
    if key is None or value is None:
        require_array("packed query", query, (len(query), q_width + 2 * kv_width), *FLOATS)
        query, key, value = np.split(query, [q_width, q_width + kv_width], axis=1)
    require_array("query", query, (len(query), q_width), *FLOATS)
    require_array("key", key, (len(query), kv_width), query.dtype)
    require_array("value", value, (len(query), kv_width), query.dtype)
    return [x.astype(np.float64).reshape(len(x), x.shape[1] // head_size, head_size) for x in (query, key, value)]


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: int) -> np.ndarray:
    """Rotary position embedding (Su et al. 2021) of x (n, heads, head_size), cos and sin (n, rotary_dim / 2)."""
    half = cos.shape[1]
    cos, sin = (table[:, None].astype(np.float64) for table in (cos, sin))
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    y = x.copy()
    y[..., a] = x[..., a] * cos - x[..., b] * sin
    y[..., b] = x[..., b] * cos + x[..., a] * sin
    return y


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, scale: float, softcap: float
) -> np.ndarray:
    """Softmax attention of q (n, heads, d) over k, v (m, kv_heads, d); query head h reads KV head h // (heads / kv)."""
    group = q.shape[1] // k.shape[1]
    score = np.einsum("nhd,mhd->hnm", q, k.repeat(group, axis=1)) * (scale or q.shape[2] ** -0.5)
    if softcap > 0:
        score = softcap * np.tanh(score / softcap)
    score = np.where(visible, score, -np.inf)
    weight = np.exp(score - score.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    out: np.ndarray = np.einsum("hnm,mhd->nhd", weight, v.repeat(group, axis=1))
    return out
