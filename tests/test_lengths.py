"""Length distributions: bounds whatever the parameters, frequencies against the formulas, fixed bits."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch.errors import WorkloadError
from contbatch.lengths import (
    CappedExponential,
    Fixed,
    Geometric,
    LogNormal,
    Quantiles,
    Uniform,
    Zipf,
    as_lengths,
    zipf_ranks,
)

SOME = st.integers(1, 3000)
REAL = st.floats(0.01, 5000)
PAIR = st.tuples(SOME, SOME).map(sorted)


@st.composite
def quantiles(draw):
    inner = draw(st.lists(st.floats(0.001, 0.999), unique=True, max_size=5))
    levels = [0.0, *sorted(inner), 1.0]
    return Quantiles(levels, sorted(draw(st.lists(SOME, min_size=len(levels), max_size=len(levels)))))


def bounds(lengths):
    match lengths:
        case Fixed():
            return lengths.tokens, lengths.tokens
        case Quantiles():
            return lengths.tokens[0], lengths.tokens[-1]
        case _:
            return getattr(lengths, "low", 1), lengths.high


ANY = st.one_of(
    SOME.map(Fixed),
    PAIR.map(lambda p: Uniform(*p)),
    st.builds(lambda m, s, p: LogNormal(m, s, p[1], p[0]), REAL, st.floats(0.01, 20), PAIR),
    st.builds(lambda a, p: Zipf(a, p[1], p[0]), st.floats(0, 30), PAIR),
    st.builds(Geometric, st.floats(1.001, 5000), SOME),
    st.builds(CappedExponential, REAL, SOME),
    quantiles(),
)


@given(ANY, st.integers(0, 200), st.integers(0, 50), st.integers(0, 2**64))
def test_lengths_stay_in_their_bounds_and_repeat(lengths, n, more, seed):
    drawn = lengths.draw(n, seed, "x")
    low, high = bounds(lengths)
    assert drawn.dtype == np.int64
    assert len(drawn) == n
    assert ((drawn >= low) & (drawn <= high)).all()
    assert lengths.draw(n + more, seed, "x")[:n].tolist() == drawn.tolist()


N = 100_000


def shares(lengths, values):
    drawn = lengths.draw(N, 11, "shares")
    return [np.mean(drawn == value) for value in values]


def close(found, probabilities):
    """Whether shares of N draws are within 4.5 standard errors of their probabilities."""
    errors = [4.5 * math.sqrt(p * (1 - p) / N) for p in probabilities]
    return all(abs(f - p) <= e for f, p, e in zip(found, probabilities, errors, strict=True))


def test_uniform_has_both_ends_and_all_alike():
    assert close(shares(Uniform(5, 14), range(5, 15)), [0.1] * 10)


def test_zipf_goes_by_rank():
    total = sum(1 / k**1.5 for k in range(1, 101))
    assert close(shares(Zipf(1.5, 109, 10), [10, 11, 20, 109]), [k**-1.5 / total for k in (1, 2, 11, 100)])
    assert close(shares(Zipf(0, 4), [1, 2, 3, 4]), [0.25] * 4)


def test_geometric_has_the_end_at_every_token():
    p = 1 / 64
    assert close(shares(Geometric(64, 256), [1, 2, 100]), [p, p * (1 - p), p * (1 - p) ** 99])
    assert close(shares(Geometric(64, 256), [256]), [(1 - p) ** 255]), "what is longer is cut to the most"


def test_exponential_rounds_and_is_capped():
    below = lambda x: 1 - math.exp(-x / 128)  # noqa: E731
    found = shares(CappedExponential(128, 512), [1, 100, 512])
    assert close(found, [below(1.5), below(100.5) - below(99.5), 1 - below(511.5)])


def test_lognormal_has_its_median():
    drawn = LogNormal(200, 1.0, 100_000).draw(N, 3, "median")
    assert np.mean(drawn < 200) == pytest.approx(0.5, abs=0.01)
    # One sigma above lies e times the median.
    assert np.mean(drawn <= round(200 * math.e)) == pytest.approx(0.8413, abs=0.005)


def test_quantiles_are_met_and_straight_between():
    lengths = Quantiles((0, 0.5, 0.9, 1), (10, 110, 1110, 2000))
    drawn = lengths.draw(N, 3, "q")
    assert np.mean(drawn <= 110) == pytest.approx(0.5, abs=0.01)
    assert np.mean(drawn <= 60) == pytest.approx(0.25, abs=0.01)
    assert np.mean(drawn <= 1110) == pytest.approx(0.9, abs=0.005)
    assert np.mean(drawn <= 610) == pytest.approx(0.7, abs=0.01)


def test_ranks_of_one_are_all_the_same():
    assert zipf_ranks(5, 1, 2.0, 0).tolist() == [0] * 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(0), "tokens must be an integer in .1, 10000000., got 0"),
        (lambda: Fixed(1.5), "tokens"),
        (lambda: Uniform(5, 4), "high must be an integer in .5, 10000000., got 4"),
        (lambda: LogNormal(0, 1, 10), "median must be a finite number > 0, got 0"),
        (lambda: LogNormal(10, math.nan, 10), "sigma must be a finite number > 0, got nan"),
        (lambda: Zipf(-1, 10), "exponent must be a finite number ≥ 0, got -1"),
        (lambda: Geometric(1, 10), "mean must be a finite number > 1, got 1"),
        (lambda: CappedExponential(10, 0), "high"),
        (lambda: Quantiles((0, 0.5), (1, 2)), "levels must be rising from 0 to 1"),
        (lambda: Quantiles((0, 0.5, 0.5, 1), (1, 2, 3, 4)), "levels must be rising from 0 to 1"),
        (lambda: Quantiles((0, 1), (1, 2, 3)), "tokens must be 2 lengths, one for each level"),
        (lambda: Quantiles((0, 1), (2, 1)), "tokens must be never falling"),
        (lambda: as_lengths("long", "prompt"), "prompt must be a distribution .* got 'long'"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(WorkloadError, match=message):
        make()


HASHES = {
    "Uniform": "aec34858d48c2280",
    "LogNormal": "c7ec3a8318995111",
    "Zipf": "3bef5ebd403316a2",
    "Geometric": "c83372478d87c158",
    "CappedExponential": "b6c2c249d27d0ba5",
    "Quantiles": "dd7202306369b35e",
}


def test_the_same_lengths_on_every_platform():
    made = [
        Uniform(32, 512),
        LogNormal(200, 1.2, 4000),
        Zipf(1.2, 2000),
        Geometric(64, 256),
        CappedExponential(128, 1536),
        Quantiles((0, 0.5, 0.9, 1), (1, 129, 420, 1000)),
    ]
    found = {
        type(lengths).__name__: hashlib.sha256(repr(lengths.draw(2000, 7, "bits").tolist()).encode()).hexdigest()[:16]
        for lengths in made
    }
    assert found == HASHES
