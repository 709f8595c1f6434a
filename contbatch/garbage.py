"""Cyclic garbage, looked for less often while much is made that is none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MADE = 100_000
"""Objects made, and not yet freed, before the young are looked through: a simulation makes some 15 a request."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Have Python look for cyclic garbage more rarely; reference counts still free all that is in no cycle."""
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, MADE) if young else 0, *older)  # 0 is off, and stays so
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
