"""One-shot check on a machine with a GPU: minutes, no network, one table at the end. NEVER RUN ON A GPU so far.

    python scripts/gpu_check.py prepare FOLDER --sm 90     # anywhere with Triton: a small model and its kernels as PTX
    python scripts/gpu_check.py run FOLDER                 # on the GPU: PyCUDA; TensorRT, cuda-bindings if there
    python scripts/gpu_check.py run FOLDER --dry-run       # without a GPU: the executable spec in place of the kernels

The exit status is 1 if a check failed. Checks that a machine can't do are skipped, with the reason in the table.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from gpu_launch import GPU, GUARD, PAGE_SIZE, SIZES, DryRun, attributes_of, make_step

from contbatch.calibrate import calibrate
from contbatch.errors import ContbatchError, DeviceError
from contbatch.export import export_onnx
from contbatch.gpu_kernels import MANIFEST, export_ptx
from contbatch.model import random_model
from contbatch.quantize import Quantized
from contbatch.runners.reference import ReferenceModel

CASES = {
    "decode": [(37, 1), (0, 1), (511, 1), (16, 1)],
    "prompts": [(0, 33), (0, 1), (0, 130)],
    "mixed": [(15, 2), (0, 50), (100, 1), (7, 0), (48, 17)],
    "257 sequences": [(i % 40, 1) for i in range(257)],
}
"""Tokens in pages already, and new ones, of each sequence."""
SEQUENCES, CONTEXTS = (1, 8, 64, 256), (128, 1024, 8192)
"""Of the timings."""
STEP = 2.0**-10
"""Relative rounding of float16, twice."""
Row = tuple[str, str, str]
Kernels = list[tuple[dict[str, Any], bytes]]


def check_cases(gpu: Any, kernels: Kernels) -> Iterator[Row]:
    """Compare with the executable spec: output, caches updated in place, and the pages around them."""
    for kernel, ptx in kernels:
        for name, lengths in CASES.items():
            step = make_step(lengths)
            before = [cache.copy() for cache in step.caches]
            expected, *caches = step.expected(attributes_of(kernel))
            output, *_ = gpu.launch(kernel, ptx, step)
            pairs = [(output, expected), *zip((c[GUARD:-GUARD] for c in step.caches), caches, strict=True)]
            errors = [float(np.abs(a.astype(np.float64) - b).max()) for a, b in pairs]
            close = all(np.allclose(a.astype(np.float64), b, rtol=4 * STEP, atol=12 * STEP) for a, b in pairs)
            guards = slice(GUARD), slice(-GUARD, None)
            held = all((new[g] == old[g]).all() for new, old in zip(step.caches, before, strict=True) for g in guards)
            told = f"largest error {max(errors):.1e}; guard pages {'untouched' if held else 'OVERWRITTEN'}"
            yield f"{name}, tactic {kernel['tactic']}", "PASS" if close and held else "FAIL", told


def check_graph(gpu: Any, kernels: Kernels) -> Iterator[Row]:
    """Capture a launch, replay it, and compare."""
    from cuda.bindings import driver as cu

    kernel, ptx = kernels[0]
    output, _, (queue, target) = gpu.launch(kernel, ptx, make_step(CASES["decode"]))
    stream = gpu.cuda.Stream()
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    results = [cu.cuStreamBeginCapture(stream.handle, mode)]
    queue(stream)
    results.append(captured := cu.cuStreamEndCapture(stream.handle))
    results.append(made := cu.cuGraphInstantiate(captured[1], 0))
    gpu.cuda.memset_d8(target, 0, output.nbytes)
    results.append(cu.cuGraphLaunch(made[1], stream.handle))
    stream.synchronize()
    replayed = np.empty_like(output)
    gpu.cuda.memcpy_dtoh(replayed, target)
    same = replayed.tobytes() == output.tobytes() and not any(int(result[0]) for result in results)
    yield "CUDA graph", "PASS" if same else "FAIL", "replayed output is the same, bit by bit" if same else str(results)


def check_speed(gpu: Any, kernels: Kernels) -> Iterator[Row]:
    """Time decoding: bytes of keys and values per second, as a part of what a copy reaches."""
    rate = gpu.copy_rate()
    yield "copy", "INFO", f"{rate / 1e9:,.0f} GB/s"
    for num_seqs in SEQUENCES:
        for context in CONTEXTS:
            step = make_step([(context - 1, 1)] * num_seqs, filled=False)
            num_bytes = num_seqs * context * 2 * SIZES["kv_num_heads"] * SIZES["head_size"] * 2
            seconds = {kernel["tactic"]: gpu.launch(kernel, ptx, step)[1]() for kernel, ptx in kernels}
            told = [f"tactic {n}: {s * 1e6:,.0f} us, {num_bytes / s / rate:.0%}" for n, s in seconds.items()]
            yield f"decode {num_seqs} × {context}", "INFO", "; ".join(told)


def check_engine(folder: Path) -> Iterator[Row]:
    """Compare whole engines, with the plugin, without, and in 8 bits, with ONNX's evaluator; then repeat a step."""
    from contbatch.runners.tensorrt import TensorRTModel
    from contbatch.tensorrt_build import BuildOptions, build_engine
    from contbatch.tensorrt_limits import EngineLimits

    limits = EngineLimits(8, 64, 32, PAGE_SIZE)
    for form, path in (("paged", folder), ("gather", folder), ("w8a8", folder / "w8a8")):
        began = perf_counter()
        options = BuildOptions(attention="gather" if form == "gather" else "paged", top_k=8)
        model = TensorRTModel(build_engine(path / "model.onnx", limits, options, progress=False), 32)
        yield f"engine, {form}", "INFO", f"built and loaded in {perf_counter() - began:.1f} s"
        yield from _check_logits(model, ReferenceModel(path / "model.onnx", 32, PAGE_SIZE), form)
        model.close()


