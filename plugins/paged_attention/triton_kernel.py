"""The op on a GPU, in Triton: one launch for prompts, chunks of prompts and decoding tokens, pages written on the way.

Flash attention (Dao et al. 2022) over pages (Kwon et al. 2023), split over the keys where sequences are few and long
(Dao et al. 2023, "Flash-Decoding"). A program owns `block_tokens` consecutive tokens of one sequence and query heads of
one KV head. It reads positions before `past_seqlens` from pages and this step's K/V from the inputs, rounded as the
pages round them, so no program waits for another's write.

Scores are kept in units of log 2, since the hardware has exp2. Every index that comes from data is clamped or masked: a
builder times the kernel on memory that holds anything. Offsets into pages and activations have 64 bits.
"""
# mypy: disable-error-code="misc, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _find_tokens(cumulative_sequence_length, num_tokens, num_seqs, block_tokens: tl.constexpr):
    """Return this program's sequence, its first row, its number of rows and which of them the program begins with.

    Sequence s owns the programs from cumulative[s] // block_tokens + s on, at least as many as it has blocks. Rows of
    padding after the last sequence belong to a sequence number num_seqs.
    """
    program = tl.program_id(0)
    sequence = 0
    high = num_seqs
    while sequence < high:
        middle = (sequence + high + 1) // 2
        start = _clamp(tl.load(cumulative_sequence_length + middle), 0, num_tokens)
        fits = start // block_tokens + middle <= program
        sequence = tl.where(fits, middle, sequence)
        high = tl.where(fits, high, middle - 1)
    start = _clamp(tl.load(cumulative_sequence_length + sequence), 0, num_tokens)
    end = tl.load(cumulative_sequence_length + sequence + 1, mask=sequence < num_seqs, other=num_tokens)
    first = tl.maximum(program - start // block_tokens - sequence, 0) * block_tokens
    return sequence, start, _clamp(end, start, num_tokens) - start, first


@triton.jit
def _load_rotated(heads, offset, position, ok, cos_cache, sin_cache, max_position, variant: tl.constexpr):
    """Return the vectors at heads + offset as float32 (rows, head_size), rotated by their positions; 0 where not ok."""
    d = tl.arange(0, variant.head_size_padded)[None, :]
    heads += offset[:, None]
    ok = ok[:, None]
    x = tl.load(heads + d, mask=ok & (d < variant.head_size), other=0.0).to(tl.float32)
    if variant.rotary_dim > 0:
        half: tl.constexpr = variant.rotary_dim // 2
        rotated = d < variant.rotary_dim
        if variant.rotary_interleaved:
            is_first = d % 2 == 0
            pair = d // 2
            other = d ^ 1
        else:
            is_first = d < half
            pair = d % half
            other = tl.where(is_first, d + half, d - half)
        angle = _clamp(position, 0, max_position - 1).to(tl.int64)[:, None] * half + pair
        cos = tl.load(cos_cache + angle, mask=ok & rotated, other=1.0).to(tl.float32)
        sin = tl.load(sin_cache + angle, mask=ok & rotated, other=0.0).to(tl.float32)
        y = tl.load(heads + other, mask=ok & rotated, other=0.0).to(tl.float32)
        x = x * cos + tl.where(is_first, -y, y) * sin
    return x


@triton.jit
def _find_slots(block_table, sequence, position, ok, num_pages, max_pages, variant: tl.constexpr):
    """Return the int64 offsets of positions in a cache, for KV head 0, and which of them lie in a mapped page."""
    column = position // variant.page_size
    ok = ok & (column < max_pages)
    page = tl.load(block_table + sequence.to(tl.int64) * max_pages + column, mask=ok, other=-1)
    ok = ok & (page >= 0) & (page < num_pages)
    slot = page.to(tl.int64) * variant.page_size + position % variant.page_size
    return slot * (variant.kv_num_heads * variant.head_size), ok


@triton.jit
def _attend(state, q, k, v, visible, variant: tl.constexpr):
    """Take a tile of keys into the running softmax: sums (rows, head_size), highest score and total weight (rows)."""
    acc, highest, total = state
    score = tl.dot(q, tl.trans(k)) * variant.multiplier
    if variant.softcap > 0:  # c · tanh(x / c), by way of exp2, which may overflow to infinity without harm
        score = variant.softcap * (1 - 2 / (1 + tl.exp2(score * (2 * LOG2_E / variant.softcap))))
    score = tl.where(visible, score * LOG2_E, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(score, 1))
    # A row that has seen nothing yet must not compute infinity - infinity.
    base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(highest - base)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
    return (acc, new_highest, total * shrink + tl.sum(weight, 1))


@triton.jit
def _is_visible(row_position, position, ok, variant: tl.constexpr):
    visible = ok[None, :] & (position[None, :] <= row_position[:, None])
    if variant.local_window_size > 0:
        visible = visible & (position[None, :] > row_position[:, None] - variant.local_window_size)
    return visible


@triton.jit
def _window_begin(first, variant: tl.constexpr):
    """Return the first position of the first tile that the row at position `first` can see into."""
    if variant.local_window_size > 0:
        return (
            tl.maximum(first - variant.local_window_size + 1, 0)
            // variant.tactic.block_keys
            * variant.tactic.block_keys
        )
    return 0


@triton.jit
def _share_of_split(begin, end, variant: tl.constexpr):
    """Return this program's share of the positions in pages, whole tiles of them."""
    if variant.num_splits == 1:
        return begin, end
    tiles = tl.cdiv(tl.cdiv(end - begin, variant.tactic.block_keys), variant.num_splits)
    begin += tl.program_id(2) * tiles * variant.tactic.block_keys
    return begin, tl.minimum(end, begin + tiles * variant.tactic.block_keys)


@triton.jit
def _store(output, lse, row, ok, state, variant: tl.constexpr):
    """Store the rows' attention, and with splits the weight it stands for; 0 where nothing was visible."""
    acc, highest, total = state
    d = tl.arange(0, variant.head_size_padded)[None, :]
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = ok[:, None] & (d < variant.head_size)
    tl.store(output + row[:, None] * variant.head_size + d, out.to(output.dtype.element_ty), mask=mask)
    if variant.num_splits > 1:
        tl.store(lse + row, highest + tl.log2(total), mask=ok)


@triton.jit
def _attend_pages(state, q, row_position, tokens, past, caches, kv_head, variant: tl.constexpr):
    """Take what earlier steps left in pages into `state`: acc, highest and total, see `_attend`."""
    key_cache, value_cache, block_table, num_pages, max_pages = caches
    sequence, _, _, first = tokens
    d = tl.arange(0, variant.head_size_padded)[None, :]
    begin, end = _share_of_split(_window_begin(past + first, variant), past, variant)
    for tile in range(begin, end, variant.tactic.block_keys):
        position = tile + tl.arange(0, variant.tactic.block_keys)
        ok = position < end
        if variant.local_window_size > 0:
            ok = ok & (position > past + first - variant.local_window_size)
        slot, ok = _find_slots(block_table, sequence, position, ok, num_pages, max_pages, variant)
        at = (slot + kv_head * variant.head_size)[:, None] + d
        mask = ok[:, None] & (d < variant.head_size)
        k = tl.load(key_cache + at, mask=mask, other=0.0)
        v = tl.load(value_cache + at, mask=mask, other=0.0)
        state = _attend(state, q, k, v, _is_visible(row_position, position, ok, variant), variant)
    return state


@triton.jit
def _attend_inputs(state, q, row_position, tokens, num_keys, past, inputs, kv_head, variant: tl.constexpr):
    """Take this step's own tokens, up to the program's last one, into `state`."""
    key, value, cos_cache, sin_cache, max_position = inputs
    _, start, _, first = tokens
    d = tl.arange(0, variant.head_size_padded)[None, :]
    for tile in range(
        _window_begin(first, variant), tl.minimum(first + variant.block_tokens, num_keys), variant.tactic.block_keys
    ):
        token = tile + tl.arange(0, variant.tactic.block_keys)
        ok = token < num_keys
        at = (start + token).to(tl.int64) * variant.kv_stride + kv_head * variant.head_size
        k = _load_rotated(key, at, past + token, ok, cos_cache, sin_cache, max_position, variant).to(
            key.dtype.element_ty
        )
        v = tl.load(value + at[:, None] + d, mask=ok[:, None] & (d < variant.head_size), other=0.0)
        state = _attend(state, q, k, v, _is_visible(row_position, past + token, ok, variant), variant)
    return state


@triton.jit
def _write_pages(key_cache_out, value_cache_out, tokens, past, inputs, caches, kv_head, variant: tl.constexpr):
    """Store the new keys, rotated, and values of this program's tokens where the block table says."""
    key, value, cos_cache, sin_cache, max_position = inputs
    _, _, block_table, num_pages, max_pages = caches
    sequence, start, num_new, first = tokens
    token = first + tl.arange(0, variant.block_tokens_padded)
    d = tl.arange(0, variant.head_size_padded)[None, :]
    ok = token < tl.minimum(first + variant.block_tokens, num_new)
    slot, ok = _find_slots(block_table, sequence, past + token, ok, num_pages, max_pages, variant)
    source = (start + token).to(tl.int64) * variant.kv_stride + kv_head * variant.head_size
    target = (slot + kv_head * variant.head_size)[:, None] + d
    mask = ok[:, None] & (d < variant.head_size)
    k = _load_rotated(key, source, past + token, ok, cos_cache, sin_cache, max_position, variant)
    tl.store(key_cache_out + target, k.to(key_cache_out.dtype.element_ty), mask=mask)
    tl.store(value_cache_out + target, tl.load(value + source[:, None] + d, mask=mask, other=0.0), mask=mask)


# fmt: off
@triton.jit
def paged_attention(
    query, key, value, key_cache, value_cache, cumulative_sequence_length, past_seqlens, block_table,
    cos_cache, sin_cache,
    num_tokens, num_seqs, num_pages, max_pages, max_position,
    output, lse, key_cache_out, value_cache_out,
    variant: tl.constexpr,
):
    # fmt: on
    """One step of one layer; the order of arguments is TensorRT's: inputs, 32-bit scalars, outputs.

    Grid: (num_tokens // block_tokens + num_seqs + 1, kv_num_heads · parts, num_splits). Inputs are those of README.md,
    absent ones None; the scalars are dimensions of them. key_cache_out and value_cache_out are the caches. With
    num_splits > 1, output is float32 (num_splits, num_tokens, num_heads, head_size) and lse float32 (num_splits,
    num_tokens, num_heads), log2 of the sum of exponentials; otherwise lse is None.
    """
    if variant.packed:
        key = query + variant.num_heads * variant.head_size
        value = key + variant.kv_num_heads * variant.head_size
    inputs = (key, value, cos_cache, sin_cache, max_position)
    caches = (key_cache, value_cache, block_table, num_pages, max_pages)
    tokens = _find_tokens(cumulative_sequence_length, num_tokens, num_seqs, variant.block_tokens)
    sequence, start, num_new, first = tokens
    if first >= num_new:
        return
    num_keys = tl.where(sequence < num_seqs, num_new, 0)  # padding sees nothing, so its output is zero
    past = tl.load(past_seqlens + sequence, mask=sequence < num_seqs, other=0)
    past = _clamp(past, 0, tl.maximum(max_pages * variant.page_size - num_new, 0))
    kv_head = tl.program_id(1) // variant.parts
    part = tl.program_id(1) % variant.parts
    row = tl.arange(0, variant.tactic.block_rows)
    token = first + row // variant.block_heads
    head_in_group = part * variant.block_heads + row % variant.block_heads
    ok = (token < tl.minimum(first + variant.block_tokens, num_new)) & (head_in_group < variant.group)
    head = kv_head * variant.group + head_in_group
    query_at = (start + token).to(tl.int64) * variant.query_stride + head * variant.head_size
    q = _load_rotated(query, query_at, past + token, ok, cos_cache, sin_cache, max_position, variant)
    q = q.to(query.dtype.element_ty)

    acc = tl.zeros([variant.tactic.block_rows, variant.head_size_padded], tl.float32)
    highest = tl.full([variant.tactic.block_rows], -float("inf"), tl.float32)
    state = (acc, highest, tl.zeros([variant.tactic.block_rows], tl.float32))
    state = _attend_pages(state, q, past + token, tokens, past, caches, kv_head, variant)
    if tl.program_id(2) == variant.num_splits - 1:
        state = _attend_inputs(state, q, past + token, tokens, num_keys, past, inputs, kv_head, variant)
        if part == 0 and sequence < num_seqs:
            _write_pages(key_cache_out, value_cache_out, tokens, past, inputs, caches, kv_head, variant)
    row = (tl.program_id(2).to(tl.int64) * num_tokens + start + token) * variant.num_heads + head
    _store(output, lse, row, ok, state, variant)
