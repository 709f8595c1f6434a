"""Continuous batching and paged attention you can read: one scheduler, on a real model.

Nothing heavy is imported until a name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contbatch import errors, plots
    from contbatch.decision_log import DecisionLog
    from contbatch.engine import Engine, StepResult
    from contbatch.llm import LLM
    from contbatch.logprob import Logprob
    from contbatch.metrics import Result
    from contbatch.output import RequestOutput
    from contbatch.pages import PagePool
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
    from contbatch.prefix_cache import PrefixCache
    from contbatch.request import Request, RequestStatus
    from contbatch.sampling_params import SamplingParams
    from contbatch.scheduler import Scheduler
    from contbatch.step import Grant, SchedulerOutput

_WHERE = {
    "errors": "",
    "plots": "",
    "ChunkedPrefill": "policies",
    "ContinuousBatching": "policies",
    "DecisionLog": "decision_log",
    "DeadlineFirst": "policies",
    "Engine": "engine",
    "FairShare": "policies",
    "Grant": "step",
    "GuaranteedNoEvict": "policies",
    "LLM": "llm",
    "Logprob": "logprob",
    "MaxUtilization": "policies",
    "OneAtATime": "policies",
    "Orca": "policies",
    "PagePool": "pages",
    "Policy": "policies",
    "Priority": "policies",
    "PrefixCache": "prefix_cache",
    "Request": "request",
    "RequestOutput": "output",
    "RequestStatus": "request",
    "Result": "metrics",
    "SamplingParams": "sampling_params",
    "Scheduler": "scheduler",
    "SchedulerOutput": "step",
    "ShortestJobFirst": "policies",
    "StaticBatching": "policies",
    "StepResult": "engine",
}
__all__ = [  # noqa: RUF022 - the order in which a reader meets them
    "LLM",
    "SamplingParams",
    "Request",
    "RequestStatus",
    "RequestOutput",
    "Logprob",
    "Policy",
    "ContinuousBatching",
    "ChunkedPrefill",
    "Orca",
    "StaticBatching",
    "OneAtATime",
    "ShortestJobFirst",
    "Priority",
    "FairShare",
    "DeadlineFirst",
    "MaxUtilization",
    "GuaranteedNoEvict",
    "Scheduler",
    "SchedulerOutput",
    "Grant",
    "PagePool",
    "PrefixCache",
    "Engine",
    "StepResult",
    "Result",
    "DecisionLog",
    "errors",
    "plots",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'contbatch' has no attribute {name!r}")
    if not _WHERE[name]:
        return import_module(f"contbatch.{name}")
    value = globals()[name] = getattr(import_module(f"contbatch.{_WHERE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
