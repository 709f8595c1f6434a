"""Models that nobody closed are closed before Python ends.

Later OpenVINO would free Python objects without Python's lock, which is fatal. This module comes with `contbatch`, and
not with the first model: handlers that a program registers in between run before, and may use its models.
"""

import atexit
import os
from typing import Protocol
from weakref import WeakSet


class _Model(Protocol):
    def close(self) -> None: ...


_OPEN: WeakSet[_Model] = WeakSet()


def close_at_exit(model: _Model) -> None:
    """Close a model when Python ends, if it is there then; in this process, not in a child forked from it."""
    _OPEN.add(model)


@atexit.register
def _close_all() -> None:
    for model in list(_OPEN):
        model.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_OPEN.clear)  # a model's threads stayed in the parent: none could be waited for
