import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from contbatch import draw as compiled
from contbatch import sampler
from contbatch.cut import address_of
from contbatch.draw_blocks import BLOCK, LEAST_EXPONENT, weigh
from contbatch.errors import InvalidRequestError, LogitsError
from contbatch.plugins.paged_attention import helpers
from contbatch.sampler import sample, uniforms
from contbatch.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")
BELOW_ONE = math.nextafter(1.0, 0.0)
TWO = np.zeros((2, 3), np.float32)
GREEDY, WARM = SamplingParams(), SamplingParams(temperature=1.0)


def f32(*rows):
    return np.array(rows, np.float32)


def draw(row, params, positions, seed=0):
    """Tokens of one request, whose logits never change, at many positions."""
    n = len(positions)
    token_ids, errors = sample(np.broadcast_to(row, (n, len(row))), [params] * n, [seed] * n, positions)
    assert errors == {}
    return token_ids.tolist()


def numpy_uniform(seed, position):
    return np.random.Generator(np.random.Philox(key=seed, counter=position)).random()


def oracle_probabilities(row, params, slack):
    """All tokens sorted, all filters in float64, one after another; `slack` moves the limits of min-p and top-p."""
    row = row.astype(np.float64)
    order = np.argsort(-row, kind="stable")
    below = row[order] - row[order[0]]
    p = np.exp(below / params.temperature)
    if params.min_p > 0:  # a difference divided by a large temperature may be rounded to 0
        p[below < min(math.log(params.min_p) + slack, 0.0) * params.temperature] = 0
    p[params.top_k if params.top_k > 0 else len(row) :] = 0
    p /= p.sum()
    if params.top_p < 1:
        p[np.concatenate([[0.0], np.cumsum(p)[:-1]]) >= max(params.top_p + slack, 1e-9)] = 0
    kept = np.zeros(len(row))
    kept[order] = p / p.sum()
    return kept


def oracle_tokens(row, params, u):
    """Tokens that float32 rounding may choose: nearly always a single one."""
    chosen = set()
    for slack in (-3e-6, 0.0, 3e-6):
        reached = np.cumsum(oracle_probabilities(row, params, slack))
        targets = np.clip([u - 3e-6, u, u + 3e-6], 0.0, reached[-1] * BELOW_ONE)
        chosen.update(np.searchsorted(reached, targets, side="right").tolist())
    return chosen


@st.composite
def logit_rows(draw_from, max_size):
    size = draw_from(st.integers(1, max_size))
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    row = rng.standard_normal(size) * draw_from(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    row = np.round(row * 2) / 2 if draw_from(st.booleans()) else row
    row[rng.random(size) < draw_from(st.sampled_from([0.0, 0.3, 0.9]))] = -INF
    row[rng.integers(size)] = rng.standard_normal()
    return row.astype(np.float32)


filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    top_k=st.one_of(st.sampled_from([-1, 0, 1, 10**9]), st.integers(1, 60)),
    top_p=st.one_of(st.sampled_from([1.0, BELOW_ONE, 1 - 1e-8]), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


@settings(max_examples=150, deadline=None)
@given(row=logit_rows(max_size=40) | logit_rows(max_size=3000), params=filters, seed=st.integers(0, 2**64 - 1))
def test_chosen_token_is_the_oracles(row, params, seed):
    for position, token in enumerate(draw(row, params, range(5), seed)):
        assert row[token] > -INF
        assert token in oracle_tokens(row, params, numpy_uniform(seed, position))


@pytest.mark.parametrize("vocab_size", [49152, 50257])
@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.95}, {"top_k": 3000, "top_p": 0.9, "min_p": 1e-3}])
def test_chosen_token_is_the_oracles_on_real_vocabularies(vocab_size, options):
    rng = np.random.default_rng(1)
    logits = np.round(rng.standard_normal((3, vocab_size)) * 32).astype(np.float32) / 16
    logits[:, -5:] = logits.max()
    params = SamplingParams(temperature=0.8, **options)
    token_ids, _ = sample(logits, [params] * 3, [5] * 3, range(3))
    for i in range(3):
        assert token_ids[i] in oracle_tokens(logits[i], params, numpy_uniform(5, i))


