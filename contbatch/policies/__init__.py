"""Who computes how many tokens in a step: the base of all policies, and the ready ones."""

from contbatch.policies.chunked_prefill import ChunkedPrefill
from contbatch.policies.continuous_batching import ContinuousBatching
from contbatch.policies.deadline_first import DeadlineFirst
from contbatch.policies.fair_share import FairShare
from contbatch.policies.guaranteed_no_evict import GuaranteedNoEvict
from contbatch.policies.max_utilization import MaxUtilization
from contbatch.policies.one_at_a_time import OneAtATime
from contbatch.policies.orca import Orca
from contbatch.policies.policy import Plan, Policy
from contbatch.policies.preemptive import Preemptive
from contbatch.policies.priority import Priority
from contbatch.policies.shortest_job_first import ShortestJobFirst
from contbatch.policies.static_batching import StaticBatching

__all__ = [
    "ChunkedPrefill",
    "ContinuousBatching",
    "DeadlineFirst",
    "FairShare",
    "GuaranteedNoEvict",
    "MaxUtilization",
    "OneAtATime",
    "Orca",
    "Plan",
    "Policy",
    "Preemptive",
    "Priority",
    "ShortestJobFirst",
    "StaticBatching",
]
