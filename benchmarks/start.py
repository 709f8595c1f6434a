"""From `import contbatch` to the first token of the cached model, and the most memory the process took.

    python benchmarks/start.py [--precisions f32 w8a8 bf16] [--num-pages 1000]
    python benchmarks/start.py --first [--precisions f32]

Each start is a process of its own.
Memory is the peak of resident memory with all pages in use, libraries included; files mapped into memory count. "busy"
is the peak once 64 prompts of 100 tokens have been answered together, with 8 tokens each.
The first start of each precision is not counted: it may compile the attention kernel. --first measures just that: in a
new folder that holds nothing but the model's file, with an empty cache of Numba's, so that the model is exported (for
w8a8 quantised as well) and the kernel compiled. Downloading the model and installing packages are not in it.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
from tempfile import TemporaryDirectory
from time import perf_counter


def started(model: str, precision: str, num_pages: int) -> None:
    """Print seconds to the first token, MB at the peak with all pages filled, and the same after some work."""
    began = perf_counter()
    import contbatch as cb

    with cb.LLM(model, precision=precision, num_pages=num_pages) as llm:
        llm.generate(["The capital of France is"], cb.SamplingParams(max_tokens=1), progress=False)
        seconds = perf_counter() - began
        for array in llm.runner.model._pages.arrays:  # type: ignore[attr-defined]
            array.fill(0)
        peak = peak_mb()
        prompts = [list(range(i, i + 100)) for i in range(1000, 1064)]
        llm.generate(prompts, cb.SamplingParams(max_tokens=8, ignore_eos=True), progress=False)
    print(f"{seconds:.2f} {peak:.0f} {peak_mb():.0f}")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def start(options: argparse.Namespace, precision: str, **environment: str) -> list[float]:
    """Return what `started` prints in a process of its own."""
    command = [sys.executable, __file__, "--one", "--precisions", precision, "--model", options.model]
    command += ["--num-pages", str(options.num_pages)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
    return [float(number) for number in done.stdout.split()[-3:]]


def first_start(options: argparse.Namespace, precision: str) -> list[float]:
    """Start with nothing but the model's file."""
    from contbatch.catalog import CATALOG, fetch  # not above: to import the package is part of a start

    with TemporaryDirectory() as folder:
        if options.model in CATALOG:
            shutil.copy(fetch(options.model), folder)
        return start(options, precision, CONTBATCH_CACHE=folder, NUMBA_CACHE_DIR=f"{folder}/numba")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--precisions", nargs="+", default=["f32", "w8a8", "bf16"])
    parser.add_argument("--num-pages", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="this process, the first precision only")
    parser.add_argument("--first", action="store_true", help="the first start ever, which exports and compiles")
    options = parser.parse_args()
    if options.one:
        started(options.model, options.precisions[0], options.num_pages)
        return
    print(f"{'':6} {'s to first token, min':>22} {'median':>7} {'peak MB':>8} {'busy':>5}")
    for precision in options.precisions:
        if options.first:
            found = [first_start(options, precision) for _ in range(options.rounds)]
        else:
            found = [start(options, precision) for _ in range(options.rounds + 1)][1:]
        seconds_s, peak, busy = (sorted(column) for column in zip(*found, strict=True))
        least, median = seconds_s[0], seconds_s[len(seconds_s) // 2]
        print(
            f"{precision:6} {least:22.2f} {median:7.2f} {peak[-1]:8.0f} {busy[-1]:5.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
