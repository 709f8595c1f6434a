"""An experiment under sliders: move one, and see what comes of it."""

import asyncio
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from contbatch.cell_output import closes_on_rerun, png, widget_view
from contbatch.checks import require
from contbatch.errors import ContbatchError, ExperimentError
from contbatch.experiment import Experiment, run
from contbatch.explorer_ranges import by_path, usual_ranges
from contbatch.expressions import change
from contbatch.field_paths import with_field
from contbatch.interrupts import interruptible
from contbatch.metrics import Result
from contbatch.overview import overview
from contbatch.sweeps import differences

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from contbatch.explorer_view import View

Draw = Callable[[Mapping[str, Result]], "Figure | Axes"]
PRESENT, PINNED = "now", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PATIENCE_S = 0.02
"""A change waits so long for the next before it is run, so that of many in a row only the last is."""


class Shown(NamedTuple):
    """A run that is shown."""

    experiment: Experiment
    result: Result
    summary: pd.Series


class Explorer:
    """What `explore` returns: the runs and, where there is a front end for them, the widgets.

    Attributes
    ----------
    experiment : Experiment
        As the controls stand.
    pinned : dict of str to Shown
        The runs kept for comparison, by the letter that they have in figure and table.
    message : str
        Why the present experiment has no figure; "" if it has.
    """

    def __init__(self, experiment: Experiment, ranges: Mapping[str, Any], draw: Draw) -> None:
        self.start, self.draw = experiment, draw
        self.pinned: dict[str, Shown] = {}
        self.ranges = by_path(experiment, ranges)
        self.experiment, self.message = experiment, ""
        self._shown: Shown | None = None
        self._waiting: asyncio.TimerHandle | None = None

    @cached_property
    def view(self) -> "View | None":
        """The widgets; None where ipywidgets is not installed."""
        try:
            from contbatch.explorer_view import View
        except ImportError:
            return None
        return View(self)

    @property
    def controls(self) -> dict[str, Any]:
        """The widget of each field by its path, such as "workload.rate"; setting its `value` moves it."""
        return self.view.controls if self.view else {}

    @property
    def result(self) -> Result | None:
        """The run of `experiment`; None if it could not run (see `message`)."""
        self._flush()
        return self._shown and self._shown.result

    @property
    def code(self) -> str:
        """The line that makes the run shown, where `exp` is the experiment that was explored."""
        self._flush()
        return f"cb.run({change(self.start, self.experiment, 'exp')})"

    @property
    def table(self) -> pd.DataFrame:
        """A row a run, the present one first: the fields in which they differ, then the figures of `Result.summary`."""
        runs = self.runs()
        told = pd.DataFrame(differences([run.experiment for run in runs.values()]), index=list(runs))
        return told.join(pd.DataFrame({name: run.summary for name, run in runs.items()}).T)

    def runs(self) -> dict[str, Shown]:
        """Return what is compared, by name: the present run, then the pinned ones."""
        self._flush()
        return ({PRESENT: self._shown} if self._shown else {}) | self.pinned

    def figure(self) -> "Figure | None":
        """Draw the runs; None if there are none."""
        results = {name: run.result for name, run in self.runs().items()}
        if not results:
            return None
        drawn: Any = self.draw(results)
        figure: Figure = getattr(drawn, "figure", None) or drawn
        return figure

    def pin(self) -> None:
        """Keep the present run to compare later ones with it; one that is kept already is not kept twice."""
        free = [letter for letter in PINNED if letter not in self.pinned]
        kept = [run.experiment for run in self.pinned.values()]
        if self.result is not None and free and self.experiment not in kept:
            self.pinned[free[0]] = self.runs()[PRESENT]
        self._show()

    def unpin(self) -> None:
        """Forget the pinned runs."""
        self.pinned.clear()
        self._show()

    def change_soon(self, *_: object) -> None:
        """Note that a control was moved: run what they say once no other change follows, at once without event loop."""
        self._forget_waiting()
        try:
            self._waiting = asyncio.get_running_loop().call_later(PATIENCE_S, self._update_later)
        except RuntimeError:
            self.update()

    def update(self) -> None:
        """Run the experiment as the controls stand, and show it; what is wrong with it becomes the message."""
        self._forget_waiting()
        try:
            experiment = self.start
            for path, widget in self.controls.items():
                experiment = with_field(experiment, path, widget.value)
            if self._shown is None or experiment != self.experiment:
                self._shown, self.experiment = None, experiment
                result = run(experiment)
                self._shown, self.message = Shown(experiment, result, result.summary()), _rejections(result)
        except ContbatchError as error:
            self._shown, self.message = None, str(error)
        except Exception as error:  # of a policy or a workload written by whoever explores
            self._shown, self.message = None, f"{type(error).__name__}: {error}"
        self._show()

    def close(self) -> None:
        """Take the widgets off the page; nothing runs any more."""
        self._forget_waiting()
        if self.view:
            self.view.close()

    def _update_later(self) -> None:
        try:
            with interruptible():
                self.update()
        except KeyboardInterrupt:
            self._shown, self.message = None, "interrupted"
            self._show()

    def _flush(self) -> None:
        if self._waiting is not None:
            self.update()

    def _forget_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = None

    def _show(self) -> None:
        if self.view:
            self.view.show()

    def __repr__(self) -> str:
        return f"<Explorer: {self.code}>"

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """Show the widgets, and for front ends without them the figure."""
        figure = self.figure()
        bundle: dict[str, Any] = {"text/plain": "\n".join(filter(None, (repr(self), self.message)))}
        return (
            bundle
            | ({"image/png": png(figure)} if figure else {})
            | (widget_view(self.view.box.model_id) if self.view else {})
        )


def explore(experiment: Experiment, *, draw: Draw = overview, **ranges: Any) -> Explorer:
    """Put an experiment under sliders: every move simulates it anew, and the figure shows it beside the pinned runs.

    Parameters
    ----------
    experiment : Experiment
        On a simulated backend.
    draw : callable, optional
        Takes the results by name, such as `plots.waste`, and returns a matplotlib Figure or Axes.
    **ranges : tuple, range or list
        By field, of the experiment or of its workload, policy or backend: `rate`, or the end of a path where
        several are called so, as in `**{"prompt.low": (1, 64)}`. (low, high) or (low, high, step) is a slider, a
        logarithmic one if high is 64 times low or more and no step is given; a list is a choice. A list of policies
        brings controls for the parameters of the chosen one. Without any: all ready policies, rate, seats and budget.

    Raises
    ------
    ExperimentError
        A name of no field or of several, a range that is none, or a backend that is measured.
    ContbatchError
        A value in a range that the field does not take.

    Notes
    -----
    What can't run, such as too few pages for any request, is said in place of the figure. In a front end without
    widgets the output is the figure alone.
    """
    require(isinstance(experiment, Experiment), "experiment", experiment, "an Experiment", ExperimentError)
    limit = "a Simulated: every move of a slider is a run (a `Measured` cost model makes it run as a real one did)"
    require(not experiment.is_measured, "backend", experiment.backend, limit, ExperimentError)
    require(callable(draw), "draw", draw, "callable", ExperimentError)
    explorer = Explorer(experiment, ranges or usual_ranges(experiment), draw)
    explorer.update()
    closes_on_rerun(explorer.close)
    return explorer


def _rejections(result: Result) -> str:
    count, limits = (
        int((result.requests.finish_reason == "rejected").sum()),
        f"{result.num_pages} pages of {result.page_size}",
    )
    why = f"they need more than {limits} tokens, or than the model takes"
    return f"{count} of {len(result.requests)} requests were rejected: {why}" if count else ""
