"""An experiment: a workload, a policy, a backend and the limits between them."""

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from contbatch.checks import is_int, replaced, require, require_counts, require_type, take_python_numbers
from contbatch.decision_log import DecisionLog
from contbatch.description import describe, digest, restore
from contbatch.errors import ExperimentError
from contbatch.metrics import Result
from contbatch.policies import ChunkedPrefill, Policy
from contbatch.provenance import attach, provenance_of
from contbatch.simulation import Simulated, simulate
from contbatch.workload import Workload

if TYPE_CHECKING:
    from contbatch.llm import LLM

_require = partial(require, error=ExperimentError)
_DEFAULT_POLICY, _DEFAULT_BACKEND = ChunkedPrefill(), Simulated()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All that decides a run. The same experiment on a simulated backend gives the same tables, on every platform.

    Parameters
    ----------
    policy : Policy
    workload : Workload
    backend : Simulated or LLM
        A device made of numbers, or a loaded model that is measured.
    num_pages : int, optional
        All that the backend has if None.
    page_size, max_num_seqs, max_num_batched_tokens, max_model_len, prefix_cache, num_host_pages, layout
        See `Scheduler`; an LLM has its own `page_size`, `max_model_len` and host pages.

    Raises
    ------
    ExperimentError
        A field of a wrong type or out of its range.
    """

    policy: Policy = _DEFAULT_POLICY
    workload: Workload
    backend: "Simulated | LLM" = _DEFAULT_BACKEND
    num_pages: int | None = None
    page_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    prefix_cache: bool = False
    num_host_pages: int = 0
    layout: str = "paged"

    def __post_init__(self) -> None:
        take_python_numbers(self)
        _require(isinstance(self.workload, Workload), "workload", self.workload, "a Workload")
        _require(isinstance(self.policy, Policy), "policy", self.policy, "an instance of Policy")
        runs = isinstance(self.backend, Simulated) or callable(getattr(self.backend, "run", None))
        _require(runs, "backend", self.backend, "a Simulated or an LLM")
        counts = {name: getattr(self, name) for name in ("page_size", "max_num_seqs", "max_num_batched_tokens")}
        optional = {name: getattr(self, name) for name in ("num_pages", "max_model_len")}
        require_counts(**counts, **{name: value for name, value in optional.items() if value is not None})
        _require(is_int(self.num_host_pages, 0), "num_host_pages", self.num_host_pages, "an integer ≥ 0")
        _require(isinstance(self.prefix_cache, bool), "prefix_cache", self.prefix_cache, "True or False")

    @property
    def is_measured(self) -> bool:
        """Whether a model runs, so that the times are those of this machine."""
        return not isinstance(self.backend, Simulated)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; an unknown field raises `ExperimentError`."""
        return replaced(self, changes, ExperimentError)

    @property
    def hash(self) -> str:
        """Sixteen hexadecimal digits: equal for equal experiments, of whatever session and platform."""
        return digest(describe(self))

    def to_json(self) -> str:
        """Return a text from which `from_json` makes an equal experiment.

        An LLM is described by its source text only, and a policy written outside this package as well: these can't be
        read back.
        """
        return json.dumps(describe(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Experiment":
        """Read what `to_json` wrote; `ExperimentError` if it is something else."""
        require_type("what is read", text, str, ExperimentError)
        try:
            experiment = restore(json.loads(text))
        except json.JSONDecodeError as error:
            raise ExperimentError(f"not JSON: {error}") from None
        if not isinstance(experiment, cls):
            raise ExperimentError(f"the JSON describes no experiment, but {type(experiment).__name__}")
        return experiment


def run(
    experiment: Experiment,
    *,
    progress: bool = False,
    live: bool | None = None,
    detail: bool = True,
    log: DecisionLog | None = None,
) -> Result:
    """Run an experiment to its end and return its tables, with their provenance.

    A measured run takes the LLM's pages, seats of the experiment, and its policy; it needs the LLM to itself.

    Parameters
    ----------
    experiment : Experiment
    progress : bool
        Show a bar of finished requests.
    live : bool, optional
        Show seats, tokens per second and pages of a measured run as it goes, at most four times a second: None if a
        person is at the notebook (not under nbval, nbconvert or papermill, and not in a script). The environment
        variable TQDM_DISABLE=1 hides it. A simulated run is over before one could look.
    detail : bool
        See `simulate`; a measured run keeps everything.
    log : DecisionLog, optional
        A new one, told every decision.
    """
    _require(isinstance(experiment, Experiment), "experiment", experiment, "an Experiment")
    names = ("num_pages", "max_num_seqs", "max_num_batched_tokens", "prefix_cache", "layout")
    limits: dict[str, Any] = {name: getattr(experiment, name) for name in names} | {"progress": progress, "log": log}
    workload, policy, backend = experiment.workload, experiment.policy, experiment.backend
    if not isinstance(backend, Simulated):
        provenance = provenance_of(experiment)
        source = workload.source(backend.config.vocab_size)
        result = backend.run(source.requests(), policy, on_finish=source.on_finish, live=live, **limits)
        return attach(result, provenance)
    limits |= {"page_size": experiment.page_size, "max_model_len": experiment.max_model_len, "detail": detail}
    result = simulate(workload, policy, backend, num_host_pages=experiment.num_host_pages, **limits)
    return replace(result, experiment=experiment)
