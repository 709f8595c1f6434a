"""The GPU kernel against dense attention and the executable spec, in Triton's interpreter: no GPU has run it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_problem import BF16, Problem, check, problems, same_bits

from contbatch.errors import RunnerError, UnsupportedModelError
from contbatch.inputs import TYPES, padded
from contbatch.plugins.paged_attention.variant import HEAD_SIZES, Tactic, Variant, default_tactics

pytest.importorskip("triton", reason="the GPU kernel is written in Triton: pip install 'contbatch[ptx]' (Linux)")
import interpreted

TACTICS = [interpreted.SMALL, Tactic(16, 32, 1, 1), default_tactics(64)[2]]
SIZES = {"pages": [np.float16, BF16], "head_sizes": HEAD_SIZES, "page_sizes": [1, 3, 16], "new": [0, 1, 1, 2, 17]}


def passes(problem, **options):
    result = interpreted.run(problem, **options)
    check(problem, result, problem.pages, rounded=True)
    return result


@settings(max_examples=12)
@given(problems(**SIZES, past=40), st.sampled_from(TACTICS), st.booleans(), st.sampled_from([1, 1, 2, 3, 5]))
def test_is_dense_attention_and_the_reference(problem, tactic, packed, num_splits):
    output, *caches = passes(problem, tactic=tactic, packed=packed, num_splits=num_splits)
    expected, *expected_caches = problem.reference(problem.pages)
    step = {np.float16: 2.0**-10, BF16: 2.0**-7}[problem.pages]
    for got, want in ((output, expected), *zip(caches, expected_caches, strict=True)):
        got, want = got.astype(np.float64), want.astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=4 * step, atol=12 * step)


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 16, 20])
def test_every_ratio_of_heads(ratio):  # CASES 23; 20 heads are more than a program's 16 rows
    passes(Problem([(20, 1), (0, 18), (3, 2)], heads=2 * ratio, kv_heads=2, pages=np.float16, rotary_dim=64))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_lengths_around_a_page(page_size, head_size):  # CASES 24
    edges = [max(0, page_size - 1), page_size, page_size + 1]
    lengths = [(0, 0), (0, 1), *((n, 1) for n in edges), (0, page_size + 1), (page_size - 1, 2)]
    passes(Problem(lengths, page_size=page_size, head_size=head_size, pages=np.float16, rotary_dim=head_size))


@pytest.mark.parametrize("window", [1, 5, 16, 17])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_window(window, num_splits):
    problem = Problem([(50, 3), (0, 20), (33, 1)], pages=np.float16, attributes={"local_window_size": window})
    result = passes(problem, num_splits=num_splits)
    problem.table[0, : max(0, 50 - window + 1) // 16] = -1  # pages before every window may be unmapped
    assert same_bits(interpreted.run(problem, num_splits=num_splits), result)


def test_steps_padded_for_a_cuda_graph_write_nothing_more():
    problem = Problem([(20, 2), (5, 1)], pages=np.float16, rotary_dim=64)
    result = passes(problem)
    arrays = problem.qkv[:, 0].astype(np.int64), *problem.steps()[:3], np.zeros(1, np.int64)
    new = padded(dict(zip(TYPES, arrays, strict=True)), 8, problem.table.shape[1] + 3)
    problem.cumulative, problem.past, problem.table = list(new.values())[1:4]
    problem.qkv = np.concatenate([problem.qkv, np.ones((5, problem.qkv.shape[1]), np.float32)])
    output, *caches = passes(problem)
    assert same_bits([output[:3], *caches], result)


def test_257_sequences():  # CASES 26
    passes(Problem([(i % 3, int(i % 4 == 0)) for i in range(257)], heads=1, padding=3, pages=BF16))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_padding_is_zero(num_splits):  # CASES 25, 26
    problem = Problem([(7, 0), (0, 0)], padding=20, pages=np.float16)
    empty = interpreted.run(problem, num_splits=num_splits)
    assert same_bits(empty, (np.zeros((20, 192), np.float16), *problem.caches))


def test_nan_stays_in_its_sequence():
    problem = Problem([(20, 1), (9, 3)], pages=np.float16)
    clean = interpreted.run(problem)[0]
    problem.qkv[0, 0] = np.nan
    output = interpreted.run(problem)[0]
    assert np.isnan(output[0, :64]).all()
    assert output[1:].tobytes() == clean[1:].tobytes()


def test_result_does_not_depend_on_the_batch():
    lengths = [(40, 1), (0, 20), (17, 3)]
    batch = Problem(lengths, heads=6, kv_heads=2, pages=np.float16, rotary_dim=32)
    output = interpreted.run(batch)[0]
    for s, (past, _) in enumerate(lengths):
        new = slice(*batch.cumulative[s : s + 2])
        alone = Problem([lengths[s]], heads=6, kv_heads=2, pages=np.float16, rotary_dim=32, page_size=3)
        alone.cos, alone.sin, alone.qkv = batch.cos, batch.sin, batch.qkv[new]
        for mine, theirs in zip(alone.caches, batch.caches, strict=True):
            mine[alone.at(0, np.arange(past))] = theirs[batch.at(s, np.arange(past))]
        assert interpreted.run(alone)[0].tobytes() == output[new].tobytes()


def far_and_near(variant, inputs):
    """Run in the interpreter's process: pages at the end of 8.6 GB, nearly all of it untouched."""
    num_pages, num_near = 2**31 // (16 * 64) + 64, len(inputs[3])
    try:
        huge = [np.zeros((num_pages, 16, 1, 64), np.float16) for _ in range(2)]
    except MemoryError:
        return None
    for cache, source in zip(huge, inputs[3:5], strict=True):
        cache[-num_near:] = source
    table = np.where(inputs[7] < 0, -1, inputs[7] + num_pages - num_near).astype(np.int32)
    output, *caches = interpreted.launch_here(variant, [*inputs[:3], *huge, *inputs[5:7], table, None, None])
    clean = not any(cache[:num_near].any() for cache in huge)
    return clean, (output, *(cache[-num_near:] for cache in caches))


