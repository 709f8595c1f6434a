"""Confidence intervals against scipy's own, and against how often they hold the truth."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import contbatch as cb
from contbatch.errors import InvalidRequestError


def table():
    random = np.random.default_rng(1)
    rows = [(policy, rate, seed) for policy in ("b", "a") for rate in (1, 2) for seed in range(5)]
    frame = pd.DataFrame(rows, columns=["policy", "rate", "seed"])
    return frame.assign(ttft=random.exponential(size=20), tokens=random.integers(0, 9, 20), error=None)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_bounds_are_students(level):
    rows = table()
    found = cb.confidence(rows, ["policy", "rate"], level=level)
    assert list(found.columns) == [
        *("policy", "rate", "runs", "ttft", "ttft_low", "ttft_high", "tokens", "tokens_low", "tokens_high")
    ]
    assert list(zip(found.policy, found.rate, strict=True)) == [("b", 1), ("b", 2), ("a", 1), ("a", 2)]
    for row in found.itertuples():
        values = rows[(rows.policy == row.policy) & (rows.rate == row.rate)].ttft
        low, high = stats.t.interval(level, len(values) - 1, values.mean(), stats.sem(values))
        assert (row.runs, row.ttft, row.ttft_low, row.ttft_high) == pytest.approx((5, values.mean(), low, high))


def test_nineteen_of_twenty_intervals_hold_the_truth():
    random = np.random.default_rng(2)
    rows = pd.DataFrame({"group": np.repeat(np.arange(2000), 4), "x": random.normal(7.0, 3.0, 8000)})
    found = cb.confidence(rows, "group", ["x"])
    share = ((found.x_low <= 7) & (found.x_high >= 7)).mean()
    assert abs(share - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_undefined_values_are_left_out_and_one_has_no_bounds():
    rows = pd.DataFrame({"who": list("aaab"), "x": [1.0, 3.0, math.nan, 5.0]})
    a, b = cb.confidence(rows, "who").itertuples()
    assert (a.runs, a.x) == (3, 2.0)
    assert a.x_high - a.x == pytest.approx(stats.t.ppf(0.975, 1))
    assert (b.runs, b.x) == (1, 5.0)
    assert math.isnan(b.x_low)
    assert math.isnan(b.x_high)


def test_a_sweep_goes_in_as_it_comes_out():
    load = cb.Poisson(rate=2, num_requests=20)
    points = [cb.Experiment(workload=load.replace(rate=rate, seed=seed)) for rate in (1, 4) for seed in range(3)]
    found = cb.confidence(cb.sweep(points, cache=False, progress=False), "rate", ["ttft_s_p50"])
    assert found.rate.tolist() == [1, 4]
    assert found.runs.tolist() == [3, 3]
    assert (found.ttft_s_p50_low < found.ttft_s_p50).all()


def test_bad_values_are_refused():
    with pytest.raises(InvalidRequestError, match="'missing'"):
        cb.confidence(table(), "missing")
    with pytest.raises(InvalidRequestError, match="'missing'"):
        cb.confidence(table(), "rate", ["missing"])
    with pytest.raises(InvalidRequestError, match="level"):
        cb.confidence(table(), "rate", level=1)
    with pytest.raises(InvalidRequestError, match="by"):
        cb.confidence(table(), [])
