"""Attention over int8 pages by matrix instructions, against float64 with a bound; and without, for other CPUs."""

import ctypes
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from paged_problem import Problem, check, problems, rotated, same_bits

from contbatch.plugins.paged_attention import amx_permission, team
from contbatch.plugins.paged_attention.amx import open_tiles
from contbatch.plugins.paged_attention.amx_permission import may_use_matrices

needs_amx = pytest.mark.skipif(not may_use_matrices(), reason="this CPU has no AMX for int8, or may not use it")
TILE, ULP = 64, 2.0**-23


@pytest.fixture(params=[pytest.param(True, marks=needs_amx), False], ids=["amx", "without"])
def matrices(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(team, "may_use_matrices", lambda: False)
    return request.param


@st.composite
def grouped(draw):
    problem = draw(problems(pages=[np.int8], head_sizes=(64, 128), page_sizes=(1, 3, 16, 64)))
    ratio = draw(st.integers(1, 8))
    shape = {name: getattr(problem, name) for name in ("lengths", "head_size", "page_size", "rotary_dim", "seed")}
    kv_heads = draw(st.integers(1, 2))
    return Problem(**shape, heads=ratio * kv_heads, kv_heads=kv_heads, pages=np.int8, attributes=problem.attributes)


@needs_amx
@settings(max_examples=60, deadline=None)
@given(grouped(), st.integers(1, 2))
def test_error_is_that_of_three_digits(problem, num_threads):
    result = problem.cpu(num_threads=num_threads)
    check(problem, result)
    output, keys, values, key_scales, value_scales = (a.astype(np.float64) for a in result)
    size, group = problem.head_size, problem.heads // problem.kv_heads
    for s, past in enumerate(problem.past):
        rows = np.arange(*problem.cumulative[s : s + 2])
        at = problem.at(s, np.arange(past + len(rows)))
        query = problem.qkv[rows, : problem.heads * size].astype(np.float64).reshape(-1, problem.heads, size)
        query = rotated(problem, query, past + np.arange(len(rows)))
        for t, head in np.ndindex(len(rows), problem.heads):
            h = head // group
            tensors = (a[at][: past + t + 1, h] for a in (keys, values, key_scales, value_scales))
            expected, bound = exact(problem, query[t, head], *tensors)
            found = output[rows[t], head * size : (head + 1) * size]
            assert (np.abs(found - expected) <= bound).all()


def exact(problem, query, keys, values, key_scales, value_scales):
    """Return one row of attention in float64, and how far one may be off that is cut into digits.

    A query's numbers are off by 2⁻²⁴ of the largest, and by what float32 makes of rotation and scale (four roundings of
    at most √2 of it); a sum and its three factors by six roundings. Softcap and exp2 add eight. Weights times their
    scales are off by half a unit of 2⁻²² of the largest of their tile; all sums by a rounding for each tile or key.
    """
    cap, window = problem.attributes["softcap"], problem.attributes["local_window_size"]
    seen = slice(max(0, len(keys) - window) if window > 0 else 0, len(keys))
    tile = np.arange(len(keys))[seen] // TILE
    keys, values, key_scales, value_scales = (a[seen] for a in (keys, values, key_scales, value_scales))
    scale = problem.attributes["scale"] or problem.head_size**-0.5
    score = keys @ query * key_scales * scale
    digits = 4 * ULP * np.abs(query).max() * np.abs(keys).sum(axis=1) * key_scales * scale
    if cap:
        score = cap * np.tanh(score / cap)
    eps = digits.max() + 8 * ULP * (1 + np.abs(score).max())
    weights = np.exp(score - score.max())
    products = weights * value_scales
    largest = np.array([products[tile == t].max() for t in tile])
    rounded = (ULP * largest[:, None] * np.abs(values)).sum(axis=0)
    mass = np.abs(products[:, None] * values).sum(axis=0)
    sums = np.expm1(2 * eps) + (len(set(tile)) * 4 + 16) * ULP
    return products @ values / weights.sum(), (rounded + sums * mass) / weights.sum() + 1e-30


@settings(max_examples=20, deadline=None)
@given(problem=grouped())
def test_without_them_it_is_dense_attention(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(team, "may_use_matrices", lambda: False)
        check(problem, problem.cpu())


@pytest.mark.parametrize(("heads", "size"), [(2, 64), (3, 64), (5, 128), (8, 64)])
def test_bits_depend_on_neither_pages_nor_chunks_nor_threads(matrices, heads, size):
    shape = {"heads": heads, "head_size": size, "pages": np.int8, "attributes": {"local_window_size": 150}}
    batch = Problem([(600, 70)], **shape)
    expected, past = batch.cpu(num_threads=1)[0], np.arange(600)
    for page_size, step in ((1, 70), (3, 1), (64, 9)):
        problem = Problem([(600, 70)], page_size=page_size, **shape)
        for mine, theirs in zip(problem.caches + problem.scales, batch.caches + batch.scales, strict=True):
            mine[problem.at(0, past)] = theirs[batch.at(0, past)]
        outputs = []
        for first in range(0, 70, step):
            problem.qkv = batch.qkv[first : first + step]
            problem.past = np.array([600 + first], np.int32)
            problem.cumulative = np.array([0, len(problem.qkv)], np.int32)
            output, *arrays = problem.cpu(num_threads=2)
            problem.caches, problem.scales = arrays[:2], arrays[2:]
            outputs.append(output)
        assert np.concatenate(outputs).tobytes() == expected.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("new", [1, 30])
def test_a_query_that_is_not_finite_is_nan_and_no_other(matrices, new, value):
    problem = Problem([(70, new)], heads=6, kv_heads=2, pages=np.int8)
    clean = problem.cpu()[0].reshape(new, 6, 64)
    problem.qkv[0, 64 + 5] = value  # of the second head
    output = problem.cpu()[0].reshape(new, 6, 64)
    assert np.isnan(output[0, 1]).all()
    output[0, 1] = clean[0, 1]
    assert output.tobytes() == clean.tobytes()


@pytest.mark.parametrize("i", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("new", [1, 30])
def test_a_scale_of_nan_reaches_those_who_see_it(matrices, new, i):
    problem = Problem([(70, new)], heads=6, kv_heads=2, pages=np.int8, attributes={"local_window_size": 10})
    clean = problem.cpu()[0].reshape(new, 6, 64)
    for position, reached in ((0, 0), (69, min(new, 9))):
        spoilt = Problem([(70, new)], heads=6, kv_heads=2, pages=np.int8, attributes={"local_window_size": 10})
        spoilt.scales[i][*spoilt.at(0, np.array([position])), 1] = np.nan
        output = spoilt.cpu()[0].reshape(new, 6, 64)
        assert np.isnan(output[:reached, 3:]).all()
        assert output[:, :3].tobytes() == clean[:, :3].tobytes()
        if matrices:  # without, values outside of the window but within its first tile count as 0 · NaN
            assert output[reached:].tobytes() == clean[reached:].tobytes()


@pytest.mark.parametrize("new", [1, 7])
def test_scores_of_minus_infinity_in_a_whole_tile(matrices, new):
    outputs = []
    for scale in (1e3, 2e36):  # the scores of the latter are beyond float32
        problem = Problem([(100, new)], pages=np.int8)
        problem.qkv[:, :192] = 1
        at = problem.at(0, np.arange(80))
        problem.caches[0][at], problem.scales[0][at] = -127, scale
        outputs.append(problem.cpu()[0])
    assert np.isfinite(outputs[0]).all()
    assert outputs[0].tobytes() == outputs[1].tobytes()


@pytest.mark.parametrize("factor", [1e-37, 1e-20, 1e20, 1e35])
def test_values_of_any_size(matrices, factor):
    problem = Problem([(100, 3)], pages=np.int8)
    expected = problem.cpu()[0]
    problem.scales[1] *= np.float32(factor)
    problem.qkv[:, 256:] *= np.float32(factor)
    np.testing.assert_allclose(problem.cpu()[0], expected * factor, rtol=1e-4, atol=2e-6 * factor + 1e-30)


@needs_amx
def test_they_are_taken_where_they_can_be(monkeypatch):
    taken = [team._matrices(np.empty((1, 16, 1, size), kind)) for size in (64, 80) for kind in (np.int8, np.float32)]
    assert taken == [True, None, None, None]
    problem = Problem([(200, 3)], pages=np.int8)
    with_them = problem.cpu()
    monkeypatch.setattr(team, "may_use_matrices", lambda: False)
    without = problem.cpu()
    assert same_bits(with_them[1:], without[1:])
    assert 0 < np.abs(with_them[0] - without[0]).max() < 2e-6


def test_no_permission_no_matrices(monkeypatch):
    class Refusing:
        def syscall(self, *_):
            return -1

    ask = may_use_matrices.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda _: Refusing())
        assert not ask()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert not ask()
    codegen = amx_permission.cpu_target.target_context.codegen()
    with monkeypatch.context() as patch:
        patch.setattr(type(codegen), "magic_tuple", lambda _: ("", "", "+avx2,-amx-int8"))
        assert not ask()


@intrinsic
def _store_configuration(_context, out):
    def codegen(context, builder, signature, args):
        address = builder.bitcast(
            context.make_array(signature.args[0])(context, builder, args[0]).data, ir.IntType(8).as_pointer()
        )
        kind = ir.FunctionType(ir.VoidType(), [address.type])
        builder.call(builder.module.declare_intrinsic("llvm.x86.sttilecfg", (), kind), [address])
        return context.get_dummy_value()

    return types.void(out), codegen


@needs_amx
def test_tile_registers_are_given_back():
    @njit
    def look(opened):
        if opened:
            open_tiles()
        out = np.ones(64, np.uint8)
        _store_configuration(out)
        return out

    Problem([(100, 1)], pages=np.int8).cpu(num_threads=1)
    assert not look(False).any()
    assert look(True).any(), "it can tell"
    Problem([(100, 1)], pages=np.int8).cpu(num_threads=1)
    assert not look(False).any()
