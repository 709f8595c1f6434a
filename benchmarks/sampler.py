"""Time of one sampling step on 64 rows × 49,152 logits, beside np.argmax and a sampler that sorts everything.

    python benchmarks/sampler.py

The kinds take turns, so that a change in the machine's pace meets all of them.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from contbatch.logits import adjust, logprobs
from contbatch.request import Request
from contbatch.sampler import sample, uniforms
from contbatch.sampling_params import SamplingParams

ROWS, VOCAB, REPEATS = 64, 49152, 15
KINDS = {
    "greedy": [SamplingParams()],
    "temperature 0.8": [SamplingParams(temperature=0.8)],
    "temperature 0.8, top_k 50": [SamplingParams(temperature=0.8, top_k=50)],
    "temperature 0.8, min_p 0.05": [SamplingParams(temperature=0.8, min_p=0.05)],
    "temperature 0.8, top_p 0.95": [SamplingParams(temperature=0.8, top_p=0.95)],
    "temperature 0.8, top_p 0.95, top_k 50": [SamplingParams(temperature=0.8, top_p=0.95, top_k=50)],
}
KINDS["mixed, a sixth each"] = [params for kind in KINDS.values() for params in kind]
KINDS["nearly flat: temperature 3, top_p 0.95"] = [SamplingParams(temperature=3.0, top_p=0.95)]


def naive(
    logits: npt.NDArray[np.float32], params: SamplingParams, seeds: list[int], positions: list[int]
) -> npt.NDArray[np.int64]:
    """Sort every row, then softmax, top-k, top-p and the inverse CDF over the whole vocabulary."""
    order = np.argsort(-logits, axis=1, kind="stable")
    ranked = np.take_along_axis(logits, order, axis=1) / np.float32(params.temperature)
    ranked[:, params.top_k :] = -np.inf
    weights = np.exp(ranked - ranked[:, :1])
    reached = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
    weights[:, 1:][reached[:, :-1] >= params.top_p] = 0
    reached = np.cumsum(weights, axis=1)
    draws = uniforms(seeds, positions)
    ranks = [row.searchsorted(u * row[-1], side="right") for row, u in zip(reached, draws, strict=True)]
    return order[np.arange(len(logits)), ranks]


def main() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((ROWS, VOCAB), dtype=np.float32) * 2
    # A few likely tokens above a broad tail, as language models have it.
    logits[:, :200] += np.linspace(14, 0, 200, dtype=np.float32)
    logits = rng.permuted(logits, axis=1)
    seeds, positions = list(range(ROWS)), [7] * ROWS
    last = KINDS["temperature 0.8, top_p 0.95, top_k 50"][0]
    runs: dict[str, Callable[[], object]] = {"np.argmax alone": lambda: np.argmax(logits, axis=1)}
    for name, kind in KINDS.items():
        params = [kind[i % len(kind)] for i in range(ROWS)]
        runs[name] = partial(sample, logits, params, seeds, positions)
    asks = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5, logit_bias=dict.fromkeys(range(20), 1.0))
    requests = [Request(i, list(range(i, i + 500)), asks) for i in range(ROWS)]
    greedy = [asks] * ROWS
    runs["greedy, penalties and bias"] = lambda: sample(logits, greedy, seeds, positions, adjust(logits, requests))
    runs["20 log-probabilities"] = lambda: [logprobs(row, 7, 20) for row in logits]
    runs["naive full sort, top_p 0.95, top_k 50"] = lambda: naive(logits, last, seeds, positions)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS):
        for name, run in runs.items():
            if name.startswith("naive") and repeat >= 3:
                continue
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    print(f"{ROWS} rows × {VOCAB} float32 logits, ms a step: min / median / max")
    for name, taken in seconds.items():
        low, middle, high = (1e3 * f(taken) for f in (np.min, np.median, np.max))
        print(f"{name:40} {low:8.2f} {middle:8.2f} {high:8.2f}")


if __name__ == "__main__":
    main()
