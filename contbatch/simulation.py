"""Runs a workload under a policy on a device that is not there."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from contbatch.checks import is_int, is_real, replaced, require, require_counts, require_type, take_python_numbers
from contbatch.cost import CostModel, require_cost_model
from contbatch.counted_pages import CountedPool
from contbatch.decision_log import DecisionLog
from contbatch.engine import Engine
from contbatch.errors import CostModelError
from contbatch.fast_forward import FastForward
from contbatch.garbage import rarely_collected
from contbatch.hardware import Hardware
from contbatch.metrics import Result
from contbatch.model import ModelConfig
from contbatch.model_shape import ModelShape, model_shape
from contbatch.policies import ChunkedPrefill, Policy
from contbatch.roofline import Roofline
from contbatch.runners.simulated import SimulatedRunner
from contbatch.scheduler import Scheduler
from contbatch.source import Source
from contbatch.workload import Workload

_require = partial(require, error=CostModelError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A model on a device, both described by numbers.

    Parameters
    ----------
    gpu : str or Hardware
        A key of `contbatch.hardware.HARDWARE`.
    model : str, ModelShape or ModelConfig
        A key of `contbatch.model_shape.MODELS`.
    dtype : str
        Of the weights; see `Roofline`.
    tensor_parallel : int
        Devices that share the model.
    memory_utilization : float
        Share of each device's memory for weights, keys and values.
    kv_tokens : int, optional
        Tokens whose keys and values fit, in place of what `Roofline.kv_capacity` computes.
    cost : CostModel, optional
        In place of `Roofline(gpu, model, dtype, tensor_parallel)`, such as one with other efficiencies or a `Measured`.
    """

    gpu: str | Hardware = "A100-40GB"
    model: str | ModelShape | ModelConfig = "opt-13b"
    dtype: str = "f16"
    tensor_parallel: int = 1
    memory_utilization: float = 0.9
    kv_tokens: int | None = None
    cost: CostModel | None = None

    def __post_init__(self) -> None:
        take_python_numbers(self)
        share = self.memory_utilization
        _require(is_real(share) and 0 < share <= 1, "memory_utilization", share, "in (0, 1]")
        _require(self.kv_tokens is None or is_int(self.kv_tokens, 1), "kv_tokens", self.kv_tokens, "None or ≥ 1")
        model_shape(self.model)
        if self.cost is not None:
            require_cost_model(self.cost)
        if self.kv_tokens is None:
            self.roofline.kv_capacity(share)  # raises if the weights do not fit
        elif self.cost is None:
            self.runner()

    @property
    def roofline(self) -> Roofline:
        """The cost model from first principles, with its default efficiencies."""
        return Roofline(self.gpu, self.model, self.dtype, self.tensor_parallel)

    @property
    def kv_capacity(self) -> int:
        """Tokens whose keys and values fit."""
        return self.kv_tokens or self.roofline.kv_capacity(self.memory_utilization)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request that the model was made for."""
        return model_shape(self.model).max_position

    def runner(self, page_size: int = 16) -> SimulatedRunner:
        """Make a runner for `Engine`, on pages of so many tokens."""
        return SimulatedRunner(self.roofline if self.cost is None else self.cost, page_size)

    def replace(self, **changes: Any) -> "Simulated":
        """Return a copy with some fields changed; an unknown field raises `CostModelError`."""
        return replaced(self, changes, CostModelError)


def simulated(backend: Simulated | None) -> Simulated:
    """Return a backend, `Simulated()` if None; `CostModelError` for anything else."""
    require_type("backend", backend := Simulated() if backend is None else backend, Simulated, CostModelError)
    return backend


def simulated_engine(
    policy: Policy | None = None,
    backend: Simulated | None = None,
    *,
    num_pages: int | None = None,
    page_size: int = 16,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    max_model_len: int | None = None,
    prefix_cache: bool = False,
    num_host_pages: int = 0,
    layout: str = "paged",
    skip_with: Callable[[Scheduler, SimulatedRunner], FastForward] | None = FastForward,
    detail: bool = True,
    log: DecisionLog | None = None,
    single_samples: bool = False,
) -> Engine:
    """Make an engine on a simulated device; see `simulate` for the parameters.

    Several samples of a prompt share pages. Who says that there will be `single_samples` only gets pages without ids,
    where nothing else asks for them.
    """
    [page_size] = require_counts(page_size=page_size)
    backend = simulated(backend)
    scheduler = Scheduler(
        ChunkedPrefill() if policy is None else policy,
        num_pages=backend.kv_capacity // page_size if num_pages is None else num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=backend.max_model_len if max_model_len is None else max_model_len,
        prefix_cache=prefix_cache,
        num_host_pages=num_host_pages,
        layout=layout,
    )
    if single_samples and skip_with and log is None and layout == "paged" and not prefix_cache:
        scheduler.pool = scheduler.prefix_cache.pool = CountedPool(scheduler.pool.num_pages, page_size)
    runner = backend.runner(page_size)
    skipping = skip_with and skip_with(scheduler, runner)
    return Engine(scheduler, runner, fast_forward=skipping, detail=detail, log=log)


def simulate(
    workload: Workload,
    policy: Policy | None = None,
    backend: Simulated | None = None,
    *,
    num_pages: int | None = None,
    page_size: int = 16,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    max_model_len: int | None = None,
    prefix_cache: bool = False,
    num_host_pages: int = 0,
    layout: str = "paged",
    progress: bool = False,
    fast_forward: bool = True,
    detail: bool = True,
    log: DecisionLog | None = None,
) -> Result:
    """Run a workload to its end on a virtual clock, and return the tables of the run.

    Parameters
    ----------
    workload : Workload
    policy : Policy
        `ChunkedPrefill()` if None.
    backend : Simulated
        `Simulated()` if None: OPT-13B on an A100 of 40 GB.
    num_pages : int, optional
        All that fit beside the weights if None.
    page_size, max_num_seqs, max_num_batched_tokens, prefix_cache, num_host_pages, layout
        See `Scheduler`; swapping to host pages costs what `CostModel.swap_seconds` says.
    max_model_len : int, optional
        Longer requests are rejected; the model's own limit if None.
    progress : bool
        Show a bar of simulated time.
    fast_forward : bool
        Whether steps that can be told beforehand are not planned: the same result, sooner. It takes a policy that is
        `steady`, as the ready ones are whose order does not hang on time or service.
    detail : bool
        Whether to keep a row for each step, the time of each token and who sat where; else memory does not grow with
        tokens and steps, `Result.segments` and `token_s` are empty, and `itl_s` and `waste` raise `DetailError`.
    log : DecisionLog, optional
        A new one, told every decision.
    """
    from contbatch.experiment import Experiment  # which is made of parts of this module
    from contbatch.provenance import attach, provenance_of

    policy, backend = ChunkedPrefill() if policy is None else policy, simulated(backend)
    limits: dict[str, Any] = {"num_pages": num_pages, "page_size": page_size, "max_model_len": max_model_len}
    limits |= {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    limits |= {"prefix_cache": prefix_cache, "num_host_pages": num_host_pages, "layout": layout}
    provenance = provenance_of(Experiment(policy=policy, workload=workload, backend=backend, **limits))
    with rarely_collected():  # only the result is left when it ends
        engine = simulated_engine(
            policy,
            backend,
            skip_with=FastForward if fast_forward else None,
            detail=detail,
            log=log,
            single_samples=True,
            **limits,
        )
        result = _run(engine, workload.source(model_shape(backend.model).vocab_size), progress)
        result = replace(result, max_num_seqs=engine.scheduler.max_num_seqs)
        engine.scheduler.decoders = None
        del engine
        return attach(result, provenance)


def _run(engine: Engine, source: Source, progress: bool) -> Result:
    return engine.run(
        source.requests(),
        on_finish=source.on_finish if source.waits_for_answers else None,
        in_order=source.in_order,
        progress=progress,
        last_arrival_s=source.last_arrival_s,
    )
