"""What a run was like: a row per step, per request, per stretch of a seat; and their summary.

Symbols and definitions: docs/metrics.md. A request has arrival a and n output tokens that reach the client at
t₁ … tₙ. TTFT = t₁ - a; ITL: the n - 1 gaps; TPOT = (tₙ - t₁) / (n - 1), undefined (NaN, never 0) for n = 1 and where an
answer is released in one piece; E2E = tₙ - a; normalised latency = E2E / n (Orca, vLLM).
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from contbatch.checks import is_limit, python_number, require
from contbatch.decision_log import DecisionLog
from contbatch.errors import DetailError

if TYPE_CHECKING:
    import pandas as pd

    from contbatch.experiment import Experiment
    from contbatch.provenance import Provenance

NAN = float("nan")
PROMISES = ("ttft_s", "tpot_s", "e2e_s")
"""Limits of `Result.meets`."""


def _spread(values: "pd.Series", name: str) -> dict[str, float]:
    """Mean and percentiles (linear interpolation) of the defined values."""
    known = values.to_numpy(dtype=float)
    known = known[~np.isnan(known)]
    if not known.size:
        known = np.array([NAN])
    percentiles = {f"{name}_p{p}": float(np.percentile(known, p)) for p in (50, 90, 99)}
    return {f"{name}_mean": float(known.mean()), **percentiles}


def require_promises(limits: Iterable[str]) -> None:
    """Raise `InvalidRequestError` for the first name that is no limit of `Result.meets`."""
    for name in limits:
        require(name in PROMISES, "a limit of latency", name, f"one of {', '.join(PROMISES)}")


@dataclass(frozen=True)
class Result:
    """The tables of a run. Times are seconds on the engine's clock."""

    requests: "pd.DataFrame"
    """A row per request that left, in order of leaving."""
    steps: "pd.DataFrame"
    """A row per step: seats taken, and what they did, while it ran; without `detail` the means of `num_steps` steps."""
    segments: "pd.DataFrame"
    """A row per stretch in which a seat did one kind of work: prefill, decode, or held (finished, not released).

    `preempted` tells whether it ended in a preemption.
    """
    token_s: dict[int | str, list[float]]
    """When each output token reached the client, by request id; empty without `detail`."""
    token_ids: dict[int | str, list[int]]
    """The output tokens themselves, by request id; empty without `detail`."""
    num_pages: int
    page_size: int
    end_s: float = NAN
    """When the last step ended."""
    detail: bool = True
    """Whether everything was kept, or only what does not grow with the number of tokens (`simulate(detail=False)`)."""
    decisions: DecisionLog | None = None
    """What was decided at every step, if the engine kept a log."""
    max_num_seqs: float = NAN
    """Seats of the server, if whoever made the result told."""
    experiment: "Experiment | None" = None
    """What was run, if it was an experiment."""

    def __repr__(self) -> str:
        finished = f"{len(self.finished)} of {len(self.requests)} requests finished"
        return f"<Result: {finished}, {self.steps.num_steps.sum():.0f} steps, {self.duration_s:.3g} s>"

    provenance: "Provenance | None" = None
    """Where it comes from: hash of what was run, seed, versions, hardware; of `run`, `simulate` and `LLM.run`."""

    @property
    def finished(self) -> "pd.DataFrame":
        """The rows of the requests that came to their end: finish reason "stop" or "length"."""
        return self.requests[self.requests.finish_reason.isin(["stop", "length"])]

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the end of the last step."""
        return NAN if self.requests.empty else self.end_s - float(self.requests.arrival_s.min())

    def require_detail(self, what: str) -> None:
        """Raise `DetailError` if the run did not keep what `what` needs."""
        if not self.detail:
            raise DetailError(f"{what} needs a run with detail=True, this one had detail=False")

    def itl_s(self) -> "pd.Series":
        """Return the gaps between tokens of all finished requests, pooled; an answer in one piece has none.

        Raises
        ------
        DetailError
            The run kept no times of tokens.
        """
        import pandas as pd

        self.require_detail("itl_s()")
        streamed = self.finished.dropna(subset="tpot_s").request_id
        return pd.Series([gap for name in streamed for gap in np.diff(self.token_s[name])], dtype=float)

    def waste(self) -> "pd.DataFrame":
        """Return the share of all K/V slots that is in each state, by step: figure 2 of vLLM's paper (SOSP 2023).

        `stored`: tokens. `reserved`: will be filled before its holder leaves. `internal`: held, but never filled.
        `external`: free, while the next of the waiting finds enough slots but not side by side. `cached`: held by
        nobody, content kept. `free`: the rest. A row sums to 1; the paper's "external fragmentation & others" is the
        sum of the last three. What is held at the end of the rows by requests still running counts as reserved.

        Raises
        ------
        DetailError
            The run did not keep who held how much when.
        """
        import pandas as pd

        self.require_detail("waste()")
        steps, size = self.steps, self.page_size
        live, cached = steps.live_pages * size, steps.cached_pages * size
        slots = {
            "stored": steps.kv_tokens,
            "reserved": live - steps.kv_tokens - steps.internal_slots,
            "internal": steps.internal_slots,
            "external": steps.external_slots,
            "cached": cached,
            "free": self.num_pages * size - live - cached - steps.external_slots,
        }
        shares = pd.DataFrame(slots, dtype=float).set_axis(steps.step) / (self.num_pages * size)
        shares.attrs |= steps.attrs
        return shares

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tables and where they come from into a folder, for `load_result` and `contbatch verify`.

        An earlier saved result of that name is replaced; a decision log has its own `save`.

        Raises
        ------
        ResultFileError
            The result came from no experiment, or something else stands at `path`.
        """
        from contbatch.result_file import save_result

        save_result(self, path)

    def meets(
        self, *, ttft_s: float | None = None, tpot_s: float | None = None, e2e_s: float | None = None
    ) -> "pd.Series":
        """Return, for each row of `requests`, whether it came to its end within every limit (seconds).

        A TTFT or TPOT that is not given is the request's own target, if it has one; an undefined TPOT breaks no limit.
        """
        for name, limit in (("ttft_s", ttft_s), ("tpot_s", tpot_s), ("e2e_s", e2e_s)):
            require(limit is None or is_limit(python_number(limit)), name, limit, "None or seconds ≥ 0")
        rows = self.requests
        first = rows.ttft_target_s if ttft_s is None else ttft_s
        each = rows.tpot_target_s if tpot_s is None else tpot_s
        late = (rows.ttft_s > first) | (rows.tpot_s > each) | (rows.e2e_s > (np.inf if e2e_s is None else e2e_s))
        return rows.finish_reason.isin(["stop", "length"]) & ~late

    def attainment(self, **limits: float) -> float:
        """Return the share of all requests, failed ones included, that meet every limit: see `meets`."""
        require_promises(limits)
        return float(self.meets(**limits).mean())

    def goodput(self, **limits: float) -> float:
        """Return requests per second that meet every limit: see `meets`."""
        require_promises(limits)
        return self._per_s(int(self.meets(**limits).sum()))

    def to_perfetto(self, path: str | os.PathLike[str]) -> Path:
        """Write the run as a trace that ui.perfetto.dev and chrome://tracing open; see `contbatch.trace_events`.

        Raises
        ------
        DetailError
            The run did not keep who sat where when.
        """
        from contbatch.trace_events import write_trace

        return write_trace(self, Path(path))

    def _per_s(self, count: int) -> float:
        return count / self.duration_s if self.duration_s else NAN

    def summary(self) -> "pd.Series":
        """Return the run in figures; latencies are those of the finished requests.

        `mean_seqs` is the mean batch: requests computed in a step, padding included. `wasted_seats` is the share of
        taken seat-steps held by finished requests, `seat_use` the share of all seats that is taken, `page_use` the
        share of the pool that is held and `kv_use` the share of held page slots with a token in them, all over steps.
        `hit_rate` is the share of the prompt tokens of those admitted that the prefix cache held. `pages_moved` are
        pages swapped out, swapped in and copied for forks. `seats_bound`, `tokens_bound` and `pages_bound` count the
        steps in which that limit kept out something that the policy asked for. Without `detail` the figures of `itl_s`
        are NaN.
        """
        import pandas as pd

        done, weight = self.finished, self.steps.num_steps
        total = {name: float((self.steps[name] * weight).sum()) for name in self.steps}
        tokens, num_steps = int(done.output_tokens.sum()), int(weight.sum())
        prompts = self.requests[self.requests.admitted_s.notna() & (self.requests["sample"] == 0)]
        held_slots = total["live_pages"] * self.page_size
        figures = {
            "requests": len(done),
            "failed": len(self.requests) - len(done),
            "duration_s": self.duration_s,
            "output_tokens": tokens,
            "output_tokens_per_s": self._per_s(tokens),
            "requests_per_s": self._per_s(len(done)),
            "steps": num_steps,
            "mean_seqs": total["seqs"] / num_steps if num_steps else NAN,
            "wasted_seats": total["held_seats"] / max(1, total["seats"]),
            "seat_use": total["seats"] / num_steps / self.max_num_seqs if num_steps else NAN,
            "page_use": total["live_pages"] / num_steps / self.num_pages if num_steps else NAN,
            "kv_use": total["kv_tokens"] / held_slots if held_slots else NAN,
            "preemptions": int(self.requests.preemptions.sum()),
            "hit_rate": prompts.cached_tokens.sum() / prompts.prompt_tokens.sum() if len(prompts) else NAN,
            "evictions": round(total["evictions"]),
            "pages_moved": round(total["pages_out"] + total["pages_in"] + total["pages_copied"]),
            **{name: round(total[name]) for name in ("seats_bound", "tokens_bound", "pages_bound")},
        }
        for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s", "normalized_latency_s"):
            figures |= _spread(done[name], name)
        gaps = self.itl_s() if self.detail else pd.Series(dtype=float)
        return pd.Series(figures | _spread(gaps, "itl_s"), dtype=float)
