"""Cost of the scheduler alone: microseconds of schedule + update per step, and of admitting a full queue.

    python benchmarks/scheduler.py [--policy ChunkedPrefill]

The same questions that vLLM's own scheduler was asked: N requests decoding with pages of 16 tokens, and 1,000 waiting
requests of 128 prompt tokens admitted in one step. Tokens come from nowhere: no model runs.
"""

import argparse
import statistics
from time import perf_counter

import contbatch as cb

PROMPT, ROUNDS, STEPS = 128, 5, 60


def scheduler(policy: cb.Policy, seats: int, waiting: int) -> cb.Scheduler:
    made = cb.Scheduler(policy, num_pages=64 * waiting, max_num_seqs=seats, max_num_batched_tokens=seats * PROMPT)
    for i in range(waiting):
        made.add(cb.Request(i, num_prompt_tokens=PROMPT, sampling=cb.SamplingParams(max_tokens=512)))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="ChunkedPrefill")
    policy = getattr(cb, parser.parse_args().policy)()
    print(f"{policy}, pages of 16 tokens; min / median / max of {ROUNDS} rounds of {STEPS} steps")
    for seats in (64, 256, 1024):
        running = scheduler(policy, seats, seats)
        timed_step(running)  # admits them all
        rounds = sorted(statistics.median(timed_step(running) for _ in range(STEPS)) * 1e6 for _ in range(ROUNDS))
        figures = " / ".join(f"{value:.0f}" for value in (rounds[0], statistics.median(rounds), rounds[-1]))
        print(f"{seats:5} decoding: {figures} µs a step, {statistics.median(rounds) / seats:.2f} µs a request")
    admissions = []
    for _ in range(ROUNDS):
        full = scheduler(policy, 1000, 1000)
        began = perf_counter()
        full.schedule()
        admissions.append((perf_counter() - began) * 1e3)
    admissions.sort()
    print("admitting 1,000:", " / ".join(f"{admissions[i]:.1f}" for i in (0, ROUNDS // 2, -1)), "ms")


if __name__ == "__main__":
    main()
