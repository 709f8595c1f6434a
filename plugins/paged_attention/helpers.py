"""Threads that wait to help whoever calls them, one for each further CPU of the process."""

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Set
from queue import SimpleQueue
from typing import Any

from contbatch.plugins.paged_attention.step_plan import CPUS

logger = logging.getLogger(__name__)
Job = tuple[Callable[..., object], tuple[Any, ...]]


class _Crew:
    """The helpers of one process."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.threads = [
            threading.Thread(target=_help, args=[self.jobs], name=f"paged_attention-{i}", daemon=True)
            for i in range(max(1, len(CPUS) - 1))
        ]
        self.cpus: Set[int] = frozenset()
        """Where they may run, as was said last."""
        for thread in self.threads:
            thread.start()
        self.keep_off(frozenset())  # they are born with the affinity of their caller

    def keep_off(self, cpus: Set[int]) -> None:
        wanted = CPUS - cpus or CPUS
        if wanted != self.cpus and hasattr(os, "sched_setaffinity"):
            self.cpus = wanted
            for number in (thread.native_id for thread in self.threads if thread.native_id is not None):
                with contextlib.suppress(OSError):  # the system may have taken CPUs from the process: it knows better
                    os.sched_setaffinity(number, wanted)


def call_helper(function: Callable[..., object], *args: Any) -> None:
    """Have a helper call a function once, as soon as one is free; it should be compiled, and not hold Python's lock."""
    _crew(os.getpid()).jobs.put((function, args))


def keep_helpers_off_this_cpu() -> None:
    """Keep helpers away from the CPU that the calling thread is bound to, if it is bound to some and others are left.

    The system wakes a thread where it ran last, and leaves it there if all CPUs have something to do: behind its
    caller, who computes until nothing is left to help with, step after step.
    """
    if hasattr(os, "sched_getaffinity"):
        _crew(os.getpid()).keep_off(os.sched_getaffinity(0))


@functools.cache
def _crew(_pid: int) -> _Crew:
    """Return who helps a caller; a forked child needs its own."""
    return _Crew()


def _help(jobs: SimpleQueue[Job]) -> None:
    while True:
        try:
            _call(*jobs.get())  # no name here would keep what it is given alive until the next one
        except Exception:  # memory ran out: whoever called does it alone, and the next one is helped again
            logger.exception("a helper could not help")


def _call(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    function(*args)
