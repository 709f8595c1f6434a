"""Arrival processes: order, counts, rates and burstiness against their formulas, fixed bits."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch.arrivals import (
    AllAtOnce,
    BurstArrivals,
    DiurnalArrivals,
    GammaArrivals,
    PoissonArrivals,
    WeibullArrivals,
)
from contbatch.errors import WorkloadError

RATE = st.floats(0.001, 1000)
ANY = st.one_of(
    RATE.map(PoissonArrivals),
    st.builds(GammaArrivals, RATE, st.floats(0.05, 20)),
    st.builds(WeibullArrivals, RATE, st.floats(0.1, 10)),
    st.builds(BurstArrivals, st.integers(1, 20), RATE),
    RATE.map(AllAtOnce),
    st.builds(
        DiurnalArrivals,
        st.lists(st.one_of(st.just(0.0), RATE), min_size=1, max_size=6).filter(any),
        st.floats(0.1, 5000),
    ),
)


@given(ANY, st.integers(0, 200), st.integers(0, 50), st.integers(0, 2**64))
def test_arrivals_are_sorted_counted_and_repeat(arrivals, n, more, seed):
    times = arrivals.times(n, seed, "x")
    assert times.shape == (n,)
    assert times.dtype == np.float64
    assert np.isfinite(times).all()
    assert (times >= 0).all()
    assert (np.diff(times) >= 0).all()
    assert arrivals.times(n + more, seed, "x")[:n].tolist() == times.tolist()


N = 50_000
GAPS = [
    (PoissonArrivals(4), 1 / 4, 1.0),
    (GammaArrivals(4, 0.3), 1 / 4, 0.3),
    (GammaArrivals(4, 1.0), 1 / 4, 1.0),
    (GammaArrivals(4, 3.0), 1 / 4, 3.0),
    (WeibullArrivals(2, 1.0), 2.0, 1.0),
    (WeibullArrivals(2, 2.0), 2 * math.gamma(1.5), math.sqrt(math.gamma(2) / math.gamma(1.5) ** 2 - 1)),
    (
        WeibullArrivals(2, 0.7),
        2 * math.gamma(1 + 1 / 0.7),
        math.sqrt(math.gamma(1 + 2 / 0.7) / math.gamma(1 + 1 / 0.7) ** 2 - 1),
    ),
]


@pytest.mark.parametrize(("arrivals", "mean", "cv"), GAPS)
def test_mean_gap_and_burstiness(arrivals, mean, cv):
    gaps = np.diff(arrivals.times(N + 1, 3, "gaps"))
    assert abs(gaps.mean() / mean - 1) < 4 * cv / math.sqrt(N), "beyond four standard errors of a mean"
    # The standard error of a CV is from the sample's own fourth moment (delta method, variance part).
    z = (gaps - gaps.mean()) / gaps.std()
    error = cv * (math.sqrt((np.mean(z**4) - 1) / (4 * N)) + cv / math.sqrt(N))
    assert abs(gaps.std() / gaps.mean() - cv) < 4 * error


def test_poisson_counts_have_the_variance_of_their_mean():
    times = PoissonArrivals(5).times(N, 1, "counts")
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(5, rel=0.02)
    assert counts.var() == pytest.approx(5, rel=0.05)


def test_bursts_and_all_at_once():
    assert BurstArrivals(3, 10).times(7, 0).tolist() == [0, 0, 0, 10, 10, 10, 20]
    assert AllAtOnce(2.5).times(3, 0).tolist() == [2.5] * 3


def test_a_day_repeats_and_each_hour_has_its_rate():
    arrivals = DiurnalArrivals((1.0, 0.0, 4.0), 100.0)
    times = arrivals.times(N, 5, "day")
    slot = (times % 300 // 100).astype(int)
    days = times[-1] / 300
    counts = np.bincount(slot, minlength=3)
    assert counts[1] == 0, "nobody comes at a rate of 0"
    for i, due in ((0, 100 * days), (2, 400 * days)):
        assert abs(counts[i] - due) < 4 * math.sqrt(due) + 400
    within = times[slot == 2] % 300 - 200
    assert within.mean() == pytest.approx(50, abs=1), "evenly within a slot"


def test_a_day_of_one_rate_is_poisson():
    day, poisson = DiurnalArrivals((4.0, 4.0), 10.0).times(1000, 1), PoissonArrivals(4.0).times(1000, 1)
    assert day == pytest.approx(poisson)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonArrivals(0), "rate must be a finite number > 0, got 0"),
        (lambda: PoissonArrivals("4"), "rate must be a finite number > 0, got '4'"),
        (lambda: GammaArrivals(1, 0.01), "cv must be in .0.05, 20., got 0.01"),
        (lambda: WeibullArrivals(1, 0.01), "shape must be at least 0.1, got 0.01"),
        (lambda: BurstArrivals(0, 1), r"size must be an integer in \[1, 10000000\], got 0"),
        (lambda: AllAtOnce(-1), "at_s must be finite seconds ≥ 0, got -1"),
        (lambda: DiurnalArrivals((0, 0)), "rates must be finite numbers ≥ 0, one of them > 0"),
        (lambda: DiurnalArrivals((1,), 0), "slot_s must be a finite number > 0, got 0"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(WorkloadError, match=message):
        make()


HASHES = {
    "PoissonArrivals": "944051a2ab105e43",
    "GammaArrivals": "3de12283f5dac139",
    "WeibullArrivals": "6c1556d185f7b228",
    "BurstArrivals": "1ab4400611c60304",
    "DiurnalArrivals": "bf25588ac21a36e3",
}


def test_the_same_bits_on_every_platform():
    made = [
        PoissonArrivals(3.7),
        GammaArrivals(3.7, 2.5),
        WeibullArrivals(0.3, 0.8),
        BurstArrivals(7, 0.3),
        DiurnalArrivals((0.3, 1.7, 0.0, 2.9), 33.3),
    ]
    found = {
        type(arrivals).__name__: hashlib.sha256(arrivals.times(2000, 7, "bits").astype("<f8").tobytes()).hexdigest()[
            :16
        ]
        for arrivals in made
    }
    assert found == HASHES
