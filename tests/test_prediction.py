"""Errors of predictions, against figures worked out by hand."""

import numpy as np
import pytest

import contbatch as cb
from contbatch.arrivals import AllAtOnce
from contbatch.errors import InvalidRequestError
from contbatch.workload import OpenLoop


def ran(step_s, policy=None, output=5):
    """Simulate four requests at once; every step takes as long."""
    load = OpenLoop(arrivals=AllAtOnce(), num_requests=4, prompt=3, output=output)
    return cb.simulate(load, policy, cb.Simulated(cost=cb.Linear(step_s=step_s), kv_tokens=1000))


def test_errors_are_relative_to_the_median_of_the_real_runs():
    table = cb.prediction_errors(ran(0.11), [ran(0.2), ran(0.1), ran(0.08)])
    assert list(table.index) == [
        "output_tokens_per_s",
        *(f"{n}_s_p{p}" for n in ("ttft", "tpot") for p in (50, 90, 99)),
    ]
    times = table.drop("output_tokens_per_s")
    np.testing.assert_allclose(times.measured, 0.1)
    np.testing.assert_allclose(times.simulated, 0.11)
    np.testing.assert_allclose(times.error, 0.1)
    np.testing.assert_allclose(times.spread, 1.2)
    rate = table.loc["output_tokens_per_s"]
    assert rate.measured == pytest.approx(20 / 0.5)
    assert rate.error == pytest.approx(0.1 / 0.11 - 1)


def test_what_is_undefined_stays_so_and_other_figures_can_be_asked_for():
    static = cb.StaticBatching(4)
    assert cb.prediction_errors(ran(0.1, static), [ran(0.1, static)]).error.isna().sum() == 3, "TPOT, in one piece"
    assert list(cb.prediction_errors(ran(0.1), [ran(0.1)], ["steps"]).error) == [0.0]


def test_without_a_real_run_there_is_no_error():
    with pytest.raises(InvalidRequestError, match=r"measured must be a list of one result or more, got \[\]"):
        cb.prediction_errors(ran(0.1), [])


def test_what_is_no_list_of_results_is_named():
    run = ran(0.1)
    with pytest.raises(InvalidRequestError, match="measured must be a list of one result or more, got <Result: 4 of 4"):
        cb.prediction_errors(run, run)
    for simulated, measured in ((run, [run, "r"]), ("r", [run])):
        with pytest.raises(InvalidRequestError, match="what is compared must be a Result, got 'r'"):
            cb.prediction_errors(simulated, measured)
