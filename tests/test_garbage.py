"""A simulation changes how often garbage is looked for, and changes it back."""

import ctypes
import gc
import subprocess
import sys

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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="of glibc alone")
def test_freed_memory_goes_back_to_the_system():
    """A block that stays on top of the heap keeps what was freed below it: 128 MB here."""
    script = """
import ctypes
from contbatch.garbage import give_back_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
before = resident()
*blocks, last = [libc.malloc(64_000) for _ in range(2000)]
for block in blocks:
    ctypes.memset(block, 1, 64_000)
for block in blocks:
    libc.free(ctypes.c_void_p(block))
kept = resident() - before
give_back_memory()
print(kept, resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    kept, left = map(float, done.stdout.split())
    assert kept > 100
    assert left < 20
