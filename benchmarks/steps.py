"""Where a step's time goes, and how a step grows with seats and context.

    python benchmarks/steps.py [--precision w8a8] [--kv-dtype int8]
    python benchmarks/steps.py --scaling

Every sequence decodes one token. The profile is OpenVINO's own (PERF_COUNT), which slows a step a little: kinds of
nodes, and "attention nodes" for all of our operator, of which "attention" is the kernel with its checks. "rest" is what
no node accounts for. All are means without the first steps, which load the kernel and pack weights.

--scaling takes the least of so many repeats, or of those within ten seconds. All pages are written before, since memory
that never was is all one page of zeros, which stays in the cache.
"""

import argparse
import os
from collections import Counter
from statistics import median
from time import perf_counter

import numpy as np

from contbatch.build import build
from contbatch.catalog import fetch
from contbatch.runners.cpu import CPUModel
from contbatch.runners.cpu_graph import core
from contbatch.runners.cpu_pages import CPUPages

PAGE_SIZE = 16
FIRST = 10
"""Steps that a profile leaves out."""


class Timed:
    """Pages whose attention is timed."""

    def __init__(self, pages: CPUPages) -> None:
        self.seconds, self._attend = 0.0, pages.attend
        pages.attend = self.attend  # type: ignore[method-assign]

    def attend(self, layer: int, qkv: np.ndarray, output: np.ndarray) -> None:
        began = perf_counter()
        self._attend(layer, qkv, output)
        self.seconds += perf_counter() - began


def decodes(num_seqs: int, context: int) -> dict[str, np.ndarray]:
    """Make a step of sequences that decode, with so many tokens before."""
    pages = -(-(context + 1) // PAGE_SIZE)
    return {
        "input_ids": np.arange(1000, 1000 + num_seqs),
        "cumulative_sequence_length": np.arange(num_seqs + 1, dtype=np.int32),
        "past_seqlens": np.full(num_seqs, context, np.int32),
        "block_table": np.arange(num_seqs * pages, dtype=np.int32).reshape(num_seqs, pages),
        "logits_indices": np.arange(num_seqs),
    }


def pages_for(num_seqs: int, context: int) -> int:
    return num_seqs * -(-(context + 1) // PAGE_SIZE)


def opened(options: argparse.Namespace, num_pages: int) -> CPUModel:
    """Open the model with pages that were written to."""
    quantization = "w8a8" if options.precision == "w8a8" else None
    path = build(fetch(options.model), quantization=quantization) / "model.onnx"
    model = CPUModel(path, num_pages, PAGE_SIZE, precision=options.precision, kv_dtype=options.kv_dtype)
    assert model._pages
    for array in model._pages.arrays:
        array.fill(0)
    return model


def seconds_of(
    model: CPUModel, inputs: dict[str, np.ndarray], repeats: int, limit_s: float = float("inf")
) -> list[float]:
    """Time steps: two more than `repeats`, or fewer, but three at least, once they took `limit_s` together."""
    found: list[float] = []
    while len(found) < repeats + 2 and (len(found) < 3 or sum(found) < limit_s):
        began = perf_counter()
        model.forward(inputs)
        found.append(perf_counter() - began)
    return found


def seconds_by_kind(model: CPUModel, num_steps: int) -> Counter[str]:
    """Return what nodes took in all steps since the model was compiled: OpenVINO tells means."""
    kinds: Counter[str] = Counter()
    for node in model._request.profiling_info:
        kind = "attention nodes" if node.node_type == "Reference" else node.node_type
        kinds[kind] += node.real_time.total_seconds() * num_steps
    return kinds


def profile(options: argparse.Namespace) -> None:
    core().set_property("CPU", {"PERF_COUNT": "YES"})
    for num_seqs in options.seats or [1, 16, 64]:
        # OpenVINO's figures are averages since the model was compiled, so each size has a model of its own.
        model = opened(options, pages_for(num_seqs, options.context))
        assert model._pages
        inputs = decodes(num_seqs, options.context)
        for _ in range(FIRST):
            model.forward(inputs)
        before = seconds_by_kind(model, FIRST)
        timed = Timed(model._pages)
        steps = seconds_of(model, inputs, options.repeats)
        attention = timed.seconds / len(steps)
        kinds = seconds_by_kind(model, FIRST + len(steps))
        kinds.subtract(before)
        mean = sum(steps) / len(steps)
        print(f"\n{options.precision}, {num_seqs} x {options.context}: ms min {1e3 * min(steps):.1f}, ", end="")
        print(f"median {1e3 * median(steps):.1f}, mean {1e3 * mean:.1f}")
        parts = [(kind, seconds / len(steps)) for kind, seconds in kinds.most_common(8)]
        for kind, seconds in [*parts, ("rest", mean - kinds.total() / len(steps)), ("attention", attention)]:
            print(f"    {kind:24} {1e3 * seconds:8.2f}")
        model.close()


def pages_that_fit(options: argparse.Namespace) -> int:
    """Return how many pages take four fifths of the memory that is free."""
    model = opened(options, 1)
    assert model._pages
    page_bytes = sum(array.nbytes for array in model._pages.arrays)
    model.close()
    return int(0.8 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / page_bytes)


def scaling(options: argparse.Namespace) -> None:
    seats, contexts = options.seats or [1, 4, 16, 64, 128], [128, 512, 1024, 2048, 4096]
    room = pages_that_fit(options)
    model = opened(options, min(room, pages_for(max(seats), contexts[-1])))
    print(f"{options.precision}, ms of a step (least of {options.repeats}), output tokens/s")
    print(f"{'seats':>6}" + "".join(f"{context:>16}" for context in contexts))
    for num_seqs in seats:
        row = f"{num_seqs:6}"
        for context in contexts:
            if pages_for(num_seqs, context) > model.num_pages:
                row += f"{'-':>16}"
                continue
            seconds = min(seconds_of(model, decodes(num_seqs, context), options.repeats, limit_s=10))
            row += f"{1e3 * seconds:8.1f} {num_seqs / seconds:7.0f}"
        print(row, flush=True)
    if room < (wanted := pages_for(max(seats), contexts[-1])):
        print(f"-: not run: of {wanted} pages for all, {room} take four fifths of the memory that was free")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--precision", default="w8a8", choices=["f32", "bf16", "w8a8"])
    parser.add_argument("--kv-dtype", choices=["f32", "bf16", "int8"])
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--seats", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--scaling", action="store_true", help="steps of 1-128 seats with 128-4096 tokens of context")
    options = parser.parse_args()
    scaling(options) if options.scaling else profile(options)


if __name__ == "__main__":
    main()