def _check_logits(model: Any, reference: ReferenceModel, form: str) -> Iterator[Row]:
    """Compare a prompt, another chunk of it and a token with ONNX's evaluator."""
    ids, worst, total = np.arange(40) * 7 % 256, 0.0, 0.0
    for start, stop in ((0, 30), (30, 39), (39, 40)):
        feed: dict[str, np.ndarray] = {"input_ids": ids[start:stop], "past_seqlens": np.array([start], np.int32)}
        feed |= {"cumulative_sequence_length": np.array([0, stop - start], np.int32)}
        feed |= {"block_table": np.array([[5, 3, 9]], np.int32), "logits_indices": np.arange(stop - start)}
        logits, expected = model.forward(feed), reference.forward(feed)
        worst = max(worst, float(np.abs(logits - expected).max()))
        total += float(np.square(logits - expected).sum())
    # Logits have a standard deviation of about 4. In 8 bits another rounding of an input can be another code.
    kind, found, limit = "largest", worst, 64 * STEP * 4
    if form == "w8a8":
        kind, found, limit = "mean square", (total / len(ids) / logits.shape[1]) ** 0.5, 0.1 * 4
    told = f"{kind} difference {found:.1e}, limit {limit:.1e}"
    yield f"{form}, logits", "PASS" if found < limit else "FAIL", told
    yield from _check_repeated(model, feed, logits, form)


def _check_repeated(model: Any, feed: dict[str, np.ndarray], logits: np.ndarray, form: str) -> Iterator[Row]:
    """Repeat the last step: the same bits, of CUDA graphs too; and its largest logits are the largest."""
    same = all(model.forward(feed).tobytes() == logits.tobytes() for _ in range(3))
    yield f"{form}, repeated", "PASS" if same else "FAIL", f"{'the same' if same else 'OTHER'} logits, bit by bit"
    top = model.forward_top(feed)
    whole, count = model.whole_rows(top, [0]), top.ids.shape[1]
    largest = np.sort(top.values, axis=1) == np.sort(whole, axis=1)[:, -count:]
    off = abs(float(top.log_total[0]) - float(np.log(np.exp(whole[0].astype(np.float64)).sum())))
    right = largest.all() and (whole[0, top.ids] == top.values).all() and off < 1e-5
    yield f"{form}, top {count}", "PASS" if right else "FAIL", f"logarithm of the sum off by {off:.0e}"


