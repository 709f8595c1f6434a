"""A step of the op over randomly placed pages, and dense attention to judge its result by, token by token."""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from contbatch.plugins.paged_attention import cpu, reference, step_plan
from contbatch.plugins.paged_attention.int8 import quantize

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
        unread = 1 if self.pages is np.int8 else np.nan  # there, the scales are NaN
        self.caches = [np.full(shape, unread, self.pages) for _ in range(2)]
        self.scales = [np.full(shape[:3], np.nan, np.float32) for _ in range(2 * (self.pages is np.int8))]
        for s, past in enumerate(self.past):
            self.table[s, : used[s]] = [next(free) for _ in range(used[s])]
            at = self.at(s, np.arange(past))
            for i, cache in enumerate(self.caches):
                x = rng.standard_normal((past, self.kv_heads, self.head_size))
                if self.scales:
                    cache[at], self.scales[i][at] = quantize(x)
                else:
                    cache[at] = x
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
        arguments = self.qkv.astype(dtype), None, None, *self.caches, *self.steps()
        heads = {"num_heads": self.heads, "kv_num_heads": self.kv_heads, "do_rotary": int(self.rotary_dim > 0)}
        scales = dict(zip(("key_scales", "value_scales"), self.scales, strict=False))
        return reference.paged_attention(*arguments, **heads, **scales, **self.attributes)

    def cpu(self, *, qkv=None, kind=np.float32, step=0.0, **options):
        """Run the kernels, on other rows than `self.qkv`, or with an output of another kind, where these are given."""
        qkv = self.qkv if qkv is None else qkv
        raw = (lambda a: a.view(np.uint16)) if self.pages is BF16 else (lambda a: a)
        caches, scales = ([array.copy() for array in arrays] for arrays in (self.caches, self.scales))
        output = np.full((len(self.qkv), self.heads * self.head_size), np.nan if kind is np.float32 else 77, kind)
        shape = {"num_rows": len(self.qkv), "pages_shape": caches[0].shape, "num_heads": self.heads}
        plan = step_plan.plan_step(*self.steps(), **shape, **self.attributes, **options)
        cpu.paged_attention(plan, qkv, *map(raw, caches), output, *scales, output_step=step)
        return output, *caches, *scales


@st.composite
def problems(
    draw,
    pages=(np.float32, BF16, np.int8),
    head_sizes=(8, 10, 32, 64, 80, 96, 128, 256),
    page_sizes=(1, 3, 16, 32, 256),
    past=150,
    new=(0, 1, 1, 2, 17, 70),
):
    ratio, kv_heads = draw(st.sampled_from([(1, 1), (1, 3), (3, 1), (3, 3), (5, 2), (6, 1), (7, 1), (16, 1)]))
    head_size = draw(st.sampled_from(head_sizes))
    lengths = st.tuples(st.integers(0, past), st.sampled_from(new))
    attributes = {
        "scale": draw(st.sampled_from([0.0, 0.07])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        "local_window_size": draw(st.sampled_from([-1, -1, 1, 2, 63, 64, 100])),
        "rotary_interleaved": draw(st.integers(0, 1)),
    }
    return Problem(
        draw(st.lists(lengths, min_size=1, max_size=5)),
        heads=ratio * kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        page_size=draw(st.sampled_from(page_sizes)),
        pages=draw(st.sampled_from(pages)),
        padding=draw(st.integers(0, 2)),
        rotary_dim=draw(st.sampled_from([0, 2, head_size // 2 // 2 * 2, head_size])),
        seed=draw(st.integers(0, 2**32)),
        attributes=attributes,
    )


def rotated(problem, x, position):
    """Rotary embedding as a product of complex numbers; x (n, heads, head_size)."""
    pair = np.arange(problem.rotary_dim // 2)
    interleaved = problem.attributes.get("rotary_interleaved")
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + len(pair))
    z = (x[..., first] + 1j * x[..., second]) * (problem.cos[position] + 1j * problem.sin[position])[:, None]
    x = x.copy()
    x[..., first], x[..., second] = z.real, z.imag
    return x


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


def check(problem, result, dtype=np.float32, rounded=False):
    """Pages hold what they must, and nothing else changed; the output is dense attention over what they hold.

    With `rounded`, queries after rotation and weights before they meet the values may be rounded to `dtype` as well.
    """
    output, caches, scales = result[0], result[1:3], result[3:]
    assert output.dtype == dtype
    held = [cache.astype(np.float64) for cache in caches]
    if scales:
        held = [codes * scale[..., None] for codes, scale in zip(held, scales, strict=True)]
    untouched = np.ones(caches[0].shape[:2], bool)
    qkv = problem.qkv.astype(dtype).astype(np.float64)
    qkv = qkv.reshape(len(qkv), problem.heads + 2 * problem.kv_heads, problem.head_size)
    q, k, v = np.split(qkv, [problem.heads, problem.heads + problem.kv_heads], axis=1)
    for s, past in enumerate(problem.past):
        new = slice(*problem.cumulative[s : s + 2])
        position = past + np.arange(new.stop - new.start)
        at = problem.at(s, position)
        untouched[at] = False
        for x, exact, cache in ((rotated(problem, k[new], position), False, held[0]), (v[new], True, held[1])):
            close_to(problem, cache[at], x, exact)
        everything = problem.at(s, np.arange(past + len(position)))
        k_all, v_all = (cache[everything] for cache in held)
        q_s, atol = rotated(problem, q[new], position), 1e-5
        if rounded:
            q_s = q_s.astype(dtype).astype(np.float64)
            atol += 1.5 * STEP[dtype] * np.abs(v_all).max(initial=0)
        expected = dense(problem, q_s, k_all, v_all, past)
        got = output[new].astype(np.float64).reshape(expected.shape)
        np.testing.assert_allclose(got, expected, rtol=STEP[dtype], atol=atol)
    assert not output[problem.cumulative[-1] :].any()
    for after, before in zip(result[1:], problem.caches + problem.scales, strict=True):
        assert after[untouched].tobytes() == before[untouched].tobytes()


def close_to(problem, held, x, exact):
    """What pages hold is `x` but for the rounding of their dtype; `x` itself is `exact` in float32, or nearly so."""
    if problem.pages is np.int8:
        step = np.abs(x).max(axis=-1, keepdims=True, initial=0) / 127
        assert (np.abs(held - x) <= (0.5 + 1e-4) * step + 2.0**-22).all()
    elif exact:
        np.testing.assert_array_equal(held, x.astype(problem.pages).astype(np.float64))
    else:
        np.testing.assert_allclose(held, x, rtol=STEP[problem.pages], atol=2.0**-22)


def same_bits(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
