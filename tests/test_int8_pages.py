"""Pages of int8: how far they are from what they stand for, on their own, in the operator and under a model."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from paged_problem import Problem, problems
from ragged import Driver, prompts_for, run_steps, step
from tiny_llm import greedy, write_tiny

import contbatch as cb
from contbatch.errors import InvalidRequestError, LogitsError, RunnerError
from contbatch.export import export_onnx
from contbatch.model import random_model
from contbatch.plugins.paged_attention.int8 import dequantize, quantize
from contbatch.runners.cpu import CPUModel
from contbatch.runners.model_runner import draw
from contbatch.step import PageMove

FINITE = st.floats(-(2.0**99), 2.0**99, width=32) | st.floats(-1, 1, width=32)
VECTORS = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 70)), elements=FINITE)
ANY = arrays(np.float32, (3, 64), elements=st.floats(width=32) | st.sampled_from([1e-38, -1e-45, 3e-36, 2.5, -0.5]))
NOTHING = 127 * 2.0**-126
"""Vectors below this are zero."""


@given(VECTORS)
def test_the_error_is_at_most_half_a_scale(x):
    codes, scales = quantize(x)
    assert (codes.dtype, scales.dtype, scales.shape) == (np.int8, np.float32, x.shape[:1])
    largest = np.abs(x).max(axis=-1).astype(np.float64)
    np.testing.assert_allclose(scales, np.where(largest < NOTHING, 0, largest / 127), rtol=2.0**-23)
    assert (np.abs(codes.astype(int)).max(axis=-1) == np.where(largest < NOTHING, 0, 127)).all()
    exact = codes * scales.astype(np.float64)[:, None]
    error = np.abs(exact - x)
    assert (
        error <= np.maximum((0.5 + 2.0**-16) * scales[:, None], np.where(largest < NOTHING, NOTHING, 0)[:, None])
    ).all()
    np.testing.assert_allclose(dequantize(codes, scales), exact, rtol=2.0**-24)


@given(VECTORS, st.integers(-10, 10), st.booleans())
def test_powers_of_two_and_signs_go_into_the_scale(x, exponent, negative):
    x = np.where(np.abs(x).max(axis=-1, keepdims=True) < 1e-30, 0, x)
    codes, scales = quantize(x)
    others, factors = quantize(np.ldexp(-x if negative else x, exponent))
    np.testing.assert_array_equal(others, -codes if negative else codes)
    np.testing.assert_array_equal(factors, np.ldexp(scales, exponent))


def test_halves_go_to_even_and_what_is_not_finite_is_nan():
    codes, scales = quantize(
        [[127, 0.5, 1.5, -2.5, 126.5], [0, 0, 0, 0, 0], [1, 2, np.inf, 3, 4], [0, np.nan, 1, 1, 1]]
    )
    np.testing.assert_array_equal(codes[:2], [[127, 0, 2, -2, 126], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(scales, np.array([1, 0, np.nan, np.nan], np.float32))
    assert np.isnan(dequantize(codes, scales)[2:]).all()


@settings(max_examples=50, deadline=None)
@given(ANY, st.integers(0, 2))
def test_the_kernel_stores_the_bits_of_the_spec(x, kv_head):
    problem = Problem([(5, 3)], heads=3, kv_heads=3, pages=np.int8)
    problem.qkv[:, 64 * (6 + kv_head) : 64 * (7 + kv_head)] = x
    problem.qkv[:, 64 * (3 + kv_head) : 64 * (4 + kv_head)] = x[::-1]  # keys, with no rotary tables stored as they are
    _, *stored = problem.cpu()
    at = problem.at(0, np.arange(5, 8))
    for codes, scales, vectors in zip(stored[:2], stored[2:], (x[::-1], x), strict=True):
        expected = quantize(vectors)
        np.testing.assert_array_equal(codes[at][:, kv_head], expected[0])
        np.testing.assert_array_equal(scales[at][:, kv_head], expected[1])


@settings(max_examples=40, deadline=None)
@given(problems(pages=[np.float32], past=90))
def test_attention_is_as_near_as_the_scales_say(problem):
    """Scores move by at most eps = |scale| · |q|₁ · half a key's scale, weights then by a factor within e^±(2 eps)."""
    exact, coarse = problem.reference(), Problem(**{**vars_of(problem), "pages": np.int8})
    for i, cache in enumerate(problem.caches):
        coarse.caches[i], coarse.scales[i] = quantize(cache)
    output, *_, key_scales, value_scales = coarse.cpu()
    size = problem.head_size
    for s, past in enumerate(problem.past):
        new, length = slice(*problem.cumulative[s : s + 2]), int(past + np.diff(problem.cumulative)[s])
        if new.start == new.stop:
            continue
        at = problem.at(s, np.arange(length))
        query = problem.qkv[new, : problem.heads * size].reshape(-1, problem.heads, size)
        group = problem.heads // problem.kv_heads
        half_key, half_value = (0.5001 * x[at].max(axis=0).repeat(group) for x in (key_scales, value_scales))
        # A rotation turns two numbers into two whose absolute values sum up to at most √2 times as much.
        norm = np.abs(query).sum(axis=2) * (2**0.5 if problem.rotary_dim else 1)
        eps = (problem.attributes["scale"] or size**-0.5) * norm * half_key
        largest = np.abs(exact[2][at]).max(axis=(0, 2)).repeat(group)
        bound = np.expm1(2 * eps) * largest + half_value
        error = np.abs(output - exact[0])[new].reshape(-1, problem.heads, size).max(axis=2)
        assert (error <= bound + 1e-5).all()


