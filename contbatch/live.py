"""What a run on a model is doing while it does it: one picture in the notebook, replaced as the run goes on."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from contbatch.live_picture import POINTS, Picture
from contbatch.request import Request, RequestStatus

if TYPE_CHECKING:
    from contbatch.engine import Engine

PERIOD_S = 0.25
"""At least so long between two pictures."""
SHARE = 0.01
"""At most this share of the run's time goes into pictures: after a slow one the next waits longer."""
WINDOW_S = 2.0
"""Tokens per second are those of the last two seconds."""


class Live:
    """Shows pictures of a run; told of every step by `Engine.run(watch=…)`.

    Parameters
    ----------
    title : str
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.num_pictures = 0
        self.spent_s = 0.0
        """Seconds that it took from the run."""
        self._last: Picture | None = None
        self._engine: Engine | None = None
        self._handle: Any = None
        self._answered = self._tokens = 0
        self._rates: deque[float] = deque(maxlen=POINTS)
        self._made: deque[tuple[float, int]] = deque()
        self._began = self._next = perf_counter()

    def __call__(self, engine: "Engine", left: Sequence[Request]) -> None:
        """Take note of a step after which the requests in `left` left, and show a picture if it is time."""
        began = perf_counter()
        self._engine = engine
        self._answered += len(left)
        self._tokens += sum(request.num_output_tokens for request in left)
        if began >= self._next:
            self._show(self._picture(engine, began))
            took = perf_counter() - began
            self._next = began + max(PERIOD_S, took / SHARE)
        self.spent_s += perf_counter() - began

    def end(self, state: str) -> None:
        """Show the last picture: as the run is now if it is done, else as it last was."""
        if self._engine is not None and state == "done":
            self._last = self._picture(self._engine, perf_counter())
        if self._last is not None:
            self._show(replace(self._last, state=state))
        self._engine = None  # so that it, and its model, can be freed

    def _picture(self, engine: "Engine", now: float) -> Picture:
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        seats = [("empty", "")] * scheduler.max_num_seqs
        for request in scheduler.running:
            seats[request.seat or 0] = _kind(request), str(request.request_id)
        here = {request.request_id: request for request in (*scheduler.requests.values(), *scheduler.running)}
        tokens = self._tokens + sum(request.num_output_tokens for request in here.values())
        made = self._made
        made.append((now, tokens))
        while len(made) > 2 and made[1][0] < now - WINDOW_S:
            made.popleft()
        seconds = now - made[0][0]
        self._rates.append((tokens - made[0][1]) / seconds if seconds else 0.0)
        return Picture(
            self.title,
            "running",
            now - self._began,
            tuple(seats),
            len(scheduler.waiting),
            self._answered,
            tokens,
            tuple(self._rates),
            (pool.num_live, pool.num_cached, pool.num_pages),
        )

    def _show(self, picture: Picture) -> None:
        from IPython.display import display

        self._last = picture
        self.num_pictures += 1
        if self._handle is None:
            self._handle = display(picture, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(picture)


def _kind(request: Request) -> str:
    if request.status is RequestStatus.HELD:
        return "held"
    return "prompt" if request.num_computed_tokens < request.num_prompt_tokens else "answer"


def somebody_watches() -> bool:
    """Tell whether this is a notebook with a person before it.

    A front end for people lets the kernel ask questions (`input()`); nbval, nbconvert and papermill don't.
    """
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return bool(getattr(getattr(get_ipython(), "kernel", None), "_allow_stdin", False))


@contextmanager
def watching(live: bool | None, title: str) -> Iterator[Live | None]:
    """Give what shows pictures of a run, or None if nobody is to see any.

    `live` None: if somebody watches. The environment variable TQDM_DISABLE=1 hides pictures as it does progress bars.
    """
    hidden = os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
    if hidden or not (somebody_watches() if live is None else live):
        yield None
        return
    shown = Live(title)
    try:
        yield shown
    except BaseException as error:
        shown.end("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    shown.end("done")