def check_memory(folder: Path) -> Iterator[Row]:
    """Repeat the cases under NVIDIA's compute-sanitizer."""
    if not (tool := shutil.which("compute-sanitizer")):
        yield "compute-sanitizer", "SKIP", "not on the PATH"
        return
    command = [tool, "--error-exitcode", "3", sys.executable, __file__, "run", str(folder), "--only", "cases"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    yield "compute-sanitizer", "FAIL" if done.returncode else "PASS", last


def prepare(folder: Path, sms: list[int]) -> int:
    """Write what a GPU machine needs, so that it needs no Triton for the kernels alone, and nothing to calibrate."""
    model = random_model(0, max_position=16384, **SIZES)
    path = export_onnx(model, folder / "model.onnx", "float16")
    floats = export_onnx(model, folder / "w8a8" / "floats.onnx", max_position=64)
    found = Quantized.of(model, calibrate(floats, np.random.default_rng(0).integers(0, 256, (6, 40)).tolist()))
    export_onnx(found.model, folder / "w8a8" / "model.onnx", "float16", steps=found.steps)
    print(export_ptx(path, sms, PAGE_SIZE))
    return 0


def run(folder: Path, dry: bool, only: str | None) -> int:
    """Do all checks that can be done, then print the table; return the exit status."""
    gpu: Any = DryRun() if dry else GPU()
    with nullcontext() if dry else gpu.device.current():
        return _run(gpu, folder, dry, only)


def _run(gpu: Any, folder: Path, dry: bool, only: str | None) -> int:
    manifest = json.loads((folder / "ptx" / MANIFEST).read_text(encoding="utf-8"))
    mine = [k for k in manifest["kernels"] if dry or k["sm"] == gpu.device.sm]
    kernels = [(k, (folder / "ptx" / k["file"]).read_bytes()) for k in mine if k["sm"] == mine[0]["sm"]]
    if not kernels:
        raise DeviceError(f"{folder} has no kernels for {gpu.name}: prepare it with --sm {gpu.device.sm}")
    checks: dict[str, Callable[[], Iterator[Row]]] = {
        "cases": lambda: check_cases(gpu, kernels),
        "graph": lambda: check_graph(gpu, kernels),
        "engine": lambda: check_engine(folder),
        "memory": lambda: check_memory(folder),
        "speed": lambda: check_speed(gpu, kernels),
    }
    rows: list[Row] = []
    for name, check in checks.items():
        if only not in (None, name):
            continue
        if dry and name in ("graph", "engine", "memory", "speed"):
            rows.append((name, "SKIP", "dry run"))
            continue
        print(f"checking {name} ...", flush=True)
        try:
            rows += check()
        except (ContbatchError, ImportError) as error:
            rows.append((name, "SKIP" if isinstance(error, ImportError) else "FAIL", f"{error}"))
        except Exception as error:  # of CUDA or TensorRT: the other checks still tell something
            rows.append((name, "FAIL", repr(error)))
    print(f"\n{gpu.name}")
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for row in rows:
        print(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}")
    return int(any(row[1] == "FAIL" for row in rows))


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sm", type=int, nargs="+", default=[90], help="of prepare: compute capabilities (90)")
    parser.add_argument(
        "--dry-run", action="store_true", help="of run: no GPU, the executable spec in place of kernels"
    )
    parser.add_argument("--only", choices=["cases", "graph", "engine", "memory", "speed"])
    options = parser.parse_args()
    try:
        if options.command == "prepare":
            return prepare(options.folder, options.sm)
        return run(options.folder, options.dry_run, options.only)
    except ContbatchError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