@pytest.mark.parametrize(
    ("options", "odds"),  # worked out by hand
    [
        ({}, [1, 4, 3, 2]),
        ({"temperature": 0.5}, [1, 16, 9, 4]),
        ({"top_k": 2}, [0, 4, 3, 0]),
        ({"top_p": 0.75}, [0, 4, 3, 2]),
        ({"top_p": 0.65}, [0, 4, 3, 0]),
        ({"min_p": 0.4}, [0, 4, 3, 2]),
        # Temperature comes before min-p and top-p, and each of min-p and top-k before top-p.
        ({"temperature": 0.5, "min_p": 0.3}, [0, 16, 9, 0]),
        ({"temperature": 0.5, "top_p": 0.8}, [0, 16, 9, 0]),
        ({"min_p": 0.4, "top_p": 0.75}, [0, 4, 3, 0]),
        ({"top_k": 3, "top_p": 0.75}, [0, 4, 3, 0]),
    ],
)
def test_frequencies(options, odds):
    tokens = draw(np.log(f32(0.1, 0.4, 0.3, 0.2)), WARM.replace(**options), range(2000))
    seen, expected = np.bincount(tokens, minlength=4), 2000 * np.array(odds) / sum(odds)
    assert not seen[expected == 0].any()
    seen, expected = seen[expected > 0], expected[expected > 0]
    assert ((seen - expected) ** 2 / expected).sum() <= {2: 15.1, 3: 18.4, 4: 21.1}[len(seen)]  # chi-square, 99.99%


def test_frequencies_over_many_tokens():
    row = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    seen = np.histogram(draw(row, WARM, range(4000)), bins=10, range=(0, 1000))[0]
    weights = np.exp(row.astype(np.float64)).reshape(10, 100).sum(axis=1)
    expected = 4000 * weights / weights.sum()
    assert ((seen - expected) ** 2 / expected).sum() <= 33.7  # chi-square, 9 degrees of freedom, 99.99%


@given(st.lists(st.tuples(st.integers(0, 2**128 - 1), st.integers(0, 2**64 - 1)), max_size=5))
def test_uniforms_are_those_of_numpys_philox(pairs):
    got = uniforms([seed for seed, _ in pairs], [position for _, position in pairs])
    assert got.tolist() == [numpy_uniform(*pair) for pair in pairs]


