"""An engine of cpu.py in a process of its own, which sleeps while others run."""

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
from tempfile import TemporaryFile
from threading import Timer
from typing import Any


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _can_be(figures: dict[str, Any]) -> bool:
    """Whether these are figures as `workload.serve` tells them: only `step_s` is a list."""
    steps, others = figures.get("step_s", []), [value for name, value in figures.items() if name != "step_s"]
    return isinstance(steps, list) and all(map(_is_amount, [*steps, *others])) and figures["seconds"] > 0


class EngineProcess:
    """One line in, one line of JSON with one run's figures out; see workload.serve.

    `failure` is None, or why there are no figures: the interpreter is missing, or the process ended, said something
    else or took longer than `timeout_s`. From then on it is left alone.
    """

    def __init__(self, name: str, command: list[str], *, is_peer: bool, timeout_s: float = 600) -> None:
        self.name, self.is_peer, self.timeout_s = name, is_peer, timeout_s
        self.runs: list[dict[str, Any]] = []
        self.failure: str | None = None
        self._errors = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (as long as the process)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # so that its children, who hold the pipe too, can be ended with it
            )
        except OSError as error:
            self.failure = f"{command[0]}: {error.strerror}"

    def run(self, *, keep: bool = True) -> None:
        """Run once, unless something went wrong before."""
        if self.failure is not None:
            return
        timer = Timer(self.timeout_s, self._give_up)
        timer.start()
        try:
            figures = self._answer()
        finally:
            timer.cancel()
        if figures is None:
            try:
                status = self._process.wait(1)
            except subprocess.TimeoutExpired:  # it closed its output, or said what is of no use
                self._kill()
                status = self._process.wait()
            self._errors.seek(0)
            last = [line.strip() for line in self._errors if line.strip()][-1:] or ["no message"]
            self.failure = self.failure or f"exit status {status}: {last[0]}"
        elif keep:
            self.runs.append(figures)

    def _give_up(self) -> None:
        self.failure = f"no answer in {self.timeout_s:g} s"
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        for line in self._process.stdout:  # libraries print there too
            try:
                figures = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(figures, dict) and figures.keys() >= {"seconds", "tokens"}:
                if _can_be(figures):
                    return figures
                self.failure = f"figures that can't be: {line.strip()}"
                return None
        return None

    def close(self) -> None:
        """End the process."""
        if hasattr(self, "_process"):
            self._kill()
            self._process.communicate()
        self._errors.close()

    def rates(self) -> list[float]:
        """Return the output tokens/s of each run, slowest first."""
        return sorted(run["tokens"] / run["seconds"] for run in self.runs)

    def quiet_rate(self) -> float:
        """Return the output tokens/s if each step took as long as in its quickest run; NaN unless the runs tell.

        A host that others use delays other steps in each run. Steps must be as many in all of them.
        """
        each = [run.get("step_s", []) for run in self.runs]
        if not each or not each[0] or {len(steps) for steps in each} != {len(each[0])}:
            return math.nan
        seconds = sum(map(min, zip(*each, strict=True)))
        return self.median("tokens") / seconds if seconds > 0 else math.nan

    def median(self, figure: str) -> float:
        """Return the median over runs of a figure, NaN if it has none."""
        return float(statistics.median([run.get(figure, math.nan) for run in self.runs]))