def test_offsets_beyond_2_to_the_31():  # CASES 21
    problem = Problem([(40, 3), (20, 1)], pages=np.float16)
    variant = Variant("float16", 3, 1, 64, 16, interpreted.SMALL)
    qkv = problem.qkv.astype(np.float16)
    inputs = [qkv, None, None, *problem.caches, *problem.steps()]
    far = interpreted.submit(far_and_near, variant, inputs)
    if far is None:
        pytest.skip("8.6 GB of untouched memory cannot be reserved here")
    assert far[0]
    assert same_bits(far[1], interpreted.launch(variant, inputs))


def garbage(seed):
    """Run in the interpreter's process: indices that mean nothing, caches between guards; tells whether those hold."""
    rng = np.random.default_rng(seed)
    whole = [np.full((7, 4, 1, 64), 7, np.float16) for _ in range(2)]
    huge, small = rng.integers(-(2**31), 2**31, (2, 12)), rng.integers(-3, 9, (2, 12))
    cumulative, past = np.where(rng.random((2, 12)) < 0.5, huge, small).astype(np.int32)
    table = np.where(rng.random((11, 3)) < 0.5, 99999999, rng.integers(-2, 5, (11, 3))).astype(np.int32)
    qkv, tables = rng.standard_normal((9, 320)).astype(np.float16), np.ones((2, 5, 32), np.float16)
    variant = Variant("float16", 3, 1, 64, 4, interpreted.SMALL, rotary_dim=64, num_splits=1 + seed % 2)
    caches = [cache[2:5] for cache in whole]
    interpreted.launch_here(variant, [qkv, None, None, *caches, cumulative, past[:11], table, *tables])
    return all((cache[part] == 7).all() for cache in whole for part in (slice(2), slice(5, None)))


@pytest.mark.parametrize("seed", range(6))
def test_garbage_indices_touch_nothing_outside(seed):
    assert interpreted.submit(garbage, seed)


def test_combine_is_the_weighted_mean_of_the_splits():
    rng, rows = np.random.default_rng(0), (2, 3)
    variant = Variant("float16", 3, 1, 80, 16, interpreted.SMALL, num_splits=4)
    partial, lse = rng.standard_normal((4, *rows, 80), np.float32), rng.uniform(-40, 40, (4, *rows)).astype(np.float32)
    lse[0, 0] = lse[:, 1, 2] = -np.inf  # a split that saw nothing, and a row that is padding
    partial[np.isneginf(lse)] = 0
    got = interpreted.submit(interpreted.combine_here, variant, partial, lse, np.full((2, 240), np.nan, np.float32))
    weight = np.exp2(lse.astype(np.float64))[..., None]
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num((weight * partial).sum(0) / weight.sum(0)).reshape(2, 240)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": "float32"}, UnsupportedModelError, "float16 or bfloat16, got dtype 'float32'"),
        ({"head_size": 72}, UnsupportedModelError, r"\(64, 80, 96, 128, 256\), got 72"),
        ({"rotary_dim": 66}, UnsupportedModelError, r"even number in 0..head_size 64, got 66"),
        ({"rotary_dim": 3}, UnsupportedModelError, "got 3"),
        ({"num_heads": 4, "kv_num_heads": 3}, RunnerError, "multiple of kv_num_heads 3, got 4"),
        ({"local_window_size": 0}, RunnerError, "got 0"),
        ({"page_size": 0}, RunnerError, "≥ 1, got 0 and 1"),
        ({"num_splits": 0}, RunnerError, "≥ 1, got 16 and 0"),
    ],
)
def test_what_no_variant_can_be(change, error, message):
    good = {"dtype": "float16", "num_heads": 3, "kv_num_heads": 1, "head_size": 64, "page_size": 16}
    with pytest.raises(error, match=message):
        Variant(**{**good, "tactic": interpreted.SMALL, **change})