def test_golden_values():
    assert uniforms([7, 2**64 - 1], [3, 2**40]).tolist() == [0.44205212947108785, 0.20353554039193045]
    # The uniform numbers of seed 42 start 0.820, 0.368, 0.876, 0.066, 0.986, 0.967: the first digit is the token.
    assert draw(np.zeros(10, np.float32), WARM, [0, 1, 2, 3, 4, 5, 1], seed=42) == [8, 3, 8, 0, 9, 9, 3]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_its_batch(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = rng.standard_normal((8, 700)).astype(np.float32)
    logits[data.draw(st.integers(0, 7)), 3] = NAN
    params = [data.draw(st.just(GREEDY) | filters) for _ in range(8)]
    seeds, positions = rng.integers(0, 3, 8), rng.integers(0, 3, 8)
    together, errors = sample(logits, params, seeds, positions)
    keep = data.draw(st.permutations(range(8)))[: data.draw(st.integers(1, 8))]
    some, some_errors = sample(logits[keep], *([values[i] for i in keep] for values in (params, seeds, positions)))
    assert some.tolist() == together[keep].tolist()
    assert [keep[i] for i in some_errors] == [i for i in keep if i in errors]


def test_memory_layout_and_the_callers_array():
    logits = np.random.default_rng(0).standard_normal((6, 900)).astype(np.float32)
    params = [GREEDY, WARM, SamplingParams(temperature=1.0, top_k=3)] * 2
    logits.setflags(write=False)
    tokens, errors = sample(logits, params, range(6), range(6))
    assert (tokens.dtype, tokens.shape, errors) == (np.int64, (6,), {})
    for same in (np.asfortranarray(logits), np.repeat(logits, 2, axis=1)[:, ::2]):
        assert sample(same, params, range(6), range(6))[0].tolist() == tokens.tolist()
    assert sample(logits[:0], [], [], [])[0].shape == (0,)


def test_greedy_takes_the_lowest_of_equals_beside_any_row():
    logits = f32([1, 3, 3, 0], [-INF, -INF, -5, -5], [0, 1, 2, 3])
    params = [GREEDY, SamplingParams(top_k=3, top_p=0.9, min_p=0.1), SamplingParams(temperature=1.0, top_k=64)]
    alone = sample(logits[2:], params[2:], [1], [0])[0].tolist()
    assert sample(logits, params, [None, None, 1], [0] * 3)[0].tolist() == [1, 2, *alone]
    assert sample(logits[::-1], params[::-1], [1, None, None], [0] * 3)[0].tolist() == [*alone, 2, 1]


@pytest.mark.parametrize("top_k", [-1, 7, 8, 10**12])
def test_top_k_of_all_or_more_keeps_all(top_k):
    row = np.linspace(-1, 1, 7, dtype=np.float32)
    assert draw(row, WARM.replace(top_k=top_k), range(100)) == draw(row, WARM, range(100))


@pytest.mark.parametrize("scale", [1.0, 1e30, 3e38])
@pytest.mark.parametrize(
    ("temperature", "options"),
    [(1e-4, {}), (1e-300, {}), (0.7, {"top_p": 1e-4}), (0.7, {"min_p": 1.0}), (1e300, {"top_k": 1})],
)
def test_extreme_values_act_as_argmax(temperature, options, scale):
    row = f32(-1, -INF, 0.5, 1, 0.9) * np.float32(scale)
    with np.errstate(all="raise"):
        assert set(draw(row, SamplingParams(temperature=temperature, **options), range(50))) == {3}


def test_which_tokens_are_kept():
    for options in ({"top_k": 2}, {"top_p": 0.5}):
        assert set(draw(f32(-1, 2, 2, 2, 2), SamplingParams(temperature=1e-2, **options), range(200))) == {1, 2}
    # Logits whose probabilities round to the same number still rank.
    nearly = f32(0.1, np.nextafter(np.float32(0.1), np.float32(1)))
    assert set(draw(nearly, WARM.replace(top_p=1e-4), range(50))) == {1}
    assert set(draw(f32(-INF, 30, -30, 0), SamplingParams(temperature=1e300), range(200))) == {1, 2, 3}
    # Differences beyond float32 are too large for any temperature.
    for options in ({}, {"top_p": 0.99}, {"top_k": 3}):
        params = SamplingParams(temperature=1e300, **options)
        assert set(draw(f32(-INF, 3e38, -3e38, 3e38), params, range(200))) == {1, 3}
    # Both zeros are equal, so the lower id ranks first, whichever sign it has.
    for zeros in (f32(-1, 0.0, -0.0), f32(-1, -0.0, 0.0)):
        assert set(draw(zeros, WARM.replace(top_p=1e-3), range(50))) == {1}


@pytest.mark.parametrize("temperature", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 0.9999, 1 - 1e-6])
def test_a_nucleus_is_the_oracles_in_steep_and_flat_rows(temperature, top_p):
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((4, 3001)).astype(np.float32)
    logits[1], logits[2] = 0.0, np.round(logits[2])  # all alike, and many ties
    params = SamplingParams(temperature=temperature, top_p=top_p)
    for row in logits:
        for position, token in enumerate(draw(row, params, range(40), seed=9)):
            assert token in oracle_tokens(row, params, numpy_uniform(9, position))


