"""The op against dense attention written here, token by token; CASES 21 to 26 and the promises of the README."""

import threading
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest
from contbatch.plugins.paged_attention import cpu, reference
from contbatch.plugins.paged_attention.kernels import attend, exp2
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from contbatch.errors import RunnerError

BF16 = ml_dtypes.bfloat16
STEP = {np.float32: 2.0**-22, np.float16: 2.0**-10, BF16: 2.0**-7}
"""Two roundings of each dtype, relative."""


@dataclass
class Problem:
    """One step over randomly placed pages. `lengths` are (past, new) per sequence; slots nobody may read hold NaN."""

    lengths: list
    heads: int = 3
    kv_heads: int = 1
    head_size: int = 64
    page_size: int = 16
    pages: type = np.float32
    padding: int = 0
    rotary_dim: int = 0
    seed: int = 0
    attributes: dict = field(default_factory=dict)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.past, new = (np.array(column, np.int32) for column in zip(*self.lengths, strict=True))
        self.cumulative = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        used = -(-(self.past + new) // self.page_size)
        num_pages = int(used.sum()) + 3
        free = iter(rng.permutation(num_pages))
        self.table = np.full((len(new), max(used.max(), 1) + 1), -1, np.int32)
        shape = (num_pages, self.page_size, self.kv_heads, self.head_size)
        self.key_cache, self.value_cache = np.full(shape, np.nan, self.pages), np.full(shape, np.nan, self.pages)
        for s, past in enumerate(self.past):
            self.table[s, : used[s]] = [next(free) for _ in range(used[s])]
            for cache in (self.key_cache, self.value_cache):
                cache[self.at(s, np.arange(past))] = rng.standard_normal((past, self.kv_heads, self.head_size))
        rows, heads = int(new.sum()) + self.padding, self.heads + 2 * self.kv_heads
        self.qkv = rng.standard_normal((rows, heads * self.head_size)).astype(np.float32)
        angle = rng.uniform(0, 6, (int((self.past + new).max()) + 1, self.rotary_dim // 2))
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def at(self, s, position):
        return self.table[s, position // self.page_size], position % self.page_size

    def steps(self):
        rotary = (self.cos, self.sin) if self.rotary_dim else (None, None)
        return self.cumulative, self.past, self.table, *rotary

    def reference(self, dtype=np.float32):
        arguments = self.qkv.astype(dtype), None, None, self.key_cache, self.value_cache, *self.steps()
        heads = {"num_heads": self.heads, "kv_num_heads": self.kv_heads, "do_rotary": int(self.rotary_dim > 0)}
        return reference.paged_attention(*arguments, **heads, **self.attributes)

    def cpu(self, **options):
        raw = (lambda a: a.view(np.uint16)) if self.pages is BF16 else (lambda a: a)
        key_cache, value_cache = self.key_cache.copy(), self.value_cache.copy()
        output = np.full((len(self.qkv), self.heads * self.head_size), np.nan, np.float32)
        shape = {"num_rows": len(self.qkv), "pages_shape": key_cache.shape, "num_heads": self.heads}
        plan = cpu.plan_step(*self.steps(), **shape, **self.attributes, **options)
        cpu.paged_attention(plan, self.qkv, raw(key_cache), raw(value_cache), output)
        return output, key_cache, value_cache


def rotated(problem, x, position):
    """Rotary embedding as a product of complex numbers; x (n, heads, head_size)."""
    half, x = problem.rotary_dim // 2, x.astype(np.float64)
    pairs = x[..., : 2 * half].reshape(*x.shape[:-1], -1, 2) if problem.attributes.get("rotary_interleaved") else None
    real, imaginary = (x[..., :half], x[..., half : 2 * half]) if pairs is None else (pairs[..., 0], pairs[..., 1])
    z = (real + 1j * imaginary) * (problem.cos[position] + 1j * problem.sin[position])[:, None]
    turned = [z.real, z.imag] if pairs is None else [np.stack([z.real, z.imag], -1).reshape(*x.shape[:-1], -1)]
    return np.concatenate([*turned, x[..., 2 * half :]], axis=-1)


def dense(problem, q, k, v, past):
    """Attention of one sequence, one query and head at a time: q (new, heads, d), k and v (past + new, kv heads, d)."""
    scale = problem.attributes.get("scale") or 1 / np.sqrt(problem.head_size)
    cap, window = problem.attributes.get("softcap"), problem.attributes.get("local_window_size", -1)
    out = np.empty_like(q)
    for t, h in np.ndindex(q.shape[:2]):
        seen = slice(max(0, past + t + 1 - window) if window > 0 else 0, past + t + 1)
        score = k[seen, h * problem.kv_heads // problem.heads] @ q[t, h] * scale
        score = cap * np.tanh(score / cap) if cap else score
        weight = np.exp(score - score.max())
        out[t, h] = weight @ v[seen, h * problem.kv_heads // problem.heads] / weight.sum()
    return out


def check(problem, result, dtype=np.float32):
    """Pages hold what they must, and nothing else changed; the output is dense attention over what they hold."""
    output, key_cache, value_cache = result
    assert output.dtype == dtype
    untouched = np.ones(key_cache.shape[:2], bool)
    qkv = problem.qkv.astype(dtype).astype(np.float64).reshape(len(problem.qkv), -1, problem.head_size)
    q, k, v = np.split(qkv, [problem.heads, problem.heads + problem.kv_heads], axis=1)
    for s, past in enumerate(problem.past):
        new = slice(*problem.cumulative[s : s + 2])
        position = past + np.arange(new.stop - new.start)
        at = problem.at(s, position)
        untouched[at] = False
        np.testing.assert_array_equal(value_cache[at], v[new].astype(problem.pages))
        expected, eps = rotated(problem, k[new], position), STEP[problem.pages]
        np.testing.assert_allclose(key_cache[at].astype(np.float64), expected, rtol=eps, atol=2.0**-22)
        everything = problem.at(s, np.arange(past + len(position)))
        k_all, v_all = (cache[everything].astype(np.float64) for cache in (key_cache, value_cache))
        expected = dense(problem, rotated(problem, q[new], position), k_all, v_all, past)
        got = output[new].astype(np.float64).reshape(expected.shape)
        np.testing.assert_allclose(got, expected, rtol=STEP[dtype], atol=4e-6)
    assert not output[problem.cumulative[-1] :].any()
    for after, before in ((key_cache, problem.key_cache), (value_cache, problem.value_cache)):
        assert after[untouched].tobytes() == before[untouched].tobytes()


def same_bits(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@st.composite
def problems(draw, pages=(np.float32, BF16)):
    ratio, kv_heads = draw(st.sampled_from([(1, 1), (1, 3), (3, 1), (3, 3), (5, 2), (6, 1), (7, 1), (16, 1)]))
    head_size = draw(st.sampled_from([8, 10, 32, 64, 80, 96, 128, 256]))
    lengths = st.tuples(st.integers(0, 150), st.sampled_from([0, 1, 1, 2, 17, 70]))
    attributes = {
        "scale": draw(st.sampled_from([0.0, 0.3])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        "local_window_size": draw(st.sampled_from([-1, -1, 1, 2, 63, 64, 100])),
        "rotary_interleaved": draw(st.integers(0, 1)),
    }
    return Problem(
        draw(st.lists(lengths, min_size=1, max_size=5)),
        heads=ratio * kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        page_size=draw(st.sampled_from([1, 3, 16, 32, 256])),
        pages=draw(st.sampled_from(pages)),
        padding=draw(st.integers(0, 2)),
        rotary_dim=draw(st.sampled_from([0, 2, head_size // 2 // 2 * 2, head_size])),
        seed=draw(st.integers(0, 2**32)),
        attributes=attributes,
    )


@settings(max_examples=25, deadline=None)
@given(problems(pages=[np.float32, np.float16, BF16]), st.sampled_from([np.float32, np.float16, BF16]))
def test_reference_is_dense_attention(problem, dtype):
    before = [array.tobytes() for array in (problem.qkv, problem.key_cache, problem.value_cache)]
    check(problem, problem.reference(dtype), dtype)
    assert before == [array.tobytes() for array in (problem.qkv, problem.key_cache, problem.value_cache)]


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 3))
def test_cpu_is_dense_attention_and_the_reference(problem, num_threads):
    result = problem.cpu(num_threads=num_threads)
    check(problem, result)
    expected = problem.reference()
    # A key that lies halfway between two bfloat16 may be rounded either way; a score then moves by that much.
    tolerance = 2e-5 if problem.pages is np.float32 else 0.05
    np.testing.assert_allclose(result[0], expected[0], rtol=tolerance, atol=tolerance)
    assert same_bits(result[2:], expected[2:])


def test_unpacked_query_is_the_packed_one():
    problem = Problem([(5, 3), (0, 20)], heads=6, kv_heads=2)
    query, key, value = np.split(problem.qkv, [6 * 64, 8 * 64], axis=1)
    caches = problem.key_cache, problem.value_cache, *problem.steps()
    unpacked = reference.paged_attention(query, key, value, *caches, num_heads=6, kv_num_heads=2)
    assert same_bits(unpacked, problem.reference())


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 16])
def test_every_ratio_of_heads(ratio):  # CASES 23
    problem = Problem([(70, 1), (0, 66), (3, 9)], heads=2 * ratio, kv_heads=2, rotary_dim=64)
    check(problem, problem.cpu())


@pytest.mark.parametrize("pages", [np.float32, BF16])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [1, 16, 32, 256])
def test_lengths_around_a_page(page_size, head_size, pages):  # CASES 24
    edges = [max(0, page_size - 1), page_size, page_size + 1]
    lengths = [(0, 0), (0, 1), *((n, 1) for n in edges), (0, page_size + 1), (page_size - 1, 2)]
    problem = Problem(lengths, page_size=page_size, head_size=head_size, pages=pages, rotary_dim=head_size)
    check(problem, problem.cpu())


def test_offsets_beyond_2_to_the_31():  # CASES 21
    small = Problem([(40, 3), (20, 1)], pages=BF16)
    num_pages = 2**31 // (16 * 64) + 64
    try:
        huge = [np.zeros((num_pages, 16, 1, 64), np.uint16) for _ in range(2)]
    except MemoryError:
        pytest.skip("8.6 GB of untouched memory cannot be reserved here")
    far = np.where(small.table < 0, -1, num_pages - 1 - small.table).astype(np.int32)
    for cache, source in zip(huge, (small.key_cache, small.value_cache), strict=True):
        cache[num_pages - 1 - np.arange(len(source))] = source.view(np.uint16)
    output = np.empty((4, 3 * 64), np.float32)
    steps = small.cumulative, small.past, far
    plan = cpu.plan_step(*steps, num_rows=4, pages_shape=huge[0].shape, num_heads=3)
    cpu.paged_attention(plan, small.qkv, *huge, output)
    moved = (cache[num_pages - 1 - np.arange(len(small.key_cache))] for cache in huge)
    assert same_bits((output, *moved), small.cpu())
    assert not any(cache[: len(small.key_cache)].any() for cache in huge)


def test_sees_only_itself_and_padding_is_zero():  # CASES 25, 26
    problem = Problem([(30, 5), (0, 1), (0, 0)], padding=4, attributes={"local_window_size": 1})
    for output, *_ in (problem.cpu(), problem.reference()):
        np.testing.assert_allclose(output[:6].reshape(6, 3, 64), np.repeat(problem.qkv[:6, None, 256:], 3, axis=1))
        assert output[6:].tobytes() == bytes(output[6:].nbytes)
    empty = Problem([(7, 0), (0, 0)], padding=2)
    assert same_bits(empty.cpu(), (np.zeros((2, 192), np.float32), empty.key_cache, empty.value_cache))


def test_257_sequences():  # CASES 26
    problem = Problem([(i % 40, 1 + i % 3) for i in range(257)], head_size=8, padding=3)
    check(problem, problem.cpu())
    check(problem, problem.reference())


def test_pages_before_every_window_may_be_unmapped():
    problem = Problem([(100, 2)], attributes={"local_window_size": 20})
    whole = problem.cpu()
    problem.table[0, : (100 - 19) // 16] = -1
    assert same_bits(problem.cpu(), whole)
    assert same_bits(problem.reference(), problem.reference())
    problem.table[0, (100 - 19) // 16] = -1
    with pytest.raises(RunnerError, match="not mapped"):
        problem.cpu()


def spoil(name, index, value):
    def change(problem):
        getattr(problem, name)[index] = value

    return change


BAD = {  # CASES 22 and the rest of the contract: what is wrong, and what the message names
    "page id = num_pages": (spoil("table", (1, 0), 9), r"block_table\[1, 0\] is page 9, outside 0\.\.8"),
    "page id < -1": (spoil("table", (0, 1), -7), r"block_table\[0, 1\] is page -7, outside 0\.\.8"),
    "unmapped past": (spoil("table", (0, 0), -1), r"block_table\[0, 0\] is not mapped"),
    "unmapped target": (spoil("table", (0, 2), -1), r"block_table\[0, 2\] is not mapped"),
    "negative past": (spoil("past", 1, -1), "past_seqlens must be ≥ 0, got -1 for sequence 1"),
    "decreasing": (spoil("cumulative", 1, 12), r"not decrease, got \[ 0 12  6\]"),
    "not from 0": (spoil("cumulative", 0, 1), r"start at 0 .* got \[1 2 6\]"),
    "too many tokens": (spoil("cumulative", 2, 7), "6 rows, got 7"),
    "beyond the table": (spoil("past", 0, 63), "position 64 of sequence 0 is beyond the block_table's row, limit 64"),
    "beyond rotary": (lambda p: setattr(p, "rotary_dim", 4), "position 41 of sequence 0 .* rotary tables, limit 10"),
    "written twice": (lambda p: p.table.__setitem__((1, 0), p.table[0, 0]), "is written for one sequence and used"),
    "int64 table": (lambda p: setattr(p, "table", p.table.astype(np.int64)), "dtype int32, got int64"),
    "flat table": (lambda p: setattr(p, "table", p.table[0]), r"got \(2,\) and \(4,\)"),
    "short cumulative": (lambda p: setattr(p, "cumulative", p.cumulative[:2]), r"shape \(3,\), got \(2,\)"),
    "odd heads": (lambda p: setattr(p, "kv_heads", 2), "multiple of kv_num_heads 2, got 3|must have shape"),
    "window 0": (lambda p: p.attributes.update(local_window_size=0), "-1 .none. or ≥ 1, got 0"),
    "softcap < 0": (lambda p: p.attributes.update(softcap=-1.0), "≥ 0, got -1"),
    "NaN scale": (lambda p: p.attributes.update(scale=float("nan")), "finite, got nan"),
    "double qkv": (lambda p: setattr(p, "qkv", p.qkv.astype(np.float64)[:, :1]), r"must have shape"),
    "double pages": (lambda p: setattr(p, "value_cache", p.value_cache.astype(np.float64)), "float32, got float64"),
}


@pytest.mark.parametrize("run", [Problem.reference, Problem.cpu])
@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named(what, run):
    problem = Problem([(40, 2), (5, 4)])
    change, message = BAD[what]
    problem.cos = problem.sin = np.ones((10, 2), np.float32)
    change(problem)
    with pytest.raises(RunnerError, match=message):
        run(problem)


def test_memory_layout_is_checked():
    problem = Problem([(0, 2)])
    problem.qkv = np.asfortranarray(problem.qkv)
    with pytest.raises(RunnerError, match="qkv must be C-contiguous and writable"):
        problem.cpu()
    with pytest.raises(RunnerError, match="num_heads"):
        cpu.plan_step(*problem.steps(), num_rows=2, pages_shape=(1, 1, 0, 8), num_heads=1)


@pytest.mark.parametrize("pages", [np.float32, BF16])
def test_bits_depend_on_the_sequence_alone(pages):
    lengths = [(130, 1), (0, 100), (64, 63), (1, 2), (200, 1)]
    batch = Problem(lengths, heads=6, kv_heads=2, pages=pages, rotary_dim=32)
    outputs = [batch.cpu(num_threads=n)[0] for n in (1, 2, 3)]
    assert outputs[0].tobytes() == outputs[1].tobytes() == outputs[2].tobytes()
    for s, (past, _) in enumerate(lengths):
        new = slice(*batch.cumulative[s : s + 2])
        # Alone, in chunks of 7 tokens and then one by one, on pages of 3 tokens.
        alone = Problem([lengths[s]], heads=6, kv_heads=2, pages=pages, rotary_dim=32, page_size=3)
        alone.cos, alone.sin = batch.cos, batch.sin
        for name in ("key_cache", "value_cache"):
            getattr(alone, name)[alone.at(0, np.arange(past))] = getattr(batch, name)[batch.at(s, np.arange(past))]
        pieces, start = [], new.start
        while start < new.stop:
            size = 7 if new.stop - start > 10 else 1
            alone.qkv = batch.qkv[start : start + size]
            alone.cumulative, alone.past = np.array([0, size], np.int32), np.array([past + start - new.start], np.int32)
            piece, alone.key_cache, alone.value_cache = alone.cpu()
            pieces.append(piece)
            start += size
        assert np.concatenate(pieces).tobytes() == outputs[0][new].tobytes()


def test_nan_stays_in_its_sequence():
    problem = Problem([(20, 1), (9, 3)])
    clean = problem.cpu()[0]
    problem.qkv[0, 0] = np.nan
    output = problem.cpu()[0]
    assert np.isnan(output[0, :64]).all()
    assert output[1:].tobytes() == clean[1:].tobytes()


def test_two_threads_at_once():
    problems = [Problem([(300, 1), (0, 90)], heads=9, kv_heads=3, seed=seed) for seed in range(2)]
    expected, results = [p.cpu(num_threads=1) for p in problems], [[], []]

    def work(i):
        results[i] = [problems[i].cpu(num_threads=2) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(len(results[i]) == 20 and all(same_bits(r, expected[i]) for r in results[i]) for i in range(2))


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan():
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32)
    special = np.array(
        [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0xFFFFFFFF, 0x3F808000, 0x3F818000, 1, 0x80000000], np.uint32
    )
    values = np.concatenate([bits[: 4096 - 8], special]).view(np.float32)
    problem = Problem([(0, 64)], heads=1, pages=BF16)
    problem.qkv[:, 128:] = values.reshape(64, 64)
    stored = problem.cpu()[2][problem.at(0, np.arange(64))].ravel()
    with np.errstate(invalid="ignore"):
        expected = values.astype(BF16)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(stored[number].view(np.uint16), expected[number].view(np.uint16))
    assert np.isnan(stored[~number]).all()


def test_exp2_is_within_an_ulp():
    @njit
    def many(x):
        return np.array([exp2(v) for v in x])

    x = -np.concatenate([np.linspace(0, 126, 200_001), np.logspace(-30, 0, 1000), [127, 200, np.inf]]).astype(
        np.float32
    )
    y, exact = many(x).astype(np.float64), np.exp2(x.astype(np.float64))
    np.testing.assert_allclose(y[:-3], exact[:-3], rtol=2.0**-23)
    assert y[0] == 1
    assert not y[-3:].any()
    assert np.isnan(many(np.full(1, np.nan, np.float32))).all()


def test_compiled_once_per_dtype_of_pages():
    for pages in (np.float32, BF16):
        Problem([(1, 1)], pages=pages, rotary_dim=2, attributes={"softcap": 1.0, "rotary_interleaved": 1}).cpu()
    assert len(attend.signatures) == 2