def vars_of(problem):
    names = "lengths", "heads", "kv_heads", "head_size", "page_size", "padding", "rotary_dim", "seed", "attributes"
    return {name: getattr(problem, name) for name in names}


@pytest.mark.parametrize("run", [Problem.cpu, Problem.reference])
def test_scales_belong_to_int8_and_to_nothing_else(run):
    problem = Problem([(5, 2)], pages=np.int8)
    scales, problem.scales = problem.scales, []
    with pytest.raises(RunnerError, match=r"have key_scales and value_scales, got int8 and \[\]"):
        run(problem)
    problem = Problem([(5, 2)])
    problem.scales = scales
    with pytest.raises(RunnerError, match=r"got float32 and \['key_scales', 'value_scales'\]"):
        run(problem)
    problem = Problem([(5, 2)], pages=np.int8)
    problem.scales = [scales[0], scales[1][:1]]
    with pytest.raises(RunnerError, match=r"value_scales must have shape \(4, 16, 1\), got \(1, 16, 1\)"):
        run(problem)


# ---- under a model ---------------------------------------------------------------------------------------------------

STEPS = [[(0, 20), (1, 3)], [(1, 30), (0, 1)], [(0, 1), (1, 1)], [(0, 17), (1, 1)]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return export_onnx(random_model(0), tmp_path_factory.mktemp("model") / "m.onnx")


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_logits_are_near_those_of_float32_pages(path, precision):
    """A number is off by at most 1/254 of its vector's largest, as a root mean square by 0.002 of it.

    Under two layers and logits with a standard deviation of 4 that comes to some hundredths.
    """
    sequences = prompts_for(STEPS, 256)
    exact, coarse = (
        np.concatenate(run_steps(CPUModel(path, 24, 4, precision=precision, kv_dtype=kind), sequences, STEPS))
        for kind in ("f32", "int8")
    )
    assert 1e-3 < np.sqrt(((coarse - exact) ** 2).mean()) < 0.08
    again = np.concatenate(run_steps(CPUModel(path, 80, 3, kv_dtype="int8", precision=precision), sequences, STEPS, 1))
    np.testing.assert_array_equal(again, coarse)


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_a_page_moves_as_a_whole(path, kv_dtype):
    model = CPUModel(path, 6, 4, kv_dtype=kv_dtype, num_host_pages=2)
    model.forward(step((np.arange(8), 0), table=[[0, 1]]))
    expected = model.forward(step(([7], 8), table=[[0, 1, 2]])).copy()
    model.move_pages([PageMove("out", 0, 1), PageMove("copy", 1, 5), PageMove("copy", 2, 0), PageMove("in", 1, 4)])
    np.testing.assert_array_equal(model.forward(step(([7], 8), table=[[4, 5, 2]])), expected)


def test_memory_is_that_of_codes_and_scales(path, monkeypatch):
    size = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 100_000}
    config = CPUModel(path, 1).config
    monkeypatch.setattr(os, "sysconf", size.get)
    for kind, element, scale in (("f32", 4, 0), ("bf16", 2, 0), ("int8", 1, 4)):
        page = 2 * config.num_layers * 16 * config.kv_num_heads * (config.head_size * element + scale)
        with pytest.raises(InvalidRequestError, match=f"at most {100_000 // page}: a page takes {page} bytes"):
            CPUModel(path, 100_000, kv_dtype=kind)
        assert sum(x.nbytes for x in CPUModel(path, 2, kv_dtype=kind)._pages.arrays) == 2 * page


def test_nan_stays_in_its_sequence():
    problem = Problem([(20, 1), (9, 3)], pages=np.int8)
    clean = problem.cpu()[0]
    problem.qkv[0, 64 * 4] = np.inf  # of the value
    output = problem.cpu()[0]
    assert np.isnan(output[0]).all()
    assert output[1:].tobytes() == clean[1:].tobytes()


@pytest.mark.parametrize("of", [2, 3], ids=["keys", "values"])
def test_what_float32_cannot_hold_is_nan_and_ends_its_own_request_with_an_error(path, of):
    """Codes of ±127 with such a scale are infinite, as are sums of products with them."""
    logits = []
    for scale in (None, 3e38):
        model = CPUModel(path, 24, 4, kv_dtype="int8")
        driver = Driver(model, prompts_for(STEPS, 256))
        driver.run([(0, 20), (1, 30)])
        if scale:
            model._pages.arrays[of][:, driver.pages[0]] = scale
        driver.run([(0, 1), (1, 1)])
        logits.append([rows[-1] for rows in driver.logits])
    (_, clean), (huge, other) = logits
    assert np.isnan(huge).all()
    assert other.tobytes() == clean.tobytes()
    tokens, errors = draw(np.concatenate([huge, other]), [cb.Request(name, [1]) for name in "ab"])
    assert [(name, type(error)) for name, error in errors.items()] == [("a", LogitsError)]
    assert tokens["b"] == other.argmax()


def test_pages_of_an_llm(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "cache"))
    folder = write_tiny(tmp_path)
    answers = {}
    for kind in (None, "f32", "int8"):
        with cb.LLM(folder, num_pages=20, page_size=4, kv_dtype=kind, prefix_cache=True) as llm:
            answers[kind] = [o.token_ids for o in llm.generate([[5, 6, 7] * 6] * 3, greedy(6), progress=False)]
            assert llm.description()["kv_dtype"] == (kind or "f32"), "what the pages are, not what was asked for"
    assert answers[None] == answers["f32"]
    assert answers["int8"][0] == answers["int8"][1] == answers["int8"][2]