@st.composite
def odd_rows(draw_from):
    """Large rows of every slope: a token alone, all alike, few levels, ties in the middle, tails long and short."""
    size = draw_from(st.sampled_from([1, 127, 128, 129, 5000, 49152, 50257]))
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    rank = rng.permutation(size)
    row = {
        "alone": lambda: np.where(rank == 0, 0.0, -INF),
        "alike": lambda: np.full(size, -3.25),
        "levels": lambda: np.floor(rank * 3 / size),
        "ties": lambda: np.minimum(np.maximum(rank * 8 / size, 3), 5),
        "zipf": lambda: -np.log1p(rank),
        "exponential": lambda: -rank / 700.0,
        "normal": lambda: rng.standard_normal(size),
        "near zero": lambda: rng.standard_normal(size) * 1e-38,
    }[draw_from(st.sampled_from(["alone", "alike", "levels", "ties", "zipf", "exponential", "normal", "near zero"]))]()
    row = row * draw_from(st.sampled_from([1.0, 0.01, 4.0])) + draw_from(st.sampled_from([0.0, 100.0]))
    row[rng.random(size) < draw_from(st.sampled_from([0.0, 0.0, 0.5]))] = -INF
    row[rank == 0] = row.max() if row.max() > -INF else 0.0
    return row.astype(np.float32)


odd_filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-3, 0.8, 1.0, 3.0, 1e6, 1e300]),
    top_k=st.one_of(st.just(0), st.sampled_from([1, 2, 100, 400, 4999, 49151])),
    top_p=st.one_of(st.just(1.0), st.sampled_from([1e-12, 1e-3, 0.5, 0.95, 0.9999, BELOW_ONE])),
    min_p=st.one_of(st.just(0.0), st.sampled_from([5e-324, 1e-6, 0.05, BELOW_ONE, 1.0])),
)


@settings(max_examples=150, deadline=None)
@given(row=odd_rows(), params=odd_filters, seed=st.integers(0, 2**64 - 1))
def test_chosen_token_is_the_oracles_in_odd_rows(row, params, seed):
    for position, token in enumerate(draw(row, params, range(2), seed)):
        assert row[token] > -INF
        assert token in oracle_tokens(row, params, numpy_uniform(seed, position))


def call_nobody(function, *args):
    pass


def call_once_it_is_late(function, *args):
    late.append((function, args))


def call_at_once(function, *args):
    function(*args)


def test_without_memory_nothing_is_claimed():
    """A row that a helper claimed, and then had no room for, would be waited for without end."""
    progress, tokens = np.zeros(2, np.int64), np.full(1, -7)
    with pytest.raises(MemoryError):
        compiled.draw(progress, np.zeros(1, np.int64), 2**55, np.ones((1, 5)), tokens, False)
    assert progress.tolist() == [0, 0]
    assert tokens.tolist() == [-7]


late = []


@pytest.mark.parametrize("call", [helpers.call_helper, call_nobody, call_at_once, call_once_it_is_late])
def test_whoever_helps_changes_nothing(monkeypatch, call):
    calls = []
    monkeypatch.setattr(helpers, "call_helper", lambda *job: (calls.append(1), call(*job)))
    monkeypatch.setattr(helpers, "CPUS", {0, 1, 2})
    logits = np.random.default_rng(0).standard_normal((24, 49152)).astype(np.float32)
    logits[3, 40000] = NAN
    asks = [GREEDY, WARM, WARM.replace(top_k=50), WARM.replace(top_p=0.9), WARM.replace(min_p=0.1, temperature=3.0)]
    params = [asks[i % 5] for i in range(24)]
    adjusted = {5: logits[0] * 3, 6: np.repeat(logits[1], 2)[::2]}
    token_ids, errors = sample(logits, params, range(24), range(24), adjusted)
    assert len(calls) == 2
    assert list(errors) == [3]
    for i in range(24):
        row = adjusted.get(i, logits[i])[None]
        assert token_ids[i] == sample(row, params[i : i + 1], [i], [i])[0][0]
    before = token_ids.tolist()
    for function, args in late:
        function(*args)
    assert token_ids.tolist() == before
    late.clear()


