"""Random numbers that are the same everywhere: accuracy against decimal arithmetic, moments, and fixed bits."""

import hashlib
import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch.portable import exp, exponentials, gammas, integers, log, normals, uniforms

ULP = 2.0**-52


def units_off(found, exact):
    """Distance of a float from an exact value, in units of the last place of that value."""
    return float(abs((Decimal(found) - exact) / exact)) / ULP


@given(st.floats(1e-300, 1e300))
def test_log_is_good_to_two_units(x):
    getcontext().prec = 40
    exact = Decimal(x).ln()
    assert exact == 0 or units_off(float(log(np.array([x]))[0]), exact) <= 2


@given(st.floats(-700, 700))
def test_exp_is_good_to_two_units(x):
    getcontext().prec = 40
    assert units_off(float(exp(np.array([x]))[0]), Decimal(x).exp()) <= 2


def test_exp_beyond_its_range_is_that_of_the_bound():
    assert list(exp(np.array([-1e9, 1e9]))) == list(exp(np.array([-700.0, 700.0])))


DRAWS = {
    "uniform": (lambda n, *key: uniforms(n, *key), 1 / 2, 1 / 12),
    "exponential": (lambda n, *key: exponentials(n, *key), 1, 1),
    "normal": (lambda n, *key: normals(n, *key), 0, 1),
    "gamma 0.2": (lambda n, *key: gammas(n, 0.2, *key), 0.2, 0.2),
    "gamma 1": (lambda n, *key: gammas(n, 1.0, *key), 1, 1),
    "gamma 30": (lambda n, *key: gammas(n, 30.0, *key), 30, 30),
}


@pytest.mark.parametrize("name", DRAWS)
def test_means_and_variances(name):
    draw, mean, variance = DRAWS[name]
    n = 200_000
    values = draw(n, 5, "moments")
    assert abs(values.mean() - mean) < 4 * math.sqrt(variance / n)
    fourth = np.mean((values - mean) ** 4)
    assert abs(np.mean((values - mean) ** 2) - variance) < 4 * math.sqrt((fourth - variance**2) / n)


def distance(values, cdf):
    """Kolmogorov's: the largest gap between the distribution of a sample and the true one."""
    values = np.sort(values)
    true = np.array([cdf(v) for v in values])
    steps = np.arange(len(values) + 1) / len(values)
    return max(np.max(steps[1:] - true), np.max(true - steps[:-1]))


@pytest.mark.parametrize(
    ("values", "cdf"),
    [
        (normals(5000, 1), lambda x: (1 + math.erf(x / math.sqrt(2))) / 2),
        (exponentials(5000, 1), lambda x: 1 - math.exp(-x)),
        # Gamma of shape 1/2 is half a squared normal; of shape 2 it is 1 - (1 + x) e^-x.
        (gammas(5000, 0.5, 1), lambda x: math.erf(math.sqrt(x))),
        (gammas(5000, 2.0, 1), lambda x: 1 - (1 + x) * math.exp(-x)),
    ],
)
def test_distributions_by_kolmogorovs_distance(values, cdf):
    assert distance(values, cdf) < 1.95 / math.sqrt(len(values)), "beyond the 0.1 % point of Kolmogorov's distribution"


@pytest.mark.parametrize("name", DRAWS)
@given(st.integers(1, 50), st.integers(0, 300), st.integers(0, 2**70))
def test_the_first_draws_do_not_depend_on_how_many_follow(name, n, more, seed):
    draw = DRAWS[name][0]
    assert draw(n, seed, "a").tolist() == draw(n + more, seed, "a")[:n].tolist()


def test_uniforms_are_never_0_or_1_and_keys_tell_streams_apart():
    values = uniforms(100_000, 0, "a")
    assert values.min() > 0
    assert values.max() < 1
    assert uniforms(3, 0, "a").tolist() != uniforms(3, 0, "b").tolist()
    assert uniforms(3, 0, "a").tolist() != uniforms(3, 1, "a").tolist()


# Bits that must never change, on any platform: they were made on x86-64 Linux with numpy 2.4.
BITS = {
    "integers": "984addce2dff9e90",
    "uniform": "e676e39c174ae3b0",
    "exponential": "bb21b9f73907c9e6",
    "normal": "1749642173509171",
    "gamma 0.2": "de7d730a429a4169",
    "gamma 1": "0b843d409e479993",
    "gamma 30": "39398d68849ef8a2",
}


def test_the_bits_of_every_draw():
    made = {"integers": integers(1000, 7, "bits"), **{name: DRAWS[name][0](1000, 7, "bits") for name in DRAWS}}
    found = {
        name: hashlib.sha256(values.astype(values.dtype.newbyteorder("<")).tobytes()).hexdigest()[:16]
        for name, values in made.items()
    }
    assert found == BITS
