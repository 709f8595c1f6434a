"""Time one layer of the CPU paged-attention kernel on SmolLM2-135M shapes, beside what the machine can do at best.

    python benchmarks/paged_attention.py

Decoding reads every K/V row once, so it is judged by GB/s against a plain read of memory; prefill is judged by GFLOP/s
against numpy's float32 matrix product. Both ceilings are measured in the same run, with the same number of threads, the
read before every case anew, since memory is what a shared machine has less of at times.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from contbatch.plugins.paged_attention.cpu import paged_attention
from contbatch.plugins.paged_attention.int8 import quantize
from contbatch.plugins.paged_attention.step_plan import plan_step

NUM_HEADS, KV_NUM_HEADS, HEAD_SIZE, PAGE_SIZE = 9, 3, 64, 16
CASES = {  # name: (past, new) of each sequence
    "decode 64 × 90": [(89, 1)] * 64,
    "decode 64 × 1024": [(1023, 1)] * 64,
    "decode 8 × 4096": [(4095, 1)] * 8,
    "decode 1 × 8192": [(8191, 1)],
    "prefill 1 × 512": [(0, 512)],
    "mixed: decode 32 × 300, prefill 256 and a chunk of 200": [(299, 1)] * 32 + [(0, 256), (256, 200)],
}
KINDS: dict[str, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}


@njit(nogil=True, fastmath={"reassoc"})
def total(words: np.ndarray) -> np.uint64:
    """Sum up all words: one read of them."""
    result = np.uint64(0)
    for word in words:
        result += word
    return result


def best(call: Callable[[], object], seconds: float = 0.6) -> float:
    """Return the shortest of the runs that fit in `seconds`; the first, which may compile, does not count."""
    call()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy that begins at a cache line."""
    room = np.empty(array.nbytes + 63, np.uint8)
    copy: np.ndarray = room[-room.ctypes.data % 64 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


def layer(lengths: list[tuple[int, int]], dtype: type[np.generic], threads: int | None) -> Callable[[], None]:
    """Return one layer's call on randomly placed pages of that dtype (uint16: bfloat16)."""
    rng = np.random.default_rng(0)
    past, new = (np.array(column, np.int32) for column in zip(*lengths, strict=True))
    used = -(-(past + new) // PAGE_SIZE)
    table = np.full((len(lengths), used.max()), -1, np.int32)
    table[np.arange(used.max()) < used[:, None]] = rng.permutation(used.sum())
    caches = [rng.random((used.sum(), PAGE_SIZE, KV_NUM_HEADS, HEAD_SIZE), np.float32) for _ in range(2)]
    scales: list[np.ndarray] = []
    if dtype is np.uint16:
        caches = [(cache.view(np.uint32) >> 16).astype(np.uint16) for cache in caches]
    elif dtype is np.int8:
        caches, scales = map(list, zip(*map(quantize, caches), strict=True))
    caches = [aligned(cache) for cache in caches]
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
    return lambda: paged_attention(plan, qkv, caches[0], caches[1], output, *scales)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of the kernel (default 2)")
    threads = parser.parse_args().threads
    parts, a = np.array_split(np.ones(25_000_000, np.uint64), threads), np.ones((1024, 1024), np.float32)
    print(
        f"{threads} threads; numpy multiplies at {2 * 1024**3 / best(lambda: a @ a) / 1e9:.0f} GFLOP/s (own threads)\n"
    )
    print("| one layer | pages | µs | GB/s of K/V | a plain read | share | GFLOP/s |\n|---|---|---|---|---|---|---|")
    with ThreadPoolExecutor(threads) as pool:
        for name, lengths in CASES.items():
            keys = sum(past + new for past, new in lengths)
            pairs = sum(past * new + new * (new + 1) // 2 for past, new in lengths)
            for kind, dtype in KINDS.items():
                row_bytes = HEAD_SIZE * np.dtype(dtype).itemsize + 4 * (kind == "int8")
                call = layer(lengths, dtype, threads)
                read = 0.2 / best(lambda: list(pool.map(total, parts)))
                elapsed = best(call)
                rate = 2 * keys * KV_NUM_HEADS * row_bytes / elapsed / 1e9
                flops = 4 * pairs * NUM_HEADS * HEAD_SIZE / elapsed / 1e9
                figures = f"{elapsed * 1e6:.0f} | {rate:.1f} | {read:.1f} | {rate / read:.0%} | {flops:.1f}"
                print(f"| {name} | {kind} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
