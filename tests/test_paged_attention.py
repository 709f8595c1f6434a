"""The op against dense attention; CASES 21 and 23 to 26, and the promises of the README. CASES 22: see _contract."""

import hashlib
import importlib
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from paged_problem import BF16, Problem, check, problems, same_bits

from contbatch import draw, ranks
from contbatch.plugins.paged_attention import cpu, kernels, reference, step_plan, team
from contbatch.plugins.paged_attention.kernels import lead
from contbatch.plugins.paged_attention.tile import exp2

PAGES = [np.float32, BF16, np.int8]


@settings(max_examples=25, deadline=None)
@given(problems(pages=[np.float32, np.float16, BF16, np.int8]), st.sampled_from([np.float32, np.float16, BF16]))
def test_reference_is_dense_attention(problem, dtype):
    arrays = problem.qkv, *problem.caches, *problem.scales
    before = [array.tobytes() for array in arrays]
    check(problem, problem.reference(dtype), dtype)
    assert before == [array.tobytes() for array in arrays]


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 3))
def test_cpu_is_dense_attention_and_the_reference(problem, num_threads):
    result = problem.cpu(num_threads=num_threads)
    check(problem, result)
    expected = problem.reference()
    # A key that lies halfway between two bfloat16 or codes may be rounded either way; a score then moves by that much.
    tolerance = 2e-5 if problem.pages is np.float32 else 0.05
    np.testing.assert_allclose(result[0], expected[0], rtol=tolerance, atol=tolerance)
    assert same_bits(result[2::2], expected[2::2])  # values, which are not rotated, and their scales


@settings(max_examples=40, deadline=None)
@given(problems(past=700), st.floats(2.0**-12, 0.5), st.integers(1, 3))
def test_bfloat16_and_codes_are_the_float32_rounded(problem, step, num_threads):
    halves = problem.qkv.astype(BF16)
    problem.qkv = halves.astype(np.float32)
    qkv = halves.view(np.uint16) if problem.pages is np.int8 else problem.qkv  # each pair is compiled on its own
    output, *pages = problem.cpu(qkv=qkv)
    check(problem, (output, *pages))
    halves, *same = problem.cpu(qkv=qkv, kind=np.uint16, num_threads=num_threads)
    assert same_bits(same, pages)
    np.testing.assert_array_equal(halves.view(BF16), output.astype(BF16))
    codes, *same = problem.cpu(qkv=qkv, kind=np.int8, step=step, num_threads=num_threads)
    assert same_bits(same, pages)
    np.testing.assert_array_equal(codes, np.clip(np.rint(output / np.float32(step)), -128, 127))


def test_codes_half_to_even_and_of_what_is_no_number():
    values = np.array([0.5, 1.5, -2.5, 126.5, 127.5, 200, -128.5, -300, np.inf, -np.inf, np.nan, 1e30], np.float32)
    problem = Problem([(0, 1)])
    problem.qkv[0, 256:] = np.resize(values, 64) * np.float32(0.25)
    codes = problem.cpu(kind=np.int8, step=0.25)[0][0, : len(values)]
    assert codes.tolist() == [0, 2, -2, 126, 127, 127, -128, -128, 127, -128, 0, 127]


def test_unpacked_query_is_the_packed_one():
    problem = Problem([(5, 3), (0, 20)], heads=6, kv_heads=2)
    query, key, value = np.split(problem.qkv, [6 * 64, 8 * 64], axis=1)
    caches = *problem.caches, *problem.steps()
    unpacked = reference.paged_attention(query, key, value, *caches, num_heads=6, kv_num_heads=2)
    assert same_bits(unpacked, problem.reference())


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 16])
def test_every_ratio_of_heads(ratio):  # CASES 23
    problem = Problem([(70, 1), (0, 66), (3, 9)], heads=2 * ratio, kv_heads=2, rotary_dim=64)
    check(problem, problem.cpu())


@pytest.mark.parametrize("pages", PAGES)
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
    for cache, source in zip(huge, small.caches, strict=True):
        cache[num_pages - 1 - np.arange(len(source))] = source.view(np.uint16)
    output = np.empty((4, 3 * 64), np.float32)
    steps = small.cumulative, small.past, far
    plan = step_plan.plan_step(*steps, num_rows=4, pages_shape=huge[0].shape, num_heads=3)
    cpu.paged_attention(plan, small.qkv, *huge, output)
    moved = (cache[num_pages - 1 - np.arange(len(small.caches[0]))] for cache in huge)
    assert same_bits((output, *moved), small.cpu())
    assert not any(cache[: len(small.caches[0])].any() for cache in huge)


def test_sees_only_itself_and_padding_is_zero():  # CASES 25, 26
    problem = Problem([(30, 5), (0, 1), (0, 0)], padding=4, attributes={"local_window_size": 1})
    for output, *_ in (problem.cpu(), problem.reference()):
        np.testing.assert_allclose(output[:6].reshape(6, 3, 64), np.repeat(problem.qkv[:6, None, 256:], 3, axis=1))
        assert output[6:].tobytes() == bytes(output[6:].nbytes)
    empty = Problem([(7, 0), (0, 0)], padding=2)
    assert same_bits(empty.cpu(), (np.zeros((2, 192), np.float32), *empty.caches))


