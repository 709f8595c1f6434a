"""Set-ups of two papers on the simulated device: the figures of docs/simulation.md. Nothing is tuned to come out.

python benchmarks/papers.py
"""

from dataclasses import replace

import contbatch as cb
from contbatch.arrivals import AllAtOnce
from contbatch.lengths import CappedExponential, Geometric


def sharegpt() -> None:
    """Print batches and memory of vLLM's Figure 2 and section 6.2, at ShareGPT's mean lengths.

    Memory as in that figure: the share of all slots that hold a token, while somebody waits, at a rate that is too much
    for all.
    """
    client = cb.Client(max_tokens=1024)
    prompt, output = Geometric(161.3, 1024), Geometric(338.0, 1024)
    print("OPT-13B, A100-40GB, ShareGPT's mean lengths: 2 requests/s; memory with a token in it at 6")
    orca = [cb.Orca(reservation="max", max_model_len=2048), cb.Orca(reservation="oracle")]
    for policy, layout, page_size in (*((p, "contiguous", 1) for p in orca), (cb.ContinuousBatching(), "paged", 16)):
        loads = [cb.Poisson(rate=r, num_requests=600, prompt=prompt, output=output, client=client) for r in (2, 6)]
        result, full = (
            cb.simulate(load, policy, layout=layout, page_size=page_size, max_num_seqs=256, max_num_batched_tokens=2560)
            for load in loads
        )
        stored = replace(full, steps=full.steps[full.steps.waiting > 0]).waste().stored.mean()
        print(f"  {policy}: mean batch {result.summary().mean_seqs:.1f}, most {result.steps.seats.max()}, ", end="")
        print(f"memory {stored:.1%}, a step {result.steps.elapsed_s.mean() * 1e3:.0f} ms")


def anyscale() -> None:
    """Print the gain over static batching for more and more varied lengths."""
    print("OPT-13B, A100-40GB, 1,000 requests at once, 512 + exponential: paged continuous over static batches of 7")
    for cap in (32, 128, 512, 1536):
        client, output = cb.Client(max_tokens=cap), CappedExponential(128, cap)
        load = cb.OpenLoop(arrivals=AllAtOnce(), num_requests=1000, prompt=512, output=output, client=client)
        static, continuous = (
            cb.simulate(load, policy, max_num_seqs=256).duration_s
            for policy in (cb.StaticBatching(7), cb.ContinuousBatching())
        )
        print(f"  up to {cap} tokens: {static / continuous:.1f}×")


if __name__ == "__main__":
    sharegpt()
    anyscale()
