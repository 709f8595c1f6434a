"""Output tokens/s on the common workload: this project's precisions and any peer, in turns within one run.

    python benchmarks/cpu.py --peer openvino_genai=PYTHON --rounds 5

PYTHON is the interpreter of a virtual environment that has the peer. Every engine is a process of its own that sleeps
while another one runs; each warms up once and then runs once a round. Machines drift: compare within one run only.
W8A8 has no like in OpenVINO GenAI but its "f32", which computes in 8 bits where weights are packed; it meets both.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from contbatch.catalog import fetch

HERE = Path(__file__).resolve().parent
COLUMNS = "engine", "tokens/s min", "median", "max", "vs peer", "steps", "host"
KINDS = {"bf16": (["bf16"], ["bf16"]), "f32": (["f32"], ["f32"]), "w8a8": (["f32", "bf16"], ["int8", "bf16"])}
"""By precision: what peers are asked for, and the types of our pages."""


class Server:
    """An engine in a process: one line in, one run's figures out."""

    def __init__(self, name: str, command: list[str], *, is_peer: bool) -> None:
        self.name, self.is_peer = name, is_peer
        self.runs: list[dict[str, float]] = []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self) -> dict[str, float]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                figures: dict[str, float] = json.loads(line)
                return figures
        raise SystemExit(f"{self.name} ended with exit status {self.process.wait()}")

    def rates(self) -> list[float]:
        return sorted(run["tokens"] / run["seconds"] for run in self.runs)


def servers(model: str, precision: str, peers: list[str], policies: list[str]) -> list[Server]:
    found = []
    hints, kv_dtypes = KINDS[precision]
    for name, _, python in (peer.partition("=") for peer in peers):
        for hint in hints:
            command = [python, str(HERE / f"serve_{name}.py"), model, hint]
            found.append(Server(f"{name} {hint}", command, is_peer=True))
    for kv_dtype in kv_dtypes:
        for policy in policies:
            command = [sys.executable, str(HERE / "serve_contbatch.py"), model, precision, kv_dtype, policy]
            found.append(Server(f"contbatch {precision}, {kv_dtype} pages, {policy}", command, is_peer=False))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--precisions", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--peer", action="append", default=[], help="openvino_genai=PYTHON")
    parser.add_argument("--policies", nargs="+", default=["ChunkedPrefill"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every run's figures here")
    options = parser.parse_args()
    for precision in options.precisions:
        engines = servers(str(fetch(options.model)), precision, options.peer, options.policies)
        for engine in engines:
            engine.run()
        for _ in range(options.rounds):
            for engine in engines:
                engine.runs.append(engine.run())
        for engine in engines:
            engine.process.kill()
        report(precision, engines, options.json)


def report(precision: str, engines: list[Server], target: Path | None) -> None:
    print(f"\n{precision}, {platform.machine()}, {len(engines[0].runs)} rounds in turns")
    print("{:46} {:>12} {:>8} {:>8} {:>9} {:>6} {:>6}".format(*COLUMNS))
    best = max(statistics.median(e.rates()) for e in [e for e in engines if e.is_peer] or engines[:1])
    for engine in engines:
        low, middle, high = engine.rates()[0], statistics.median(engine.rates()), engine.rates()[-1]
        host = statistics.median(run.get("host", float("nan")) for run in engine.runs)
        row = f"{engine.name:46} {low:12.0f} {middle:8.0f} {high:8.0f} {middle / best:8.2f}x"
        print(f"{row} {engine.runs[-1]['steps']:6.0f} {host:6.1%}")
    if target is not None:
        rows = {engine.name: engine.runs for engine in engines}
        with target.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"precision": precision, "runs": rows}) + "\n")


if __name__ == "__main__":
    main()