def test_257_sequences():  # CASES 26
    problem = Problem([(i % 40, 1 + i % 3) for i in range(257)], head_size=8, padding=3)
    check(problem, problem.cpu())
    check(problem, problem.reference())


@pytest.mark.parametrize(
    ("heads", "head_size", "attributes"),
    [
        (6, 64, {}),
        (6, 64, {"local_window_size": 50}),
        (6, 64, {"local_window_size": 700, "softcap": 2.0}),
        (2, 64, {}),
        (4, 128, {}),
        (8, 64, {"softcap": 2.0}),
        (10, 64, {}),
        (6, 80, {}),
    ],
)
@pytest.mark.parametrize("pages", PAGES)
def test_bits_depend_on_the_sequence_alone(pages, heads, head_size, attributes):
    lengths = [(130, 1), (0, 100), (64, 63), (1, 2), (200, 1), (1600, 1), (1000, 50), (15, 1), (16, 1), (0, 1)]
    shape = {"heads": heads, "kv_heads": 2, "head_size": head_size, "pages": pages, "attributes": attributes}
    shape["rotary_dim"] = 32
    batch = Problem(lengths, **shape)
    outputs = [batch.cpu(num_threads=n)[0] for n in (1, 2, 3)]
    assert outputs[0].tobytes() == outputs[1].tobytes() == outputs[2].tobytes()
    for s, (past, _) in enumerate(lengths):
        new = slice(*batch.cumulative[s : s + 2])
        # Alone, in chunks of 7 tokens and then one by one, on pages of 3 tokens.
        alone = Problem([lengths[s]], **shape, page_size=3)
        alone.cos, alone.sin = batch.cos, batch.sin
        for mine, theirs in zip(alone.caches + alone.scales, batch.caches + batch.scales, strict=True):
            mine[alone.at(0, np.arange(past))] = theirs[batch.at(s, np.arange(past))]
        pieces, start = [], new.start
        while start < new.stop:
            size = 7 if new.stop - start > 10 else 1
            alone.qkv = batch.qkv[start : start + size]
            alone.cumulative, alone.past = np.array([0, size], np.int32), np.array([past + start - new.start], np.int32)
            piece, *arrays = alone.cpu()
            alone.caches, alone.scales = arrays[:2], arrays[2:]
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


@pytest.mark.parametrize("new", [1, 7])  # from pages, and in a tile
def test_scores_of_minus_infinity_in_a_whole_tile(new):
    outputs = []
    for key in (-1e4, -3e38):  # the scores of the latter are beyond float32
        problem = Problem([(100, new)])
        problem.qkv[:, :192] = 1
        problem.caches[0][problem.at(0, np.arange(80))] = key
        outputs.append(problem.cpu()[0])
    assert np.isfinite(outputs[0]).all()
    assert outputs[0].tobytes() == outputs[1].tobytes()


def test_two_threads_at_once():
    problems = [Problem([(300, 1), (0, 90)], heads=9, kv_heads=3, seed=seed) for seed in range(2)]
    expected, results = [p.cpu(num_threads=1) for p in problems], [[], []]

    def work(i):
        results[i] = [problems[i].cpu(num_threads=2) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(len(results[i]) == 20 and all(same_bits(r, expected[i]) for r in results[i]) for i in range(2))


def test_after_an_interrupt_no_helper_writes(monkeypatch):
    """It comes before the helper's work may begin: they must neither do it nor wait for ever."""
    problem = Problem([(300, 1)] * 9, heads=9, kv_heads=3)
    expected = problem.cpu()
    outputs = []

    def interrupted(_layer, _qkv, _output, _bells, _progress, _addresses, _tasks, keys, *_):
        outputs.append(keys[0])
        raise KeyboardInterrupt

    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(team, "lead", interrupted)
        for _ in range(20):
            with pytest.raises(KeyboardInterrupt):
                problem.cpu(num_threads=2)
    assert all(same_bits([cache], problem.caches[:1]) for cache in outputs)
    assert same_bits(problem.cpu(num_threads=2), expected)
    assert threading.active_count() <= before + 1


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


@pytest.mark.parametrize("compiled", [kernels, draw, ranks])
def test_a_change_in_any_module_of_the_kernels_compiles_them_again(compiled):
    found, files = set(), {compiled.__name__}
    while files - found:
        found |= files
        for name in files.copy():
            text = source_of(name).decode()
            files |= set(re.findall(r"^from (contbatch\.[\w.]+) import", text, re.MULTILINE))
    content = b"".join(source_of(name) for name in sorted(found - {compiled.__name__}))
    digest = hashlib.sha256(content).hexdigest()[:16]
    assert digest == compiled.SOURCES, f'write SOURCES = "{digest}" into {compiled.__name__}'


def source_of(module):
    return Path(importlib.import_module(module).__file__).read_bytes()


def test_compiled_once_per_dtype_of_pages_and_way_of_multiplying():
    for pages in PAGES:
        Problem([(1, 1)], pages=pages, rotary_dim=2, attributes={"softcap": 1.0, "rotary_interleaved": 1}).cpu()
    kinds = {(signature[7].dtype, signature[19], signature[1].dtype) for signature in lead.signatures}
    assert len({kind for kind, *_ in kinds}) == 3
    assert len(kinds) == len(lead.signatures)
