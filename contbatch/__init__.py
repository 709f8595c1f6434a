"""Continuous batching and paged attention you can read: one scheduler, on a real model.

Nothing heavy is imported until a name is used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

import contbatch.open_models  # noqa: F401 (now: see there)
from contbatch.doctor import missing_packages_named

if TYPE_CHECKING:
    from contbatch import arrivals, errors, lengths, plots, traces
    from contbatch.beam_search import BeamSearchParams
    from contbatch.capacity import Capacity, find_capacity
    from contbatch.cost import CostModel, Linear
    from contbatch.decision_log import DecisionLog
    from contbatch.disaggregated import DisaggregatedResult, Link, simulate_disaggregated
    from contbatch.engine import Engine, StepResult
    from contbatch.experiment import Experiment, run
    from contbatch.explorer import explore
    from contbatch.fairness import by_client, jain
    from contbatch.fleet import FleetResult, simulate_fleet
    from contbatch.hardware import Hardware
    from contbatch.hosting import Prices
    from contbatch.in_turns import run_in_turns
    from contbatch.limits import limits_bound
    from contbatch.llm import LLM
    from contbatch.logprob import Logprob
    from contbatch.measured import Measured
    from contbatch.metrics import Result
    from contbatch.model_shape import ModelShape
    from contbatch.output import RequestOutput
    from contbatch.pages import PagePool
    from contbatch.player import replay
    from contbatch.policies import (
        ChunkedPrefill,
        ContinuousBatching,
        DeadlineFirst,
        FairShare,
        GuaranteedNoEvict,
        MaxUtilization,
        OneAtATime,
        Orca,
        Policy,
        Priority,
        ShortestJobFirst,
        StaticBatching,
    )
    from contbatch.prediction import prediction_errors
    from contbatch.prefix_cache import PrefixCache
    from contbatch.provenance import Provenance
    from contbatch.request import Request, RequestStatus
    from contbatch.result_file import load_result
    from contbatch.roofline import Roofline
    from contbatch.routers import LeastTokens, PowerOfTwo, PrefixAffinity, RoundRobin, Router
    from contbatch.sampling_params import SamplingParams
    from contbatch.scheduler import Scheduler
    from contbatch.seeds import confidence
    from contbatch.sessions import AgentLoops, ClosedLoop, Conversations
    from contbatch.simulation import Simulated, simulate
    from contbatch.step import Grant, PageMove, SchedulerOutput
    from contbatch.step_shape import StepShape
    from contbatch.swap_space import SwapSpace
    from contbatch.sweeps import sweep
    from contbatch.timeline import over_time
    from contbatch.trace import Trace
    from contbatch.turn import Client, Segment, Turn
    from contbatch.verification import Verification, verify
    from contbatch.workload import Mixture, OpenLoop, Poisson, SharedPrefix, Workload
    from contbatch.workload_file import load_workload

_WHERE = {
    "arrivals": "",
    "errors": "",
    "lengths": "",
    "plots": "",
    "traces": "",
    "AgentLoops": "sessions",
    "BeamSearchParams": "beam_search",
    "Capacity": "capacity",
    "ChunkedPrefill": "policies",
    "Client": "turn",
    "ClosedLoop": "sessions",
    "ContinuousBatching": "policies",
    "Conversations": "sessions",
    "CostModel": "cost",
    "DecisionLog": "decision_log",
    "DeadlineFirst": "policies",
    "DisaggregatedResult": "disaggregated",
    "Engine": "engine",
    "Experiment": "experiment",
    "FairShare": "policies",
    "FleetResult": "fleet",
    "Grant": "step",
    "GuaranteedNoEvict": "policies",
    "Hardware": "hardware",
    "LLM": "llm",
    "LeastTokens": "routers",
    "Linear": "cost",
    "Link": "disaggregated",
    "Logprob": "logprob",
    "MaxUtilization": "policies",
    "Measured": "measured",
    "Mixture": "workload",
    "ModelShape": "model_shape",
    "OneAtATime": "policies",
    "OpenLoop": "workload",
    "Orca": "policies",
    "PageMove": "step",
    "PagePool": "pages",
    "Poisson": "workload",
    "Policy": "policies",
    "PowerOfTwo": "routers",
    "PrefixAffinity": "routers",
    "PrefixCache": "prefix_cache",
    "Prices": "hosting",
    "Priority": "policies",
    "Provenance": "provenance",
    "Request": "request",
    "RequestOutput": "output",
    "RequestStatus": "request",
    "Result": "metrics",
    "Roofline": "roofline",
    "RoundRobin": "routers",
    "Router": "routers",
    "SamplingParams": "sampling_params",
    "Scheduler": "scheduler",
    "SchedulerOutput": "step",
    "Segment": "turn",
    "SharedPrefix": "workload",
    "ShortestJobFirst": "policies",
    "Simulated": "simulation",
    "StaticBatching": "policies",
    "StepResult": "engine",
    "StepShape": "step_shape",
    "SwapSpace": "swap_space",
    "Trace": "trace",
    "Turn": "turn",
    "Verification": "verification",
    "Workload": "workload",
    "by_client": "fairness",
    "confidence": "seeds",
    "explore": "explorer",
    "find_capacity": "capacity",
    "jain": "fairness",
    "limits_bound": "limits",
    "load_result": "result_file",
    "load_workload": "workload_file",
    "over_time": "timeline",
    "prediction_errors": "prediction",
    "replay": "player",
    "run": "experiment",
    "run_in_turns": "in_turns",
    "simulate": "simulation",
    "simulate_disaggregated": "disaggregated",
    "simulate_fleet": "fleet",
    "sweep": "sweeps",
    "verify": "verification",
}
# fmt: off
__all__ = [  # noqa: RUF022 - the order in which a reader meets them
    "LLM", "SamplingParams", "BeamSearchParams", "Request", "RequestStatus", "RequestOutput", "Logprob", "Policy",
    "ContinuousBatching", "ChunkedPrefill", "Orca", "StaticBatching", "OneAtATime", "ShortestJobFirst", "Priority",
    "FairShare", "DeadlineFirst", "MaxUtilization", "GuaranteedNoEvict", "Scheduler", "SchedulerOutput", "Grant",
    "PageMove", "PagePool", "SwapSpace", "PrefixCache", "Engine", "StepResult", "Result", "Workload", "Poisson",
    "OpenLoop", "ClosedLoop", "Conversations", "AgentLoops", "Mixture", "SharedPrefix", "Client", "Turn", "Segment",
    "Trace", "load_workload", "simulate", "Simulated", "simulate_fleet", "FleetResult", "simulate_disaggregated",
    "DisaggregatedResult", "Link", "Router", "RoundRobin", "LeastTokens", "PrefixAffinity", "PowerOfTwo",
    "Experiment", "run", "run_in_turns", "sweep", "load_result", "verify", "Verification", "Provenance",
    "prediction_errors", "find_capacity", "Capacity", "limits_bound", "Prices", "by_client", "jain", "over_time",
    "confidence", "explore", "replay", "CostModel",
    "Roofline", "Linear", "Measured", "Hardware", "ModelShape", "StepShape", "arrivals", "lengths", "traces",
    "DecisionLog", "errors", "plots",
]
# fmt: on


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("contbatch")
    if name not in _WHERE:
        raise AttributeError(f"module 'contbatch' has no attribute {name!r}")
    if not _WHERE[name]:
        return import_module(f"contbatch.{name}")
    with missing_packages_named():
        value = globals()[name] = getattr(import_module(f"contbatch.{_WHERE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
