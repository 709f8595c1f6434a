"""Whether this process may use the matrix instructions of its CPU (Intel AMX)."""

import ctypes
import functools
import platform
import sys

from numba.core.registry import cpu_target

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""A system call of Linux on x86-64, its code ARCH_REQ_XCOMP_PERM, and the part of a thread's state asked for."""


@functools.cache
def may_use_matrices() -> bool:
    """Ask the system once for the process's permission, if Numba compiles for a CPU that multiplies int8 matrices.

    Linux grants it for good, to all threads and children: its Documentation/arch/x86/xstate.rst.
    """
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if "+amx-int8" not in features or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return int(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)) == 0
