"""Speed of the simulator: requests simulated per second, and where the time goes.

    python benchmarks/simulator.py [--azure AzureLLMInferenceTrace_conv.csv] [--million 1000000] [--profile]

Vidur's workload (Llama-2-7B on one A100, Poisson arrivals, 512 + 128 tokens, 128 seats), beside what Vidur 7d47513 did
on 2 cores of an AMD Zen 4: compare with figures of another machine with care. With a path, also all requests of a real
trace, given to Llama-3.1-8B. With a number, so many of Vidur's requests at 8/s without detail, and the memory
they took.
"""

import argparse
import cProfile
import pstats
import resource
import statistics
from time import perf_counter, process_time

import contbatch as cb

VIDUR = {8: 1_028, 24: 2_899}
"""Requests simulated per second by arrival rate, scheduler "vllm", metrics off."""
ROUNDS = 9


def simulate(workload: cb.Workload, backend: cb.Simulated, fast_forward: bool = True, detail: bool = True) -> cb.Result:
    policy = cb.ContinuousBatching()
    return cb.simulate(
        workload,
        policy,
        backend,
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        fast_forward=fast_forward,
        detail=detail,
    )


def report(
    name: str, workload: cb.Workload, backend: cb.Simulated, rounds: int, peer: int | None = None, **options: bool
) -> None:
    rates = []
    for _ in range(rounds):
        began, began_busy = perf_counter(), process_time()
        result = simulate(workload, backend, **options)
        seconds, busy = perf_counter() - began, process_time() - began_busy
        rates.append(len(result.requests) / busy)
    weight = result.steps.num_steps
    steps, tokens = int(weight.sum()), int((result.steps.tokens * weight).sum())
    figures = " / ".join(f"{rate:,.0f}" for rate in (min(rates), statistics.median(rates), max(rates)))
    beside = f" (Vidur: {peer:,})" if peer else ""
    print(f"{name}: {figures} requests/s{beside}; {steps / busy:,.0f} steps/s, {tokens / busy:,.0f} tokens/s")
    mean, virtual = (result.steps.seqs * weight).sum() / steps, result.duration_s
    print(f"    {len(result.requests):,} requests, mean batch {mean:.1f}, {virtual:,.0f} s on the virtual clock")
    print(f"    {seconds:.2f} s in the last round, {busy:.2f} s of them on the processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--azure", help="path of an Azure LLM inference trace")
    parser.add_argument("--million", type=int, metavar="REQUESTS", help="so many requests without detail")
    parser.add_argument("--profile", action="store_true", help="print the functions that take most time")
    options = parser.parse_args()
    llama2 = cb.Simulated(gpu="A100-80GB", model="llama-2-7b")
    print(f"min / median / max of {ROUNDS} rounds, per second of processor time")
    for rate, peer in VIDUR.items():
        workload = cb.Poisson(rate=rate, num_requests=1000, prompt=512, output=128)
        report(f"{rate}/s", workload, llama2, ROUNDS, peer)
        report(f"{rate}/s, every step planned", workload, llama2, 1, fast_forward=False)
    if options.azure:
        began = perf_counter()
        trace = cb.traces.load_azure(options.azure)
        print(f"{len(trace):,} rows loaded in {perf_counter() - began:.2f} s")
        report(trace.name, trace, cb.Simulated(gpu="A100-80GB", model="llama-3.1-8b"), 1)
    if options.million:
        many = cb.Poisson(rate=8, num_requests=options.million, prompt=512, output=128)
        report("without detail", many, llama2, 1, detail=False)
        print(f"    {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB at most")
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(simulate, workload, llama2)
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
