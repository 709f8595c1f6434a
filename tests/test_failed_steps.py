"""A step whose attention fails, or that is interrupted, on the CPU: the ones after it are right, whatever their size.

OpenVINO tells of such a failure with several threads, but the nodes behind keep the sizes of the step before. With one
it does not tell, and computes the step again before the next one.
"""

import gc
import signal
from itertools import product

import numpy as np
import pytest
from ragged import step

from contbatch.errors import RunnerError
from contbatch.export import export_onnx
from contbatch.model import random_model
from contbatch.plugins.paged_attention.team import Team
from contbatch.runners.cpu import CPUModel
from contbatch.runners.cpu_graph import _Attention

STEPS = {
    n: step((np.arange(n) % 200, 0), table=[range(10)], logits=rows) for n, rows in ((1, [0]), (3, None), (40, [7]))
}
PAIRS = list(product(STEPS, STEPS))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return export_onnx(random_model(0), tmp_path_factory.mktemp("failed") / "m.onnx")


@pytest.fixture(params=[1, 2])
def model(request, path):
    with_threads = CPUModel(path, 10, 4, num_threads=request.param)
    yield with_threads
    with_threads.close()


@pytest.fixture
def forward(model, monkeypatch):
    """Run a step, with something in place of a method."""

    def run(num_tokens, kind=Team, **methods):
        with monkeypatch.context() as patch:
            for name, method in methods.items():
                patch.setattr(kind, name, method)
            return model.forward(STEPS[num_tokens]).copy()

    return run


def raising(error, method, *numbers):
    """Return a method that raises in place of these of its calls, counted from 0."""
    calls = iter(range(1000))

    def raises(*args):
        if next(calls) in numbers:
            raise error
        return method(*args)

    return raises


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_layer_that_fails(forward, error, layer):
    expected = {n: forward(n) for n in STEPS}
    for before, failed in PAIRS:
        forward(before)
        for _ in range(2):
            with pytest.raises(error):
                forward(failed, attend=raising(error, Team.attend, layer))
        np.testing.assert_array_equal(forward(before), expected[before])
        np.testing.assert_array_equal(forward(failed), expected[failed])


@pytest.mark.parametrize("calls", [[0], [1], [0, 1], [0, 1, 2], [1, 3], [1, 4], range(30)])
def test_a_node_that_raises_where_we_catch_nothing(forward, calls):
    """As a signal's handler can between two of its lines, and then in what finishes the step, be it for good."""
    expected = {n: forward(n) for n in STEPS}
    for before, failed in PAIRS:
        forward(before)
        with pytest.raises(RunnerError, match="OpenVINO failed"):
            forward(failed, _Attention, evaluate=raising(OSError, _Attention.evaluate, *calls))
        np.testing.assert_array_equal(forward(before), expected[before])
        np.testing.assert_array_equal(forward(failed), expected[failed])


@pytest.fixture
def python_handles_ctrl_c():
    """Which it does not where it was started in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_ctrl_c")
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_layer(forward, times):
    attend, expected = Team.attend, {n: forward(n) for n in STEPS}

    def interrupted(self, layer, *args):
        attend(self, layer, *args)
        for _ in range(times if layer == 0 else 0):
            signal.raise_signal(signal.SIGINT)

    for before, failed in PAIRS:
        forward(before)
        with pytest.raises(KeyboardInterrupt):
            forward(failed, attend=interrupted)
        np.testing.assert_array_equal(forward(before), expected[before])


def test_the_next_model_does_not_get_the_step(path, model, forward):
    expected = forward(40)
    with pytest.raises(ValueError, match="first"):
        forward(3, attend=raising(ValueError("first"), Team.attend, 0))
    with pytest.raises(RunnerError):
        forward(3, _Attention, evaluate=raising(OSError, _Attention.evaluate, *range(30)))
    model.close()
    gc.collect()
    following = CPUModel(path, 10, 4, num_threads=model.num_threads)
    np.testing.assert_array_equal(following.forward(STEPS[40]), expected)
    following.close()


def test_the_last_try_to_finish_a_step_counts(path, monkeypatch):
    model = CPUModel(path, 10, 4, num_threads=1)
    expected = model.forward(STEPS[40]).copy()
    with monkeypatch.context() as patch:  # no try of this call succeeds
        patch.setattr(_Attention, "evaluate", raising(OSError, _Attention.evaluate, *range(30)))
        with pytest.raises(RunnerError):
            model.forward(STEPS[3])
    with monkeypatch.context() as patch:  # and of this one the fourth
        patch.setattr(_Attention, "evaluate", raising(OSError, _Attention.evaluate, 0, 1, 2))
        np.testing.assert_array_equal(model.forward(STEPS[40]), expected)
    model.close()
