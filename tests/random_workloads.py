"""Hypothesis strategies: workloads in tight pools, and policies, ready and odd."""

import random
from dataclasses import dataclass

from fake_runner import VOCABULARY
from hypothesis import strategies as st

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
from contbatch.policies.preemptive import VICTIMS
from contbatch.request import Request
from contbatch.sampling_params import SamplingParams


class Lifo(Policy):
    """The newest first, running or waiting."""

    def plan(self, waiting, running, budget):
        for r in [*reversed(running), *reversed(list(waiting))]:
            yield r, r.num_uncomputed_tokens


class RandomOrder(Policy):
    """Anybody, in any order, for any number of tokens."""

    def __init__(self, seed=0):
        self.random = random.Random(seed)

    def plan(self, waiting, running, budget):
        everybody = [*running, *waiting]
        self.random.shuffle(everybody)
        for r in everybody:
            yield r, self.random.randint(1, r.num_uncomputed_tokens)


@dataclass
class SmallChunks(Policy):
    """At most `limit` tokens for each; of the running, only the first two get on."""

    limit: int

    def plan(self, waiting, running, budget):
        for r in [*running[:2], *waiting]:
            yield r, min(r.num_uncomputed_tokens, self.limit)


class AnyVictim(ChunkedPrefill):
    """Preempts whom it draws."""

    def choose_victim(self, candidates):
        return random.Random(len(candidates) + candidates[0].num_tokens).choice(candidates)


FIRST_COME_FIRST_SERVED = [
    ContinuousBatching(),
    ChunkedPrefill(),
    Orca(),
    OneAtATime(),
    StaticBatching(1),
    StaticBatching(3),
    StaticBatching(3, release="token"),
    StaticBatching(3, pad=True),
    GuaranteedNoEvict(),
    MaxUtilization(),
    *(ChunkedPrefill(victim=victim) for victim in VICTIMS),
    *(MaxUtilization(victim=victim) for victim in VICTIMS),
]
RANKED = [
    ShortestJobFirst(),
    ShortestJobFirst(by="output"),
    ShortestJobFirst(by="prediction", error=1.0),
    Priority(),
    Priority(preempt=True),
    Priority(preempt=True, victim="fewest_tokens"),
    FairShare(),
    FairShare(output_weight=0.0),
    DeadlineFirst(),
    DeadlineFirst(victim="latest_arrival"),
]
READY = FIRST_COME_FIRST_SERVED + RANKED
ODD = [Lifo(), RandomOrder(0), RandomOrder(1), SmallChunks(1), SmallChunks(3), AnyVictim()]


def make(i, prompt, sampling, at, salt=None):
    """Request number i, from one of two clients, of one of three priorities, with a target or none."""
    late, expected = (None, 4.0, 20.0)[i % 3], 1 + i % sampling.max_tokens
    clients = {"client_id": "AB"[i % 2], "priority": i % 3, "ttft_target_s": late, "tpot_target_s": late}
    return Request(i, prompt, sampling, arrival_time=at, expected_output_tokens=expected, cache_salt=salt, **clients)


@dataclass
class Workload:
    limits: dict
    specs: list

    def requests(self):
        """Fresh requests, numbered from 0."""
        return [make(i, *spec) for i, spec in enumerate(self.specs)]

    def fits(self, request):
        """Whether the pool could hold all K/V of a request; the last output token's is never computed."""
        tokens = request.num_prompt_tokens + request.sampling.max_tokens - 1
        return tokens <= self.limits["num_pages"] * self.limits["page_size"]

    @property
    def num_tokens(self):
        return sum(len(prompt) + sampling.max_tokens for prompt, sampling, *_ in self.specs)


TOKENS = st.integers(0, VOCABULARY - 1)
SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9),
    stop_token_ids=st.one_of(st.just(()), st.lists(TOKENS, max_size=2).map(tuple)),
)
SEVERAL = st.builds(
    lambda sampling, n, best_of: sampling.replace(n=n, best_of=None if best_of is None else n + best_of),
    SAMPLINGS,
    st.integers(1, 3),
    st.sampled_from([None, None, 0, 1]),
)
# Half of them begin like others, so that pages are shared.
STEMS = st.sampled_from([(0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4), (0, 1, 2, 3, 3, 3, 3, 3, 3, 3)])
TAILS = st.lists(TOKENS, max_size=1).map(tuple)
SHARING = st.builds(lambda stem, cut, tail: stem[:cut] + tail, STEMS, st.integers(4, 12), TAILS)
PROMPTS = st.one_of(st.lists(TOKENS, min_size=1, max_size=12).map(tuple), SHARING)
SALTS = st.sampled_from([None, None, None, None, "", "a"])
ARRIVALS = st.one_of(st.just(0.0), st.integers(0, 12).map(lambda n: n * 1.5))
LIMITS = st.fixed_dictionaries(
    {
        "num_pages": st.one_of(st.integers(1, 10), st.integers(8, 20)),
        "page_size": st.one_of(st.integers(1, 2), st.integers(1, 6)),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.one_of(st.just(1), st.integers(1, 24)),
        "prefix_cache": st.booleans(),
        "num_host_pages": st.sampled_from([0, 0, 2, 5, 20]),
    }
)
SPECS = st.tuples(PROMPTS, SAMPLINGS, ARRIVALS, SALTS)
WORKLOADS = st.builds(Workload, LIMITS, st.lists(SPECS, min_size=1, max_size=7))
SAMPLED = st.builds(Workload, LIMITS, st.lists(st.tuples(PROMPTS, SEVERAL, ARRIVALS, SALTS), min_size=1, max_size=5))
"""Workloads in which a prompt may have several samples."""
POLICIES = st.sampled_from(READY + ODD)
