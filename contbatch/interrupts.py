"""Ctrl-C (a notebook's stop button) between two steps, in place of between two lines of the scheduler."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Hold:
    """A signal handler that keeps the first interrupt for later, as `waiting`, and passes on the second."""

    __slots__ = "handler", "waiting"

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.waiting: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Keep an interrupt, or pass it on if one waits already."""
        if self.waiting is not None:
            # Now, since it may hit the end of the block before that puts the handler back: nobody would hold any more.
            signal.signal(signal.SIGINT, self.handler)
            self.handler(number, frame)
        self.waiting = number, frame

    def is_waiting(self) -> bool:
        """Whether an interrupt waits."""
        return self.waiting is not None


@contextmanager
def interrupts_held_back() -> Iterator[Hold]:
    """Let an interrupt wait for the end of the outermost such block; a second one comes through at once.

    Gives the hold, which knows whether one waits. Python delivers signals to the main thread alone: in others, and
    where no Python handler is set, nothing changes.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(handler, Hold):
        yield handler
        return
    if not is_main or not callable(handler):
        yield Hold(signal.default_int_handler)
        return
    hold = Hold(handler)
    signal.signal(signal.SIGINT, hold)
    try:
        yield hold
    except GeneratorExit:  # a second interrupt hit the way out of the block and is under way; nobody would see another
        hold.waiting = None
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
        if hold.waiting is not None:
            handler(*hold.waiting)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in such a block though a Jupyter kernel ignores it outside of cells."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
