"""A bell that a thread waits for without the interpreter's lock: POSIX calls as LLVM IR; only inside jitted code.

A bell is a row of `BELL` int64: a mutex, a condition, and how often it was rung and not yet answered. Elsewhere than on
POSIX nobody waits, so nothing is called. See `kernels.SOURCES`.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import os

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from contbatch.plugins.paged_attention.gather import INNER
from contbatch.plugins.paged_attention.intrinsics import INT32, INT64, atomic_add, data_of

POSIX = os.name == "posix"
BELL = 32
"""Room for either is 12 words: Linux and macOS need at most 8 (64 bytes)."""
MUTEX, CONDITION, RUNG = 0, 12, 24
NOTHING = -1
LOOKS = 1000
"""How often to look before another thread of the machine may run."""


def _calls(name, *parts):
    """Make the call of a POSIX function with the addresses of these parts of a bell, or null for `NOTHING`."""

    @intrinsic
    def call(_context, bell):
        def codegen(context, builder, signature, args):
            pointer = ir.IntType(8).as_pointer()
            data = data_of(context, builder, signature.args[0], args[0])
            if POSIX:
                kind = ir.FunctionType(INT32, [pointer] * len(parts))
                function = cgutils.get_or_insert_function(builder.module, kind, name)
                addresses = [
                    ir.Constant(pointer, None)
                    if part == NOTHING
                    else builder.bitcast(builder.gep(data, [INT64(part)]), pointer)
                    for part in parts
                ]
                builder.call(function, addresses)
            return context.get_dummy_value()

        return types.void(bell), codegen

    return call


_make_mutex, _make_condition = (
    _calls("pthread_mutex_init", MUTEX, NOTHING),
    _calls("pthread_cond_init", CONDITION, NOTHING),
)
_lock, _unlock = _calls("pthread_mutex_lock", MUTEX), _calls("pthread_mutex_unlock", MUTEX)
_signal, _sleep = _calls("pthread_cond_signal", CONDITION), _calls("pthread_cond_wait", CONDITION, MUTEX)


_give_way = _calls("sched_yield")


@njit(**INNER)
def await_count(counts, i, least):
    """Wait until counts[i], which other threads add to, is at least so much."""
    looks = 0
    while atomic_add(counts, i, 0) < least:
        looks += 1
        if looks % LOOKS == 0:  # who is to count may have no CPU
            _give_way(counts)


@njit(**INNER)
def make_bells(bells):
    """Make a bell of each row of zeros."""
    for i in range(len(bells)):
        _make_mutex(bells[i])
        _make_condition(bells[i])


@njit(**INNER)
def ring(bells):
    """Ring all of them: who waits, or comes to wait, goes on once for each time."""
    for i in range(len(bells)):
        _lock(bells[i])
        atomic_add(bells[i], RUNG, 1)
        _unlock(bells[i])
        _signal(bells[i])


@njit(**INNER)
def wait(bell):
    """Wait until it has been rung once more than it was waited for."""
    _lock(bell)
    while atomic_add(bell, RUNG, 0) == 0:
        _sleep(bell)
    atomic_add(bell, RUNG, -1)
    _unlock(bell)
