"""Cyclic garbage, looked for less often while much is made that is none; and memory given back to the system."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

MADE = 100_000
"""Objects made, and not yet freed, before the young are looked through: a simulation makes some 15 a request."""
_lock = Lock()
_usual: list[tuple[int, int, int]] = []
"""What was set before, once for each who is inside: the last to leave puts back what the first one found."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Have Python look for cyclic garbage more rarely; reference counts still free all that is in no cycle."""
    with _lock:
        young, middle, old = gc.get_threshold()
        _usual.append((young, middle, old))
        gc.set_threshold(max(young, MADE) if young else 0, middle, old)  # 0 is off, and stays so
    try:
        yield
    finally:
        with _lock:
            if len(_usual) == 1:
                gc.set_threshold(*_usual[0])
            _usual.pop()


def give_back_memory() -> None:
    """Free cyclic garbage now, and do as `trim_heap`: after an export that was 1.4 GB."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Give the system what glibc keeps of freed memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
