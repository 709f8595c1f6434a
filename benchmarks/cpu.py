"""Output tokens/s of this project's precisions and policies, and of any peer, in turns within one run.

    python benchmarks/cpu.py --peer openvino_genai=PYTHON --peer vllm=PYTHON --rounds 5
    python benchmarks/cpu.py --equal --peer llama_cpp=PYTHON

PYTHON is the interpreter of a virtual environment that has the peer: openvino_genai, vllm, llama_cpp or transformers
(see serve_*.py for what to install). Every engine is a process of its own that sleeps while another one runs; each
warms up once and then runs once a round. Machines drift: compare within one run only. `quiet` is what the rate would be
if each step took as long as in its quickest round: other programs of a host delay other steps in each. `vs peer` is the
median, or `quiet`, against that of the fastest peer.

No peer here computes in W8A8. It meets all they have: OpenVINO GenAI's "f32", which computes in 8 bits where weights
are packed, llama.cpp's "file", which does so too, and bf16.

--equal: 64 prompts of 64 tokens in one step, then 32 steps of 64 decodes each. `decode` counts the tokens of those 32
by their time, host included, `model` by that of the model's steps alone. llama-batched-bench gave 705 tokens/s there
(bf16, a single run on two cores of an AMD Zen 4; llama.cpp b11434).
"""

import argparse
import json
import math
import platform
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import huggingface_copy
from engine_process import EngineProcess
from workload import SEATS

from contbatch.catalog import fetch

HERE = Path(__file__).resolve().parent
PEERS = {
    "openvino_genai": {"f32": ["f32"], "bf16": ["bf16"], "w8a8": ["f32", "bf16"]},
    "vllm": {"f32": ["f32"], "bf16": ["bf16"], "w8a8": ["bf16"]},
    "llama_cpp": {"f32": ["f32", "file"], "bf16": ["bf16"], "w8a8": ["bf16", "file"]},
    "transformers": {"f32": ["f32"], "bf16": ["bf16"], "w8a8": ["bf16"]},
}
"""What each peer is asked for beside each of our precisions."""
FROM_DIRECTORY = ("vllm", "transformers")
"""These read a Hugging Face directory, which is made of the same file."""
KV_DTYPES = {"f32": ["f32"], "bf16": ["bf16", "int8"], "w8a8": ["int8", "bf16"]}
POLICIES = {"static": 8, "continuous": 8, "chunked": SEATS}
"""Seats of each: static and continuous batching have as many, peers as many as the last. See serve_contbatch.py."""
BATCHED_BENCH = 705


def peer_of(text: str) -> tuple[str, str]:
    """Read NAME=PYTHON."""
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"must be NAME=PYTHON with one of {', '.join(PEERS)}, got {text!r}")
    return name, python


def engines_of(options: argparse.Namespace, precision: str, model: Path, directory: Path) -> list[EngineProcess]:
    """Start every engine that a precision is compared with, then ours."""
    found, workload = [], "equal" if options.equal else "common"
    for name, python in options.peer:
        for kind in PEERS[name][precision]:
            source = directory if name in FROM_DIRECTORY else model
            command = [python, str(HERE / f"serve_{name}.py"), str(source), kind, workload]
            found.append(EngineProcess(f"{name} {kind}", command, is_peer=True, timeout_s=options.timeout))
    ours = [(kv_dtype, policy) for kv_dtype in KV_DTYPES[precision] for policy in options.policies]
    for kv_dtype, policy in ours:
        seats = str(SEATS if options.equal else POLICIES[policy])
        arguments = [str(model), precision, workload, kv_dtype, policy, seats]
        name = f"contbatch {precision}, {kv_dtype} pages, {policy}, {seats} seats"
        command = [sys.executable, str(HERE / "serve_contbatch.py"), *arguments]
        found.append(EngineProcess(name, command, is_peer=False, timeout_s=options.timeout))
    return found


def table_of(engines: list[EngineProcess], *, equal: bool) -> str:
    """Return a row for each engine: its figures, or why it has none."""
    columns = ["min", "median", "max", "vs peer", "quiet", "vs peer", "steps", "host"]
    columns += ["decode", "model"] if equal else []
    rows = [f"{'output tokens/s':52}" + "".join(f"{column:>9}" for column in columns)]
    peers = [engine for engine in engines if engine.is_peer and engine.runs and not engine.failure]
    fastest = max((statistics.median(peer.rates()) for peer in peers), default=math.nan)
    quietest = max((rate for peer in peers if (rate := peer.quiet_rate()) > 0), default=math.nan)
    for engine in engines:
        if not engine.runs or engine.failure:
            rows.append(f"{engine.name:52} failed: {engine.failure or 'no run'}")
            continue
        low, middle, high = engine.rates()[0], statistics.median(engine.rates()), engine.rates()[-1]
        row = f"{engine.name:52}{low:9.0f}{middle:9.0f}{high:9.0f}{middle / fastest:8.2f}x"
        row += f"{engine.quiet_rate():9.0f}{engine.quiet_rate() / quietest:8.2f}x"
        row += f"{engine.median('steps'):9.0f}{engine.median('host'):9.1%}"
        if equal:
            decoded = engine.median("tokens") - SEATS
            row += "".join(f"{decoded / engine.median(name):9.0f}" for name in ("decode_s", "model_s"))
        rows.append(row.replace("nanx", "   -").replace("nan%", "   -").replace("nan", "  -"))
    if equal:
        rows.append(f"llama-batched-bench, bf16, elsewhere (see --help): decode {BATCHED_BENCH}")
    return "\n".join(rows)


def record_of(precision: str, engines: list[EngineProcess], *, equal: bool) -> str:
    """Return every run's figures as a line of JSON."""
    told = {e.name: {"runs": e.runs, "failure": e.failure, "is_peer": e.is_peer} for e in engines}
    return json.dumps({"workload": "equal" if equal else "common", "precision": precision, "engines": told})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue, or a GGUF file")
    parser.add_argument("--precisions", nargs="+", choices=KV_DTYPES, default=list(KV_DTYPES))
    parser.add_argument("--peer", action="append", default=[], type=peer_of, metavar="NAME=PYTHON")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["chunked"])
    parser.add_argument("--equal", action="store_true", help="64 equal requests in place of the common workload")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600, help="seconds to wait for a run before giving up on it")
    parser.add_argument("--json", type=Path, help="append every run's figures, a line a precision")
    options = parser.parse_args()
    model = fetch(options.model)
    with TemporaryDirectory() as folder:
        if any(name in FROM_DIRECTORY for name, _ in options.peer):
            huggingface_copy.write(model, Path(folder))
        for precision in options.precisions:
            engines = engines_of(options, precision, model, Path(folder))
            for nth in range(1 + options.rounds):
                for engine in engines:
                    engine.run(keep=nth > 0)
            for engine in engines:
                engine.close()
            print(f"\n{precision}, {platform.machine()}, {options.rounds} rounds in turns")
            print(table_of(engines, equal=options.equal), flush=True)
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(record_of(precision, engines, equal=options.equal) + "\n")


if __name__ == "__main__":
    main()
