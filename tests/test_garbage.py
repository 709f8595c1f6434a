"""A simulation changes how often garbage is looked for, and changes it back."""

import gc

import pytest

import contbatch as cb
from contbatch.garbage import MADE, rarely_collected


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield gc.set_threshold
    gc.set_threshold(*before)


@pytest.mark.parametrize(("given", "during"), [(700, MADE), (MADE + 1, MADE + 1), (0, 0)])
def test_rarer_than_before_and_off_stays_off(thresholds, given, during):
    @rarely_collected()
    def interrupted():
        assert gc.get_threshold() == (during, 11, 12)
        raise KeyboardInterrupt

    thresholds(given, 11, 12)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.get_threshold() == (given, 11, 12)


@pytest.mark.parametrize("run", [cb.simulate, lambda load, policy: cb.simulate_fleet(load, 2, policy=policy)])
def test_a_simulation_is_run_so(thresholds, run):
    class Looking(cb.ChunkedPrefill):
        def rank(self, request):
            seen.add(gc.get_threshold())
            return super().rank(request)

    thresholds(700, 10, 10)
    seen = set()
    run(cb.Poisson(rate=1, num_requests=3), Looking())
    assert seen == {(MADE, 10, 10)}
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_of_several_puts_it_back(thresholds):
    thresholds(700, 11, 12)
    first, second = rarely_collected(), rarely_collected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (MADE, 11, 12)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 11, 12)
