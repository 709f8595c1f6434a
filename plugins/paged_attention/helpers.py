"""Threads that wait to help whoever calls them, one for each further CPU of the process."""

import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from contbatch.plugins.paged_attention.step_plan import CPUS

Job = tuple[Callable[..., object], tuple[Any, ...]]


def call_helper(function: Callable[..., object], *args: Any) -> None:
    """Have a helper call a function once, as soon as one is free; it should be compiled, and not hold Python's lock."""
    _jobs(os.getpid()).put((function, args))


@functools.cache
def _jobs(_pid: int) -> SimpleQueue[Job]:
    """Return the queue of the threads that help a caller; a forked child needs its own."""
    jobs: SimpleQueue[Job] = SimpleQueue()
    for i in range(max(1, len(CPUS) - 1)):
        threading.Thread(target=_help, args=[jobs], name=f"paged_attention-{i}", daemon=True).start()
    return jobs


def _help(jobs: SimpleQueue[Job]) -> None:
    if hasattr(os, "sched_setaffinity"):  # it is born with the affinity of its caller, whose CPU it should leave alone
        os.sched_setaffinity(0, CPUS)
    while True:
        _call(*jobs.get())  # no name here would keep what it is given alive until the next one


def _call(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    function(*args)