def test_who_leads_waits_for_rows_that_others_have_claimed():
    progress, token_ids = np.array([2, 1]), np.zeros(2, np.int64)
    args = progress, np.zeros(2, np.int64), 8, np.zeros((2, 5)), token_ids
    compiled.draw(*args, False)
    leading = threading.Thread(target=compiled.draw, args=[*args, True])
    leading.start()
    leading.join(0.05)
    assert leading.is_alive()
    progress[1] = 2
    leading.join()


def test_weights_are_within_two_ulp():
    @njit
    def many(logits, scale, weights):
        for i in range(0, logits.size, BLOCK):
            weigh(address_of(logits) + 4 * i, logits.max(), scale, address_of(weights) + 4 * i)

    logits = np.linspace(0, LEAST_EXPONENT, 1000 * BLOCK, dtype=np.float32)
    weights = np.empty_like(logits)
    many(logits, np.float32(1), weights)
    np.testing.assert_allclose(weights, np.exp2(logits.astype(np.float64)), rtol=2.0**-22)
    assert weights[0] == 1


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 1e-9}])
@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (BELOW_ONE, 400)])
def test_ends_of_the_uniform_never_choose_the_impossible(monkeypatch, options, u, token):
    row = np.full(600, -INF, np.float32)
    row[[1, 300, 400]] = 0.0
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, positions: np.full(len(seeds), u))
    assert draw(row, SamplingParams(temperature=0.3, **options), [0]) == [token]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, top_k=2, top_p=0.9)])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF])
@pytest.mark.parametrize("place", [0, 1, 15, 16, 17, 63, 500, 998])
def test_a_bad_logit_fails_its_row_only(params, bad, place):
    logits = np.random.default_rng(0).standard_normal((3, 999)).astype(np.float32)
    healthy, _ = sample(logits, [params] * 3, [1, 2, 3], [0, 0, 0])
    logits[1, place] = bad
    token_ids, errors = sample(logits, [params] * 3, [1, 2, 3], [0, 0, 0])
    assert token_ids.tolist() == [healthy[0], -1, healthy[2]]
    assert {row: type(error) for row, error in errors.items()} == {1: LogitsError}
    assert str(errors[1]).endswith(f"got {np.float32(bad)} at token {place}")


def test_nan_beside_infinity_and_rows_of_minus_infinity():
    logits = f32([INF, NAN, 0], [-INF, -INF, -INF], [NAN, NAN, NAN], [-INF, -3e38, -INF])
    token_ids, errors = sample(logits, [WARM] * 4, [0] * 4, [0] * 4)
    assert sorted(errors) == [0, 1, 2]
    assert token_ids.tolist() == [-1, -1, -1, 1]
    assert "got -inf at token 0" in str(errors[1])


@pytest.mark.parametrize(
    ("logits", "rows", "error", "message"),
    [
        (TWO.astype(np.float64), [(WARM, 0, 0)] * 2, LogitsError, r"got float64 \(2, 3\)"),
        (TWO[0], [(WARM, 0, 0)] * 2, LogitsError, r"got float32 \(3,\)"),
        (TWO[:, :0], [(WARM, 0, 0)] * 2, LogitsError, r"got float32 \(2, 0\)"),
        (TWO.tolist(), [(WARM, 0, 0)] * 2, LogitsError, "got list"),
        (TWO, [(WARM, 0, 0)], LogitsError, r"2 rows .* got \(1, 1, 1\)"),
        (TWO, [(WARM, 0, 0), (WARM, 2**128, 0)], InvalidRequestError, r"seed must be .* got 3402823669209384634633746"),
        (TWO, [(WARM, None, 0), (WARM, 0, 0)], InvalidRequestError, r"seed must be .* got None"),
        (TWO, [(WARM, 0, 0), (WARM, 0, -3)], InvalidRequestError, r"position must be .* got -3"),
    ],
)
def test_bad_arguments(logits, rows, error, message):
    with pytest.raises(error, match=message):
        sample(logits, *zip(*rows, strict=True))
