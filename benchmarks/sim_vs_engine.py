"""How far simulated runs are from real ones on this machine: fitted to one workload, error on two others.

    python benchmarks/sim_vs_engine.py [--requests 48] [--rounds 5]

The table of notebooks/05_sim_vs_engine.ipynb at another size, with a third policy. All runs of a round take turns, so
that a machine that becomes slower does so for all, and each round is predicted from its own fit: an error is the median
over rounds. Let nothing else run.
"""

import argparse
from typing import Any

import pandas as pd

import contbatch as cb
from contbatch.arrivals import AllAtOnce
from contbatch.lengths import Uniform

SEATS, BUDGET, NUM_PAGES = 8, 64, 160
POLICIES = {
    "static": cb.StaticBatching(batch_size=SEATS),
    "continuous": cb.ContinuousBatching(),
    "chunked": cb.ChunkedPrefill(),
}
Key = tuple[str, str]
Round = dict[Key, cb.Result]


def workloads(n: int) -> dict[str, cb.Workload]:
    """Make the workload to fit to, then those to predict, of about n requests each."""
    short, long, document = Uniform(8, 32), Uniform(120, 240), cb.SharedPrefix(192, 1)
    few, many = Uniform(4, 24), Uniform(64, 96)
    kinds = [(n // 4, short, None, few), (n // 8, long, None, few), (n // 8, short, document, few)] * 2
    kinds.append((2, short, None, many))  # at the end, so that there are steps of one and two rows with little to read
    parts = [
        cb.OpenLoop(arrivals=AllAtOnce(), num_requests=m, prompt=prompt, prefix=prefix, output=output, seed=i)
        for i, (m, prompt, prefix, output) in enumerate(kinds)
    ]
    answers: dict[str, Any] = {"num_requests": n, "output": Uniform(6, 18)}
    prefix = cb.SharedPrefix(128, 2)
    return {
        "mixed": cb.Mixture(tuple(parts)),
        "poisson": cb.Poisson(rate=4, prompt=Uniform(8, 64), **answers),
        "shared": cb.OpenLoop(arrivals=AllAtOnce(), prompt=Uniform(8, 48), prefix=prefix, **answers),
    }


def experiments(n: int, backend: "cb.LLM | cb.Simulated") -> dict[Key, cb.Experiment]:
    """Make every workload under every policy."""
    limits: dict[str, Any] = {"num_pages": NUM_PAGES, "max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET}
    return {
        (name, kind): cb.Experiment(
            workload=load, policy=policy, backend=backend, prefix_cache=name != "poisson", **limits
        )
        for name, load in workloads(n).items()
        for kind, policy in POLICIES.items()
    }


def measure(n: int, rounds: int, model: str) -> list[Round]:
    """Run all of them so many times, after each size of a step once."""
    results = []
    with cb.LLM(model, num_pages=NUM_PAGES * 3 * len(POLICIES), max_num_batched_tokens=BUDGET) as llm:
        for size in range(1, BUDGET + 1):
            llm.generate([[100] * size], cb.SamplingParams(max_tokens=1), progress=False)
        every = experiments(n, llm)
        for nth in range(rounds):
            results.append(dict(zip(every, cb.run_in_turns(every.values()), strict=True)))
            took = sum(run.duration_s for run in results[-1].values())
            print(f"round {nth + 1}: {took:.0f} s of all clocks together", flush=True)
    return results


def tabulate(rounds: list[Round], n: int, model: str) -> pd.DataFrame:
    """Fit to *mixed* and predict everything, round by round; return errors and, in brackets, how far rounds differ."""
    errors: dict[Key, list[pd.Series]] = {key: [] for key in rounds[0]}
    for real in rounds:
        fitted = cb.Measured.fit(pd.concat([run.steps for key, run in real.items() if key[0] == "mixed"]))
        print(fitted)
        device = cb.Simulated(model=model, cost=fitted, kv_tokens=NUM_PAGES * 16)
        for key, experiment in experiments(n, device).items():
            errors[key].append(cb.prediction_errors(cb.run(experiment), [real[key]]).error)
    rows = {}
    for key, found in errors.items():
        error = 100 * pd.DataFrame(found).median()
        spread = 100 * cb.prediction_errors(rounds[0][key], [real[key] for real in rounds]).spread
        rows[key] = (error.map("{:+.1f}".format) + spread.map(" ({:.0f})".format)).where(error.notna(), "")
    return pd.DataFrame(rows).T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds = measure(options.requests, options.rounds, options.model)
    print("\nfitted to mixed:")
    table = tabulate(rounds, options.requests, options.model)
    print("\nerror of the simulation, median over rounds (spread of the real runs), %")
    print(table.to_string())


if __name__ == "__main__":
    main()
