"""A cost model fitted to steps whose true costs are known."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import contbatch as cb
from contbatch.errors import CostModelError, MissingDependencyError
from contbatch.lengths import Uniform
from contbatch.measured import NEEDED
from contbatch.workload import Poisson

TRUE = {
    "step_s": 0.008,
    "token_s": 4e-4,
    "seq_s": 0.0,
    "logits_s": 3e-4,
    "decode_context_s": 2e-7,
    "prefill_pair_s": 1e-7,
    "resize_s": 0.003,
}
KINKED = TRUE | {
    "few_rows": 4,
    "many_rows_s": 0.005,
    "decode_context_s": 2e-6,
    "cold_context_s": 3e-6,
    "min_rows": 2,
}
"""A machine whose products cost the same up to four rows, where one row is computed as two, and memory is slow."""
WORKLOAD = Poisson(rate=6, num_requests=150, prompt=Uniform(16, 400), output=Uniform(4, 120))
SHARED = WORKLOAD.replace(rate=2, prefix=cb.SharedPrefix(160, 2), prompt=Uniform(16, 200))


def simulated(cost, workload=WORKLOAD):
    backend = cb.Simulated(cost=cost, kv_tokens=10**6)
    return cb.simulate(workload, backend=backend, max_num_batched_tokens=256, prefix_cache=workload is SHARED)


@pytest.fixture(scope="module")
def run():
    pytest.importorskip("scipy")
    return simulated(cb.Linear(**TRUE))


def test_exact_times_give_the_coefficients_back(run):
    fitted = cb.Measured.fit(run)
    assert {name: getattr(fitted, name) for name in TRUE} == pytest.approx(TRUE, rel=1e-6, abs=1e-12)
    assert (fitted.num_steps, fitted.error, fitted.bias) == (
        len(run.steps),
        pytest.approx(0, abs=1e-9),
        pytest.approx(0, abs=1e-9),
    )


@pytest.fixture(scope="module")
def kinked():
    pytest.importorskip("scipy")
    return simulated(cb.Linear(**KINKED), SHARED)


def test_kinks_and_what_is_shared_are_found(kinked):
    fitted = cb.Measured.fit(kinked)
    assert {name: getattr(fitted, name) for name in KINKED} == pytest.approx(KINKED, rel=1e-6, abs=1e-12)
    assert (fitted.error, fitted.unseen) == (pytest.approx(0, abs=1e-9), ())


def test_kinks_and_what_is_shared_are_found_in_noise(kinked):
    steps = kinked.steps.copy()
    steps["elapsed_s"] *= 1 + np.random.default_rng(1).normal(0, 0.08, len(steps))
    fitted = cb.Measured.fit(steps)
    assert (fitted.few_rows, fitted.min_rows) == (KINKED["few_rows"], KINKED["min_rows"])
    for name in ("step_s", "token_s", "many_rows_s", "resize_s"):
        assert getattr(fitted, name) == pytest.approx(KINKED[name], rel=0.2), name
    assert fitted.cold_context_s == pytest.approx(KINKED["cold_context_s"], rel=0.35)
    assert simulated(fitted, SHARED).duration_s == pytest.approx(kinked.duration_s, rel=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_without_kinks_gets_none(run, seed):
    steps = run.steps.copy()
    steps["elapsed_s"] *= 1 + np.random.default_rng(seed).normal(0, 0.08, len(steps))
    fitted = cb.Measured.fit(steps)
    assert (fitted.few_rows, fitted.min_rows, fitted.many_rows_s) == (0, 1, 0.0)


def test_rows_that_say_nothing_of_sharing_are_told_of(kinked):
    """A run in which nobody shares, and rows saved before the column was there: all positions cost the same then."""
    alone = simulated(cb.Linear(**KINKED))
    for steps in (alone.steps, alone.steps.drop(columns="shared_context")):
        fitted = cb.Measured.fit(steps)
        assert fitted.unseen == ("cold_context_s",)
        assert fitted.cold_context_s == 0
        assert fitted.decode_context_s == pytest.approx(KINKED["decode_context_s"] + KINKED["cold_context_s"])
        steps = kinked.steps
        dearer = KINKED["cold_context_s"] * steps.shared_context
        np.testing.assert_allclose(fitted.predict(kinked), steps.elapsed_s + dearer, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.3, 1.0, 3.0]))
def test_no_step_is_predicted_to_take_less_than_nothing(kinked, seed, scale):
    steps = kinked.steps[:200]
    times = np.exp(np.random.default_rng(seed).normal(0, scale, len(steps)))  # nothing to do with what was computed
    fitted = cb.Measured.fit(steps.assign(elapsed_s=times), folds=2)
    assert (fitted.predict(kinked) >= 0).all()
    assert (simulated(fitted, SHARED.replace(num_requests=5)).steps.elapsed_s >= 0).all()


def test_noisy_times_are_predicted_as_well_as_the_error_says(run):
    steps = run.steps.copy()
    noise = np.random.default_rng(0).normal(0, 0.05, len(steps))
    steps["elapsed_s"] *= 1 + noise
    fitted = cb.Measured.fit(steps)
    assert fitted.error == pytest.approx(0.05 * np.sqrt(2 / np.pi), rel=0.1), "the mean of |noise|"
    assert abs(fitted.bias) < 0.01
    assert simulated(fitted).duration_s == pytest.approx(run.duration_s, rel=0.01)


def test_the_error_is_of_steps_that_were_not_seen(run):
    """Every fifth step, the first fold, takes twice as long.

    Fits that do not see it predict it too low by half. In the others every fourth step is such: they predict 5/4 of
    the usual. A fit to all would err by (0.4 + 4 · 0.2) / 5.
    """
    steps = run.steps.copy()
    steps.loc[::5, "elapsed_s"] *= 2
    fitted = cb.Measured.fit(steps)
    assert fitted.error == pytest.approx((0.5 + 4 * 0.25) / 5, abs=0.01)
    assert fitted.bias == pytest.approx(0, abs=0.02)


def test_a_machine_with_hiccups_is_as_slow_as_it_is(run):
    """Times that are at random four times as long: the clock must not run faster for them."""
    steps = run.steps.copy()
    steps["elapsed_s"] *= np.random.default_rng(2).choice([1.0, 4.0], len(steps), p=[0.8, 0.2])
    fitted = cb.Measured.fit(steps)
    assert fitted.predict(steps).sum() == pytest.approx(1.6 * run.steps.elapsed_s.sum(), rel=0.05)
    assert abs(fitted.bias) < 0.01


def test_steps_are_predicted_as_a_simulation_prices_them(run, kinked):
    cost = cb.Measured(**TRUE, num_steps=30, error=0.0, bias=0.0)
    np.testing.assert_allclose(cost.predict(run), run.steps.elapsed_s, rtol=1e-12)
    dear = cb.Measured(**KINKED, num_steps=30, error=0.0, bias=0.0)
    np.testing.assert_allclose(dear.predict(kinked), kinked.steps.elapsed_s, rtol=1e-12)
    pd.testing.assert_series_equal(cost.predict(run.steps), cost.predict(run))


def test_a_step_of_another_size_is_no_longer_than_it_was(run):
    """Without that cost the coefficient is zero, not a share of the constant."""
    steps = run.steps
    resized = steps.tokens.diff() != 0
    assert 0.1 < resized.mean() < 0.9
    fitted = cb.Measured.fit(steps.assign(elapsed_s=steps.elapsed_s - TRUE["resize_s"] * resized))
    assert (fitted.resize_s, fitted.step_s) == (pytest.approx(0, abs=1e-9), pytest.approx(TRUE["step_s"]))


def test_host_time_counts(run):
    steps = run.steps.assign(host_s=0.004)
    assert cb.Measured.fit(steps).step_s == pytest.approx(TRUE["step_s"] + 0.004, rel=1e-6)


def test_a_roofline_is_nearly_linear(run):
    roofline = simulated(cb.Roofline("A100-40GB", "opt-13b"))
    fitted = cb.Measured.fit(roofline)
    assert fitted.error < 0.1
    assert simulated(fitted).duration_s == pytest.approx(roofline.duration_s, rel=0.02)


def rows(n=40, **columns):
    made = {column: np.arange(1, n + 1) for column in NEEDED}
    return pd.DataFrame({**made, "host_s": 0.0, **columns})


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (rows(29), "29 steps are too few to fit a cost model to; at least 30 are needed"),
        (rows().drop(columns="prefill_pairs"), "the steps lack the column 'prefill_pairs'"),
        (rows(elapsed_s=0.0), "every step must have finite sums and a time > 0"),
        (rows(tokens=np.nan), "every step must have finite sums and a time > 0"),
        (rows(prefill_pairs=0), r"prefill_pairs takes 1 value\(s\) .* at least 3 are needed"),
        (rows(decode_context=0), "decode_context takes 1 value"),
        (rows(tokens=8), "tokens takes 1 value"),
        (rows(num_steps=7.0), "each row must be a single step"),
        (rows(41, step=range(41)).drop(index=7), "step 8 follows step 6: rows between them are missing"),
        (rows(step=[*range(20), 21, 20, *range(22, 40)]), "step 21 follows step 19"),
    ],
)
def test_rows_that_say_too_little_are_refused(steps, message):
    with pytest.raises(CostModelError, match=message):
        cb.Measured.fit(steps)


def test_the_first_steps_may_be_left_out_and_runs_put_together(run):
    later = run.steps.iloc[10:]
    assert cb.Measured.fit(later).num_steps == len(later)
    assert cb.Measured.fit(pd.concat([run.steps, later])).num_steps == 2 * len(run.steps) - 10


@pytest.mark.parametrize("folds", [1, 31, 2.5])
def test_folds_are_checked(folds):
    with pytest.raises(CostModelError, match="folds must be an integer in"):
        cb.Measured.fit(rows(), folds=folds)


def test_without_scipy_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    with pytest.raises(MissingDependencyError, match="pip install scipy"):
        cb.Measured.fit(rows())
