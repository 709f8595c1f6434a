"""What it costs that a row's bits don't depend on the batch: float32 steps with and without the row that is repeated.

    python benchmarks/batch_invariance.py [--repeats 30]

Of a step with one token that token is computed twice, of one with a single row of logits that row; others are as they
were (see docs/performance.md). Both kinds take turns: A B A B.
"""

import argparse
from statistics import median
from time import perf_counter

import numpy as np
from steps import PAGE_SIZE, decodes, opened, pages_for

Inputs = dict[str, np.ndarray]


def prompt(num_tokens: int) -> Inputs:
    """Make a step that computes a prompt, with logits of its last token."""
    pages = pages_for(1, num_tokens)
    return {
        "input_ids": np.arange(1000, 1000 + num_tokens),
        "cumulative_sequence_length": np.array([0, num_tokens], np.int32),
        "past_seqlens": np.zeros(1, np.int32),
        "block_table": np.arange(pages, dtype=np.int32).reshape(1, pages),
        "logits_indices": np.array([num_tokens - 1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    options.precision, options.kv_dtype = "f32", None
    cases = {f"{n} decode{'s' * (n > 1)}": decodes(n, 96) for n in (1, 2, 16, 64)}
    cases |= {f"a prompt of {n}": prompt(n) for n in (16, 64, 512)}
    model = opened(options, max(pages_for(64, 96), pages_for(1, 512)))
    print(f"{'f32, pages of ' + str(PAGE_SIZE):18}{'ms with':>10}{'without':>10}{'ratio':>8}")
    for name, inputs in cases.items():
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(options.repeats + 2):
            for invariant, found in seconds.items():
                began = perf_counter()
                model._forward(inputs, invariant)
                found.append(perf_counter() - began)
        with_it, without = (1e3 * median(found[2:]) for found in seconds.values())
        print(f"{name:18}{with_it:10.2f}{without:10.2f}{with_it / without:8.3f}", flush=True)


if __name__ == "__main__":
    main()
