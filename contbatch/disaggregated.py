"""Prompts on some replicas, answers on others, and a link between them for the keys and values.

DistServe (Zhong et al., OSDI 2024) and Splitwise (Patel et al., ISCA 2024): no prompt ever delays the next token of
somebody else, at the price of moving what was computed.

    arrival -> prefill replica: queue, prompt, first token -> link: queue, transfer -> decode replica: queue, the rest

A transfer begins when the prompt is finished, behind those that the same prefill replica sends already, and overlaps
with everything that both replicas compute meanwhile. What has come waits outside the decode replica's pages until it is
admitted; entering them costs nothing more. The prefill replica's pages are free once its prompt is finished.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd

from contbatch.checks import require, require_positive, require_seconds, require_type, take_python_numbers
from contbatch.errors import CostModelError, RouterError, WorkloadError
from contbatch.fleet import Balancer, FleetResult, feed, result_of
from contbatch.garbage import rarely_collected
from contbatch.hardware import DTYPE_BYTES
from contbatch.machines import EventLoop, Machines, require_machines
from contbatch.metrics import Result
from contbatch.model_shape import model_shape
from contbatch.policies import ChunkedPrefill, Policy
from contbatch.request import Request, RequestStatus
from contbatch.routers import LeastTokens, Router
from contbatch.runners.simulated import num_steps_alike
from contbatch.simulation import Simulated, simulated
from contbatch.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What leaves a prefill replica: one transfer after another.

    Parameters
    ----------
    bytes_per_s : float
        50 GB/s, that is 400 Gb/s, is one port of NDR InfiniBand.
    latency_s : float
        From the last byte sent to its arrival.
    """

    bytes_per_s: float = 50e9
    latency_s: float = 10e-6

    def __post_init__(self) -> None:
        take_python_numbers(self)
        require_positive(CostModelError, bytes_per_s=self.bytes_per_s)
        require_seconds(CostModelError, latency_s=self.latency_s)


@dataclass(frozen=True)
class DisaggregatedResult(FleetResult):
    """What each replica did: first those that compute prompts, then those that answer."""

    num_prefill: int
    transfers: pd.DataFrame = field(repr=False)
    """A row for each: `request_id`, `source` and `target` (replicas), `num_bytes`, `ready_s` (prompt finished),
    `begin_s`, `end_s` (all has arrived)."""

    @cached_property
    def together(self) -> Result:
        """See `FleetResult.together`; a request is one row.

        It tells `replica` (of its prompt), `decode_replica` (NaN if its first token was its last) and `transfer_s`,
        from its first token to its arrival at that replica.
        """
        both = super().together
        rows = both.requests
        is_decode = rows.replica >= self.num_prefill
        requests = _joined(rows[~is_decode].set_index("request_id"), rows[is_decode].set_index("request_id"))
        moved = self.transfers.set_index("request_id")
        requests["transfer_s"] = (moved.end_s - moved.ready_s).reindex(requests.request_id).to_numpy()
        token_s: dict[int | str, list[float]] = {}
        for result in self.replicas:  # prompts come first
            for name, times in result.token_s.items():
                token_s[name] = token_s.get(name, []) + times
        return replace(both, requests=requests, token_s=token_s)

    def balance(self) -> pd.DataFrame:
        """See `FleetResult.balance`; `kind` tells what a replica computes."""
        kinds = ["prefill"] * self.num_prefill + ["decode"] * (len(self.replicas) - self.num_prefill)
        table = super().balance()
        table.insert(0, "kind", kinds)
        return table


def _joined(first: pd.DataFrame, rest: pd.DataFrame) -> pd.DataFrame:
    """Make one row of a request's two: its prompt with the first token, and the other tokens."""
    rest = rest.reindex(first.index)
    went_on = rest.finish_reason.notna()
    rows = first.copy()
    for name in ("finished_s", "generated_s", "finish_reason"):
        rows[name] = rest[name].where(went_on, first[name])
    for name in ("output_tokens", "preemptions"):
        rows[name] = (first[name] + rest[name].fillna(0)).astype(int)
    rows["e2e_s"] = rows.finished_s - rows.arrival_s
    rows["normalized_latency_s"] = rows.e2e_s / rows.output_tokens.clip(lower=1)
    rows["tpot_s"] = (rows.finished_s - rows.first_token_s) / (rows.output_tokens - 1).where(went_on)
    rows["max_itl_s"] = np.fmax(rest.first_token_s - first.first_token_s, rest.max_itl_s)
    rows["decode_replica"] = rest.replica
    left = rows.finished_s.fillna(rows.arrival_s).sort_values(kind="stable").index
    return rows.loc[left].reset_index()


