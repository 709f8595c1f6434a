"""Several measured experiments on one model, some steps of each in turn.

A machine that others use too, or that grows warm, is a third faster now than in a minute. Of two runs one after the
other nobody can say what part of their difference is the machine's. Here whichever has answered the smallest share of
its requests takes the next steps, so that all meet the same machine from their beginning to their end; each clock
counts its own steps only. Before a turn the last step of the same experiment is computed again, uncounted: the first
one after another's would pay for a library that prepares for another number of rows, and for pages that have gone from
the processor's caches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contbatch.checks import require, tuple_of
from contbatch.decision_log import DecisionLog
from contbatch.engine import Engine
from contbatch.engine_run import Run
from contbatch.errors import ExperimentError
from contbatch.experiment import Experiment
from contbatch.metrics import Result
from contbatch.provenance import attach, provenance_of
from contbatch.request import Request
from contbatch.runners.model_runner import ModelRunner, PagedModel
from contbatch.scheduler import Scheduler
from contbatch.step import PageMove

if TYPE_CHECKING:
    from contbatch.llm import LLM

TURN_S = 0.5
"""Seconds of a turn: far less than a machine takes to change, far more than a step, as the first may be slower."""


class PagesFrom:
    """A model with the pages of another from `first` on, numbered from 0; none on the host."""

    num_host_pages = 0

    def __init__(self, model: PagedModel, first: int, num_pages: int) -> None:
        self._model, self._first = model, first
        self.config, self.num_pages, self.page_size = model.config, num_pages, model.page_size
        self._last: Mapping[str, np.ndarray] | None = None

    def forward(self, inputs: Mapping[str, np.ndarray]) -> NDArray[np.float32]:
        """Run one step: see `PagedModel.forward`."""
        table = inputs["block_table"]
        self._last = {**inputs, "block_table": np.where(table < 0, table, table + self._first)}
        return self._model.forward(self._last)

    def resume(self) -> None:
        """Run the last step again, if there was any: it leaves in its pages what it left there before."""
        if self._last is not None:
            self._model.forward(self._last)

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Copy pages; see `PagedModel.move_pages`."""
        first = self._first
        self._model.move_pages([PageMove(kind, source + first, target + first) for kind, source, target in moves])

    def close(self) -> None:
        """Leave the model to its owner."""


def run_in_turns(experiments: Iterable[Experiment], *, log: bool = False) -> list[Result]:
    """Run measured experiments on their LLM, some steps of each in turn; return their results in the same order.

    Parameters
    ----------
    experiments : iterable of Experiment
        All with the same LLM of the backend "cpu" or "reference", whose pages they share out: each takes its
        `num_pages`, or an equal part if that is None. Nothing is swapped to the host.
    log : bool
        Whether each result keeps its decisions.

    Raises
    ------
    ExperimentError
        Something is no experiment; there is no LLM, or more than one, or too few pages.
    RunnerError
        Another call on the LLM is still going on.
    """
    given = tuple_of(experiments, "experiments", "a list of experiments", ExperimentError)
    llm, pages = _llm_of(given), _pages_of(given)
    firsts = np.cumsum([0, *pages]).tolist()
    used = llm.description() | {"num_host_pages": PagesFrom.num_host_pages}
    told = [provenance_of(e.replace(num_pages=num), used) for e, num in zip(given, pages, strict=True)]

    def make(on_token: Callable[[Request], bool]) -> list[Engine]:
        return [
            Engine(
                Scheduler(e.policy, **_limits(e, llm, num_pages)),
                ModelRunner(PagesFrom(llm.runner.model, first, num_pages)),
                on_token=on_token,
                log=DecisionLog() if log else None,
            )
            for e, num_pages, first in zip(given, pages, firsts[:-1], strict=True)
        ]

    with llm._engine.replaced(make, "run_in_turns") as engines:
        # Memory is slow when it is written for the first time, and each server has other pages.
        llm.runner.model.move_pages([PageMove("copy", 0, page) for page in range(firsts[-1])])
        _run(engines, given)
    results = [replace(e.recorder.result(), decisions=e.log, max_num_seqs=e.scheduler.max_num_seqs) for e in engines]
    return [attach(result, provenance) for result, provenance in zip(results, told, strict=True)]


def _run(engines: Sequence[Engine], experiments: Sequence[Experiment]) -> None:
    going: dict[Run, float] = {}  # and which share of their requests they have answered
    totals: dict[Run, int] = {}
    for engine, experiment in zip(engines, experiments, strict=True):
        source = experiment.workload.source(engine.runner.model.config.vocab_size)  # type: ignore[attr-defined]
        run = Run(engine, source.requests(), source.on_finish, in_order=False)
        going[run], totals[run] = 0.0, len(source.turns)
        run.begin()
    while going:
        behind = min(going, key=lambda run: (going[run], run.engine.next_start()))
        behind.engine.runner.model.resume()  # type: ignore[attr-defined]
        until = behind.engine.next_start() + TURN_S
        while (answered := behind.advance()) is not None:
            going[behind] += len(answered) / totals[behind]
            if behind.engine.next_start() >= until:
                break
        else:
            del going[behind]


def _llm_of(experiments: Sequence[Experiment]) -> "LLM":
    for e in experiments:
        require(isinstance(e, Experiment), "what runs in turns", e, "an Experiment", ExperimentError)
    llms = {id(e.backend): e.backend for e in experiments}
    require(len(llms) == 1, "backends of experiments that run in turns", len(llms), "the same LLM", ExperimentError)
    [llm] = llms.values()
    kind = type(getattr(llm, "runner", None))
    require(kind is ModelRunner, "backend", llm, "an LLM on the CPU", ExperimentError)
    return llm  # type: ignore[return-value]


def _pages_of(experiments: Sequence[Experiment]) -> list[int]:
    """Return how many pages each gets."""
    have = experiments[0].backend.runner.model.num_pages  # type: ignore[union-attr]
    pages = [have // len(experiments) if e.num_pages is None else e.num_pages for e in experiments]
    require(
        min(pages) >= 1,
        "experiments that run in turns",
        len(pages),
        f"at most one for each of {have} pages",
        ExperimentError,
    )
    most = f"at most the {have} pages of the LLM"
    require(sum(pages) <= have, "the sum of num_pages", sum(pages), most, ExperimentError)
    return pages


def _limits(experiment: Experiment, llm: "LLM", num_pages: int) -> dict[str, Any]:
    names = ("max_num_seqs", "max_num_batched_tokens", "prefix_cache", "layout")
    limits: dict[str, Any] = {name: getattr(experiment, name) for name in names}
    return limits | {
        "num_pages": num_pages,
        "page_size": llm.runner.model.page_size,
        "max_model_len": llm.config.max_position,
    }
