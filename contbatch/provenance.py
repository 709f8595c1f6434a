"""Where a result comes from: all that somebody else needs to run it again and to judge whether it must be the same."""

import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contbatch.description import code_version, describe, digest
from contbatch.doctor import diagnose, find_packages
from contbatch.errors import ExperimentError
from contbatch.metrics import Result
from contbatch.policies import Policy
from contbatch.request import Request
from contbatch.simulation import Simulated
from contbatch.workload import Mixture, Workload

if TYPE_CHECKING:
    from contbatch.experiment import Experiment
    from contbatch.llm import LLM

Description = dict[str, Any]
Seed = int | tuple[int, ...] | None
REQUESTS = "requests"
"""Type of a description of `LLM.run` on a list of requests."""
REQUEST_FIELDS = (
    *("request_id", "prompt_token_ids", "sampling", "arrival_time", "eos_token_ids", "priority", "client_id"),
    *("ttft_target_s", "tpot_target_s", "expected_output_tokens", "cache_salt"),
)
IDLE = ("platformdirs", "tqdm")
"""Packages that no figure hangs on."""


@dataclass(frozen=True)
class Provenance:
    """What made a result, and on what."""

    title: str
    """The run in one line, for pictures."""
    is_measured: bool
    """Whether a model ran, so that times are those of the machine."""
    seed: Seed
    """Of the workload; those of a mixture's parts, or of sampling; None for a trace, or greedy answers."""
    versions: dict[str, str]
    """Of Python and of the packages that the figures can hang on."""
    code: str
    """Hash of this package's source: `description.code_version`."""
    hardware: dict[str, str | int]
    """The machine that ran it."""
    made: str
    """When, in UTC."""
    describe: Callable[[], Description] = field(repr=False, compare=False)

    @cached_property
    def description(self) -> Description:
        """The experiment as `description.describe` tells it; `ExperimentError` if its policy's source is nowhere."""
        return self.describe()

    @property
    def hash(self) -> str:
        """`Experiment.hash` of the experiment that made it."""
        return digest(self.description)


def provenance_of(experiment: "Experiment", backend: Mapping[str, Any] | None = None) -> Provenance:
    """Note where the result of an experiment that is about to run comes from.

    `backend`: what describes its LLM, if the run has less than all of it.

    All but the workload, which may be long, is described at once: what is of one's own may change, and a result must
    not keep a model in memory.
    """
    told = {f.name: _tell(getattr(experiment, f.name)) for f in fields(experiment) if f.name != "workload"}
    if backend is not None:
        told["backend"] = describe(backend)
    told["type"] = f"{type(experiment).__module__}.{type(experiment).__qualname__}"
    described = partial(_described, told, experiment.workload)
    title, seed = title_of_runs([experiment]), _seed(experiment.workload)
    return _noted(title, experiment.is_measured, seed, experiment.backend, described)


def provenance_of_requests(
    llm: "LLM", policy: Policy, limits: Mapping[str, Any], requests: Sequence[Request]
) -> Provenance:
    """Note where the result of `LLM.run` on a list of requests, all there is, comes from."""
    told = {"type": REQUESTS, "backend": describe(llm), "policy": _tell(policy), "limits": describe(limits)}
    seeds = {request.sampling.seed for request in requests if request.sampling.seed is not None}
    title = f"{policy!r}, {len(requests)} requests, {_device(llm)}"
    return _noted(title, True, tuple(sorted(seeds)) or None, llm, partial(_described_requests, told, requests))


def attach(result: Result, provenance: Provenance) -> Result:
    """Return the result with its provenance; its tables know what was run (`DataFrame.attrs`), for their pictures."""
    for table in (result.requests, result.steps, result.segments):
        table.attrs["run"] = provenance.title
    return replace(result, provenance=provenance)


def title_of_runs(experiments: "Sequence[Experiment]") -> str:
    """Say in one line what was run: policy, workload and device, as far as they are the same for all."""
    titles = [(repr(e.policy), _brief(e.workload), _device(e.backend)) for e in experiments]
    return ", ".join(parts[0] for parts in zip(*titles, strict=True) if len(set(parts)) == 1)


def _noted(
    title: str, is_measured: bool, seed: Seed, backend: "Simulated | LLM", describe: Callable[[], Description]
) -> Provenance:
    """Add what machine and code this is."""
    on_gpu = _identity(backend).get("backend") == "tensorrt"
    machine = hardware() | ({"gpu": ", ".join(diagnose().gpus)} if on_gpu else {})
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return Provenance(title, is_measured, seed, versions(is_measured), code_version(), machine, made, describe)


def _tell(value: Any) -> Any:
    """Describe a part of an experiment; if that can't be, the error is for whoever asks for the description."""
    try:
        return describe(value)
    except (ExperimentError, RecursionError) as error:
        return ExperimentError(f"{value!r} can't be described: {error}")


def _described(parts: Description, workload: Workload) -> Description:
    return {**_checked(parts), "workload": describe(workload)}


def _described_requests(parts: Description, requests: Sequence[Request]) -> Description:
    rows = [{name: getattr(request, name) for name in REQUEST_FIELDS} for request in requests]
    return {
        **_checked(parts),
        "requests": describe([row | {"prompt_token_ids": list(row["prompt_token_ids"])} for row in rows]),
    }


def _checked(parts: Description) -> Description:
    for part in parts.values():
        if isinstance(part, ExperimentError):
            raise part
    return parts


def _brief(workload: Workload) -> str:
    """Name a workload with its plain numbers and texts, without the distributions."""
    names: list[str] = [f.name for f in fields(workload) if f.init] if is_dataclass(workload) else []
    known = [(name, getattr(workload, name)) for name in names if name != "seed"]
    told = [(name, value) for name, value in known if isinstance(value, (int, float, str)) and value]
    inside = [f"{name}={value}" for name, value in told]
    parts = [_brief(part) for part in workload.parts] if isinstance(workload, Mixture) else []
    return f"{type(workload).__name__}({', '.join(inside + parts)})"


def _identity(backend: Any) -> Description:
    """Return what an LLM says of itself."""
    tell = getattr(backend, "description", None)
    return dict(tell()) if callable(tell) else {}


def _device(backend: Any) -> str:
    if not isinstance(backend, Simulated):
        told = _identity(backend)
        return f"{told.get('model', type(backend).__name__)}, measured"
    model, gpu = (getattr(value, "name", value) for value in (backend.model, backend.gpu))
    many = f"{backend.tensor_parallel} × " if backend.tensor_parallel > 1 else ""
    return f"{model} on {many}{gpu}, simulated"


def _seed(workload: Workload) -> Seed:
    if isinstance(workload, Mixture):
        return tuple(seed for part in workload.parts if isinstance(seed := _seed(part), int))
    return getattr(workload, "seed", None)


@cache
def versions(is_measured: bool) -> dict[str, str]:
    """Return the versions that figures can hang on: of Python, this package, what is always needed, what runs a model.

    Simulations compute with numpy and pandas only.
    """
    groups = ("", "cpu", "tensorrt") if is_measured else ("",)
    packages = find_packages()
    found = {p.name: p.installed for group in groups for p in packages[group] if p.installed and p.name not in IDLE}
    return {"python": platform.python_version(), "contbatch": version("contbatch"), **found}


@cache
def hardware() -> dict[str, str | int]:
    """Return what this machine is: architecture, processor, cores, operating system."""
    try:
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        cpu = None
    name = cpu[1] if cpu else platform.processor()
    return {"machine": platform.machine(), "cpu": name, "cores": os.cpu_count() or 0, "system": platform.platform()}
