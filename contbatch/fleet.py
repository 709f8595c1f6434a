"""Replicas behind a router, simulated: an engine each, with its own clock, and one table of requests."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import pandas as pd

from contbatch.checks import is_int, python_number, require, require_type
from contbatch.engine import Engine
from contbatch.errors import RouterError, WorkloadError
from contbatch.fairness import jain
from contbatch.garbage import rarely_collected
from contbatch.machines import EventLoop, Machines, require_machines
from contbatch.metrics import Result
from contbatch.model_shape import model_shape
from contbatch.policies import Policy
from contbatch.request import Request
from contbatch.routers import LeastTokens, Loads, Router
from contbatch.simulation import Simulated, simulated
from contbatch.source import Source
from contbatch.workload import Workload


@dataclass(frozen=True)
class FleetResult:
    """What each replica did. Times are seconds on one clock for all."""

    replicas: tuple[Result, ...]
    """The tables of each, in order of their numbers."""

    @cached_property
    def together(self) -> Result:
        """The rows of all replicas as one result: requests in order of leaving, both tables with a column `replica`.

        For figures that are sums or means over requests or over steps: `summary`, `goodput`, `by_client` and so on.
        `Result.segments` is empty and `over_time` has no meaning, since steps of several replicas run at a time.
        """
        first = self.replicas[0]
        requests = self._stacked([result.requests for result in self.replicas])
        left = requests.finished_s.fillna(requests.arrival_s)
        return replace(
            first,
            requests=requests.loc[left.sort_values(kind="stable").index].reset_index(drop=True),
            steps=self._stacked([result.steps for result in self.replicas]),
            segments=first.segments.iloc[:0],
            token_s=dict(chain.from_iterable(result.token_s.items() for result in self.replicas)),
            end_s=max((result.end_s for result in self.replicas if len(result.steps)), default=first.end_s),
        )

    @staticmethod
    def _stacked(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
        numbered = [table.assign(replica=number) for number, table in enumerate(tables)]
        return pd.concat([table for table in numbered if len(table)] or numbered[:1], ignore_index=True)

    def balance(self) -> pd.DataFrame:
        """Return a row for each replica.

        `requests`; `computed_tokens`: of prompts and answers, padding left out; `output_tokens`; `busy`: share of the
        time, from the first arrival anywhere to the end of the last step anywhere, that it spent in steps;
        `preemptions`; `hit_rate`: see `Result.summary`.
        """
        rows = self._stacked([result.requests for result in self.replicas])
        steps = self._stacked([result.steps for result in self.replicas])
        numbers = pd.RangeIndex(len(self.replicas), name="replica")

        def total(values: pd.Series, of: pd.DataFrame) -> pd.Series:
            return values.groupby(of.replica).sum().reindex(numbers, fill_value=0)

        done = rows.finish_reason.isin(["stop", "length"])
        asked = rows.admitted_s.notna() & (rows["sample"] == 0)
        computed = (steps.prefill_tokens + steps.decode_tokens) * steps.num_steps
        busy = (steps.elapsed_s + steps.host_s) * steps.num_steps
        table = {
            "requests": total(rows.replica * 0 + 1, rows),
            "computed_tokens": total(computed, steps).round().astype(int),
            "busy": total(busy, steps) / self.together.duration_s,
            "output_tokens": total(rows.output_tokens.where(done, 0), rows),
            "preemptions": total(rows.preemptions, rows),
            "hit_rate": total(rows.cached_tokens.where(asked, 0), rows)
            / total(rows.prompt_tokens.where(asked, 0), rows),
        }
        return pd.DataFrame(table)

    def summary(self) -> pd.Series:
        """Return the figures of all together, and of balance.

        `busy_mean`, `busy_max`: see `balance`. `imbalance`: computed tokens of the busiest over the mean, 1 if even.
        `jain`: Jain's index of the computed tokens.
        """
        balance = self.balance()
        tokens = balance.computed_tokens
        figures = {
            "busy_mean": balance.busy.mean(),
            "busy_max": balance.busy.max(),
            "imbalance": tokens.max() / tokens.mean() if tokens.any() else float("nan"),
            "jain": jain(tokens),
        }
        return pd.Series({**self.together.summary(), **figures}, dtype=float)


class Balancer:
    """A router at work on one group of machines.

    Parameters
    ----------
    router : Router
        Deep-copied, so that one object can serve many runs.
    num_replicas : int
    """

    def __init__(self, router: Router, num_replicas: int) -> None:
        require(isinstance(router, Router), "router", router, "an instance of Router", RouterError)
        self.router, self.loads = deepcopy(router), Loads(num_replicas)

    def send(self, request: Request, now: float) -> int:
        """Return where a request goes that is to be sent now (seconds); `RouterError` if that is nowhere."""
        self.loads.hear(now)
        chosen = self.router.choose(request, self.loads)
        if not is_int(chosen, 0, len(self.loads) - 1):
            given, chosen, limit = chosen, python_number(chosen), f"an integer in [0, {len(self.loads)})"
            fits = is_int(chosen, 0, len(self.loads) - 1)
            require(fits, f"the choice of {self.router!r}", given, limit, RouterError)
        self.loads.sent(chosen, request)
        return chosen


def simulate_fleet(
    workload: Workload,
    num_replicas: int,
    router: Router | None = None,
    policy: Policy | None = None,
    backend: Simulated | None = None,
    **limits: Any,
) -> FleetResult:
    """Run a workload on equal replicas behind a router; each request is routed when it arrives, for good.

    Parameters
    ----------
    workload : Workload
    num_replicas : int
    router : Router
        `LeastTokens()` if None.
    policy, backend
        Of each replica: see `simulate`.
    **limits
        `num_pages`, `max_num_seqs` and so on, of each replica, and `detail`: see `simulate`.

    Raises
    ------
    RouterError
        The router chose a replica that there is not.
    """
    [num_replicas] = require_machines(num_replicas=num_replicas)
    require_type("workload", workload, Workload, WorkloadError)
    backend = simulated(backend)
    source = workload.source(model_shape(backend.model).vocab_size)
    balancer = Balancer(LeastTokens() if router is None else router, num_replicas)

    def finish(number: int, request: Request, now: float) -> None:
        balancer.loads.ends(number, request, now)
        for following in source.on_finish(request, now):
            loop.at(following.arrival_time, partial(arrive, following))

    def arrive(request: Request, now: float, listed: bool = False) -> None:
        loop.add(machines, balancer.send(request, now), request, listed)

    isolated = not source.waits_for_answers
    machines = Machines(num_replicas, finish, isolated=isolated, policy=policy, backend=backend, **limits)
    loop = EventLoop([machines])
    with rarely_collected():
        feed(loop, source, arrive)
        loop.run()
        return FleetResult(tuple(result_of(engine) for engine in machines.engines))


def feed(loop: EventLoop, source: Source, arrive: Any) -> None:
    """Have the first request of each session arrive; if they are in order, each is made when the one before has."""
    requests = source.requests()

    def next_arrival(request: Request, rest: Iterator[Request], now: float) -> None:
        arrive(request, now, listed=True)
        if (following := next(rest, None)) is not None:
            loop.at(following.arrival_time, partial(next_arrival, following, rest), listed=True)

    for request in requests:
        rest = requests if source.in_order else iter(())
        loop.at(request.arrival_time, partial(next_arrival, request, rest), listed=True)
        if source.in_order:
            break


def result_of(engine: Engine) -> Result:
    """Return the tables of an engine that has run."""
    return replace(engine.recorder.result(), max_num_seqs=engine.scheduler.max_num_seqs)
