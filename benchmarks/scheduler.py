"""Cost of the scheduler alone: microseconds of schedule + update per step, and of admitting a full queue.

    python benchmarks/scheduler.py [--policy ChunkedPrefill]

The same questions that vLLM's own scheduler (v1, release 0.32) was asked on 2 cores of an AMD Zen 4, whose medians
stand beside: N requests decoding with pages of 16 tokens, and 1,000 waiting requests of 128 prompt tokens admitted in
one step. Tokens come from nowhere: no model runs. Prompts all differ: the prefix cache works, and finds nothing.
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from time import perf_counter

import contbatch as cb

PROMPT, ROUNDS, STEPS = 128, 5, 60
VLLM = {
    False: {64: 671, 256: 2763, 1024: 12118, "admission": 22.7},
    True: {64: 722, 256: 2890, 1024: 12826, "admission": 37.4},
}
"""µs a step by number of requests, and ms of the admission, without and with the prefix cache."""


def scheduler(policy: cb.Policy, seats: int, prefix_cache: bool) -> cb.Scheduler:
    made = cb.Scheduler(
        policy,
        num_pages=64 * seats,
        max_num_seqs=seats,
        max_num_batched_tokens=seats * PROMPT,
        prefix_cache=prefix_cache,
    )
    for i in range(seats):
        made.add(cb.Request(i, [i] * PROMPT, cb.SamplingParams(max_tokens=512)))
    return made


def timed_step(running: cb.Scheduler) -> float:
    """Schedule and update once; return the seconds of both together."""
    began = perf_counter()
    step = running.schedule()
    scheduled = perf_counter()
    tokens = {grant.request.request_id: 1 for grant in step.grants if grant.samples}
    resumed = perf_counter()
    running.update(step, tokens)
    return perf_counter() - resumed + scheduled - began


def decoding(policy: cb.Policy, seats: int, prefix_cache: bool) -> Callable[[], float]:
    """Return a function that takes the median step of a round, in µs."""
    running = scheduler(policy, seats, prefix_cache)
    timed_step(running)  # admits them all
    return lambda: statistics.median(timed_step(running) for _ in range(STEPS)) * 1e6


def admission(policy: cb.Policy, prefix_cache: bool) -> float:
    """Return the ms in which 1,000 requests are admitted."""
    full = scheduler(policy, 1000, prefix_cache)
    gc.collect()  # what earlier rounds left behind is not this one's to clear away
    began = perf_counter()
    full.schedule()
    return (perf_counter() - began) * 1e3


def row(what: str, rounds: list[float], unit: str, peer: float) -> None:
    low, middle, high = min(rounds), statistics.median(rounds), max(rounds)
    figures = " / ".join(f"{value:.{0 if value > 100 else 1}f}" for value in (low, middle, high))
    print(f"{what:34} {figures:22} {unit}   vLLM {peer:8} {unit}   {peer / middle:4.1f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="ChunkedPrefill")
    policy = getattr(cb, parser.parse_args().policy)()
    print(f"{policy}, pages of 16 tokens; min / median / max of {ROUNDS} rounds of {STEPS} steps")
    for prefix_cache in (False, True):
        peer, cache = VLLM[prefix_cache], f"prefix cache {'on' if prefix_cache else 'off'}"
        for seats in (64, 256, 1024):
            take = decoding(policy, seats, prefix_cache)
            row(f"{cache}: {seats} decoding", [take() for _ in range(ROUNDS)], "µs", peer[seats])
        rounds = [admission(policy, prefix_cache) for _ in range(ROUNDS)]
        row(f"{cache}: admitting 1,000", rounds, "ms", peer["admission"])


if __name__ == "__main__":
    main()
