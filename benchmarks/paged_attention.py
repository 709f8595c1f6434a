"""Time one layer of the CPU paged-attention kernel on SmolLM2-135M shapes, beside what the machine can do at best.

    python benchmarks/paged_attention.py

Decoding reads every K/V row once, so it is judged by GB/s against a plain read of memory; prefill is judged by GFLOP/s
against numpy's float32 matrix product. Both ceilings are measured in the same run, with the same number of threads.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from contbatch.plugins.paged_attention.cpu import paged_attention, plan_step

NUM_HEADS, KV_NUM_HEADS, HEAD_SIZE, PAGE_SIZE = 9, 3, 64, 16
CASES = {  # name: (past, new) of each sequence
    "decode 1 × 1024": [(1023, 1)],
    "decode 64 × 128": [(127, 1)] * 64,
    "decode 64 × 1024": [(1023, 1)] * 64,
    "prefill 1 × 512": [(0, 512)],
    "mixed: decode 32 × 300, prefill 256 and a chunk of 200": [(299, 1)] * 32 + [(0, 256), (256, 200)],
}


def best(call: Callable[[], object], seconds: float = 0.6) -> float:
    """Return the shortest of the runs that fit in `seconds`; the first, which may compile, does not count."""
    call()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def layer(lengths: list[tuple[int, int]], dtype: type[np.generic], threads: int | None) -> Callable[[], None]:
    """Return one layer's call on randomly placed pages of that dtype (uint16: bfloat16)."""
    rng = np.random.default_rng(0)
    past, new = (np.array(column, np.int32) for column in zip(*lengths, strict=True))
    used = -(-(past + new) // PAGE_SIZE)
    table = np.full((len(lengths), used.max()), -1, np.int32)
    table[np.arange(used.max()) < used[:, None]] = rng.permutation(used.sum())
    caches = [rng.random((used.sum(), PAGE_SIZE, KV_NUM_HEADS, HEAD_SIZE), np.float32) for _ in range(2)]
    if dtype is np.uint16:
        caches = [(cache.view(np.uint32) >> 16).astype(np.uint16) for cache in caches]
    qkv = rng.standard_normal((new.sum(), (NUM_HEADS + 2 * KV_NUM_HEADS) * HEAD_SIZE), np.float32)
    angle = np.outer(np.arange((past + new).max()), 10_000.0 ** -np.linspace(0, 1, HEAD_SIZE // 2, endpoint=False))
    plan = plan_step(
        np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
        past,
        table,
        np.cos(angle).astype(np.float32),
        np.sin(angle).astype(np.float32),
        num_rows=len(qkv),
        pages_shape=caches[0].shape,
        num_heads=NUM_HEADS,
        num_threads=threads,
    )
    output = np.empty((len(qkv), NUM_HEADS * HEAD_SIZE), np.float32)
    return lambda: paged_attention(plan, qkv, caches[0], caches[1], output)


def ceilings(pool: ThreadPoolExecutor, threads: int) -> tuple[float, float]:
    """Return GB/s of reading 200 MB and GFLOP/s of a float32 matrix product, in numpy."""
    parts = np.array_split(np.ones(50_000_000, np.float32), threads)
    read = best(lambda: list(pool.map(np.max, parts)))
    a = np.ones((1024, 1024), np.float32)
    return 0.2 / read, 2 * 1024**3 / best(lambda: a @ a) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of the kernel (default 2)")
    threads = parser.parse_args().threads
    with ThreadPoolExecutor(threads) as pool:
        bandwidth, gflops = ceilings(pool, threads)
    print(f"{threads} threads; numpy reads {bandwidth:.1f} GB/s, multiplies at {gflops:.0f} GFLOP/s (own threads)\n")
    print("| one layer | pages | ms | GB/s of K/V | GFLOP/s |\n|---|---|---|---|---|")
    for name, lengths in CASES.items():
        keys = sum(past + new for past, new in lengths)
        pairs = sum(past * new + new * (new + 1) // 2 for past, new in lengths)
        for dtype, size in ((np.float32, 4), (np.uint16, 2)):
            elapsed = best(layer(lengths, dtype, threads))
            rate = 2 * keys * KV_NUM_HEADS * HEAD_SIZE * size / elapsed / 1e9
            flops = 4 * pairs * NUM_HEADS * HEAD_SIZE / elapsed / 1e9
            pages = "float32" if size == 4 else "bfloat16"
            print(f"| {name} | {pages} | {elapsed * 1e3:.3f} | {rate:.1f} | {flops:.1f} |", flush=True)


if __name__ == "__main__":
    main()
