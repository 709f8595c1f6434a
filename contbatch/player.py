"""A run, step by step, in a notebook or a page of its own."""

import gzip
import json
from base64 import b64encode
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contbatch.cell_output import closes_on_rerun, png, widget_view
from contbatch.checks import is_int, python_number, require
from contbatch.decision_log import DecisionLog
from contbatch.errors import DecisionLogError
from contbatch.film import Film
from contbatch.metrics import Result
from contbatch.step import BINDING

if TYPE_CHECKING:
    from contbatch.player_view import View
    from contbatch.tokenizer import Tokenizer

SCRIPTS = ("film.js", "canvas.js", "replay.js")
ARRAYS = ("now", "bound", "starts", "changes")
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>:root {{ color-scheme: light dark; }} body {{ margin: 1em; }}</style>
<h1 style="font: 600 1.1em system-ui, sans-serif">{title}</h1>
<main id="replay"></main>
<script type="application/json" id="film">{film}</script>
<script type="module">
{script}
openPage(document.getElementById("replay"), JSON.parse(document.getElementById("film").textContent));
</script>
</html>
"""


def script() -> str:
    """Join the player's scripts to one, since neither a widget nor a saved page has another to import."""
    return "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in SCRIPTS)


class Player:
    """What `replay` returns: shown as a widget, or saved as a page.

    Attributes
    ----------
    film : Film
        What is shown.
    """

    def __init__(self, film: Film, tokenizer: "Tokenizer | None") -> None:
        self.film = film
        tokens = film.tokens()
        if tokenizer is not None:
            told = callable(getattr(tokenizer, "token_text", None))
            require(told, "tokenizer", tokenizer, "a Tokenizer or None", DecisionLogError)
            self._texts = {token: tokenizer.token_text(token) for token in tokens}
        else:  # one token and no other means that nobody made up a text
            self._texts = dict.fromkeys(tokens, "▪") if len(tokens) == 1 else {token: f"{token} " for token in tokens}

    @cached_property
    def view(self) -> "View | None":
        """The widget; None where anywidget is not installed."""
        try:
            from contbatch.player_view import View
        except ImportError:
            return None
        arrays = {name: getattr(self.film, name).tobytes() for name in ARRAYS}
        return View(about=self._about(), **arrays)

    @property
    def step(self) -> int:
        """The step shown, from 0 on, as of when it last stood still; setting it moves the widget."""
        return self.view.step if self.view else 0

    @step.setter
    def step(self, step: int) -> None:
        step = python_number(step)
        require(is_int(step, 0, len(self.film) - 1), "step", step, f"in [0, {len(self.film)})", DecisionLogError)
        if self.view:
            self.view.step = step

    def save(self, path: str | Path) -> Path:
        """Write one HTML page that holds everything and needs no server, no kernel and no network."""
        arrays = {name: getattr(self.film, name).tobytes() for name in ARRAYS}
        data = b64encode(gzip.compress(b"".join(arrays.values()), mtime=0)).decode()
        film = {"about": self._about(), "sizes": [[name, len(part)] for name, part in arrays.items()], "data": data}
        # Ids and texts of a log may hold anything, such as the end of the script that they stand in.
        told = json.dumps(film).replace("<", "\\u003c")
        title = escape(f"{self.film.settings['policy']}: {len(self.film)} steps")
        target = Path(path)
        target.write_text(PAGE.format(title=title, film=told, script=script()), encoding="utf-8")
        return target

    def close(self) -> None:
        """Take the widget off the page."""
        if self.view:
            self.view.close()

    def _about(self) -> dict[str, Any]:
        film = self.film
        return {"settings": film.settings, "requests": film.requests, "texts": self._texts, "limits": list(BINDING)}

    def __repr__(self) -> str:
        film = self.film
        return f"<Player: {len(film)} steps of {len(film.requests)} requests under {film.settings['policy']}>"

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """Show the widget, and for front ends without them a picture of the seats."""
        from contbatch.seat_picture import seat_picture

        shown = widget_view(self.view.model_id) if self.view else {}
        return {"text/plain": repr(self), "image/png": png(seat_picture(self.film)), **shown}


def replay(source: Result | DecisionLog | str | Path, *, tokenizer: "Tokenizer | None" = None) -> Player:
    """Step through a run: seats, queue, pages, and the tokens as they appear.

    Space plays and pauses, the arrow keys step, with shift ten steps; up and down, or a click, choose a request.

    Parameters
    ----------
    source : Result, DecisionLog or path
        A path is that of a log that `DecisionLog.save` wrote. Of a result without a log, the experiment is simulated
        again, which gives the same run.
    tokenizer : Tokenizer, optional
        Makes text of the tokens, such as `llm.tokenizer`; that of the result's backend if it has one.

    Raises
    ------
    DecisionLogError
        A result without a log that can't be run again; a log that is empty or was changed, or, if it comes from a file,
        tells of what can't have happened.
    """
    if isinstance(source, Result) and tokenizer is None:
        tokenizer = getattr(source.experiment and source.experiment.backend, "tokenizer", None)
    player = Player(Film.of(_log_of(source)), tokenizer)
    closes_on_rerun(player.close)
    return player


def _log_of(source: Result | DecisionLog | str | Path) -> DecisionLog:
    if isinstance(source, (str, Path)):
        log = DecisionLog.load(source)
        for _ in log.states():  # raises where it can't have happened
            pass
        return log
    if isinstance(source, DecisionLog):
        return source
    require(
        isinstance(source, Result), "what is replayed", source, "a Result, a DecisionLog or a path", DecisionLogError
    )
    if source.decisions is not None:
        return source.decisions
    if source.experiment is None or source.experiment.is_measured:
        raise DecisionLogError(
            "this run kept no decision log: make it with run(…, log=cb.DecisionLog()), or simulate it"
        )
    from contbatch.experiment import run

    log = DecisionLog()
    run(source.experiment, log=log)
    return log