def simulate_disaggregated(
    workload: Workload,
    num_prefill: int,
    num_decode: int,
    policy: Policy | None = None,
    backend: Simulated | None = None,
    *,
    link: Link | None = None,
    routers: tuple[Router, Router] | None = None,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    **limits: Any,
) -> DisaggregatedResult:
    """Run a workload on replicas that compute prompts, and others that answer.

    Parameters
    ----------
    workload : Workload
    num_prefill, num_decode : int
        Replicas of each kind.
    policy, backend
        Of each replica: see `simulate`. The policy must release tokens as they are made.
    link : Link
        From each prefill replica to all others; `Link()` if None.
    routers : (Router, Router)
        Of prompts when they arrive, and of answers when their prompts are finished; `LeastTokens()` both if None.
    prefill, decode : mapping
        Limits of one kind of replica only, such as `max_num_seqs`; pages are the same in both.
    **limits
        Of all of them, and `detail`: see `simulate`. A prefix cache is used by the prefill replicas only.
    """
    num_prefill, num_decode = require_machines(num_prefill=num_prefill, num_decode=num_decode)
    require_type("workload", workload, Workload, WorkloadError)
    policy, backend = ChunkedPrefill() if policy is None else policy, simulated(backend)
    link, routers = Link() if link is None else link, (LeastTokens(), LeastTokens()) if routers is None else routers
    require_type("policy", policy, Policy)
    require_type("link", link, Link)
    require(isinstance(routers, (tuple, list)) and len(routers) == 2, "routers", routers, "a pair", RouterError)
    for name, own in (("prefill", prefill), ("decode", decode)):
        named = own is None or (isinstance(own, Mapping) and all(isinstance(key, str) for key in own))
        require(named, name, own, "a mapping of limits by name")
    require(policy.release == "token", "policy", policy, "one that releases tokens as they are made")
    kinds = [{**limits, **(prefill or {})}, {**limits, **(decode or {}), "prefix_cache": False}]
    for name in ("num_pages", "page_size", "detail"):
        same = kinds[0].get(name) is kinds[1].get(name) or kinds[0].get(name) == kinds[1].get(name)
        require(same, f"{name} of prefill and decode", [kind.get(name) for kind in kinds], "the same")
    run = _Run(workload, (num_prefill, num_decode), policy, backend, link, routers, kinds)
    with rarely_collected():
        return run.to_the_end()


def _part(request: Request, at_s: float, most: int, expected: int, **prompt: Any) -> Request:
    """Make the part of a request that one kind of replica computes: up to so many tokens, after a prompt."""
    return Request(
        request.request_id,
        sampling=request.sampling.replace(max_tokens=most),
        arrival_time=at_s,
        eos_token_ids=request.eos_token_ids,
        priority=request.priority,
        client_id=request.client_id,
        ttft_target_s=request.ttft_target_s,
        tpot_target_s=request.tpot_target_s,
        expected_output_tokens=min(expected, most),
        cache_salt=request.cache_salt,
        **prompt,
    )


class _Run:
    """The way of each request through both kinds of replicas."""

    def __init__(
        self,
        workload: Workload,
        numbers: tuple[int, int],
        policy: Policy,
        backend: Simulated,
        link: Link,
        routers: tuple[Router, Router],
        kinds: list[dict[str, Any]],
    ) -> None:
        shape = model_shape(backend.model)
        self.source, self.link = workload.source(shape.vocab_size), link
        self.kv_bytes = shape.kv_bytes_per_token(max(DTYPE_BYTES[backend.dtype], 2))
        shared: dict[str, Any] = {"isolated": False, "policy": policy, "backend": backend}
        self.prefill = Machines(numbers[0], self._prompt_finished, **shared, **kinds[0])
        self.decode = Machines(numbers[1], self._answer_finished, **shared, **kinds[1])
        self.balancers = [Balancer(router, n) for router, n in zip(routers, numbers, strict=True)]
        self.loop = EventLoop([self.prefill, self.decode])
        self.live: dict[int | str, Request] = {}
        self.sent_by = [0.0] * numbers[0]
        """When the link of each prefill replica is free."""
        self.transfers: list[tuple[object, ...]] = []

    def to_the_end(self) -> DisaggregatedResult:
        feed(self.loop, self.source, self._arrive)
        self.loop.run()
        results = tuple(result_of(engine) for engine in (*self.prefill.engines, *self.decode.engines))
        columns = ["request_id", "source", "target", "num_bytes", "ready_s", "begin_s", "end_s"]
        transfers = pd.DataFrame(self.transfers, columns=columns)
        return DisaggregatedResult(results, len(self.prefill.engines), transfers)

    def _arrive(self, request: Request, now: float, listed: bool = False) -> None:
        self.live[request.request_id] = request
        first = _part(request, now, 1, 1, prompt_token_ids=request.prompt_token_ids)
        self.loop.add(self.prefill, self.balancers[0].send(first, now), first, listed)

    def _prompt_finished(self, number: int, first: Request, now: float) -> None:
        self.balancers[0].loads.ends(number, first, now)
        request = self.live[first.request_id]
        is_done = first.error is not None or num_steps_alike(request) == 1
        request.output_token_ids += first.output_token_ids
        if is_done:
            self._leave(request, first.finish_reason, now)
            return
        prompt, most = request.num_prompt_tokens, request.sampling.max_tokens
        target = self.balancers[1].send(request, now)
        num_bytes, begin = self.kv_bytes * prompt, max(now, self.sent_by[number])
        self.sent_by[number] = begin + num_bytes / self.link.bytes_per_s
        end = self.sent_by[number] + self.link.latency_s
        decoder = len(self.prefill.engines) + target
        self.transfers.append((request.request_id, number, decoder, num_bytes, now, begin, end))
        # What is known when it comes: the prompt, whose keys and values it brings, and the token that it computes next.
        expected = max(1, request.expected_output_tokens - 1)
        rest = _part(request, end, most - 1, expected, num_prompt_tokens=prompt + 1)
        rest.status, rest.num_computed_tokens = RequestStatus.SWAPPED, prompt
        self.loop.at(end, lambda _: self.loop.add(self.decode, target, rest))

    def _answer_finished(self, number: int, rest: Request, now: float) -> None:
        request = self.live[rest.request_id]
        self.balancers[1].loads.ends(number, request, now)
        request.output_token_ids += rest.output_token_ids
        self._leave(request, rest.finish_reason, now)

    def _leave(self, request: Request, reason: str | None, now: float) -> None:
        del self.live[request.request_id]
        request.finish_reason = reason
        for following in self.source.on_finish(request, now):
            self.loop.at(following.arrival_time, partial(self._arrive, following))
