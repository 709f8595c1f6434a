"""How a server treats its clients: what each got, and how evenly."""

from collections.abc import Iterable
from math import inf

import numpy as np
import pandas as pd

from contbatch.checks import is_limit, python_number, require, require_positive, require_type, shown
from contbatch.errors import InvalidRequestError
from contbatch.metrics import Result, require_promises


def jain(shares: Iterable[float]) -> float:
    """Return Jain's index of fairness, (Σ x)² / (n · Σ x²): 1 if all n are equal, 1/n if one has everything.

    If nobody has anything it is 1. R. Jain, D.-M. Chiu, W. Hawe, "A Quantitative Measure of Fairness and
    Discrimination for Resource Allocation in Shared Computer Systems", DEC-TR-301, 1984.

    Raises
    ------
    InvalidRequestError
        No shares, or one that is negative or not finite.
    """
    try:
        x = np.array(list(shares), float)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError(f"shares must be a list of numbers, got {shown(shares)}") from None
    require(x.size > 0, "the number of shares", 0, "at least 1")
    for share in x[~(np.isfinite(x) & (x >= 0))][:1].tolist():
        require(False, "a share", share, "a finite number ≥ 0")
    if not x.any():
        return 1.0
    x = x / x.max()  # no square is too large or too small
    return float(x.sum() ** 2 / (x.size * (x**2).sum()))


def by_client(
    result: Result, *, until_s: float = inf, prompt_weight: float = 1.0, output_weight: float = 2.0, **limits: float
) -> pd.DataFrame:
    """Return a row for each `client_id`, in order of first leaving; requests of nobody are one client's.

    `requests`, `finished`: numbers. `service`: tokens received by `until_s`, weighted as in VTC (Sheng et al., OSDI
    2024, 5.1: 1 and 2); those of a prompt when its first output token comes. `tokens_per_s`: output tokens of the
    finished over the sum of their E2E: the speed that this client sees. `attainment`: see `Result.attainment`. The
    rest are means over the finished.

    Once everybody is served, `service` is what was asked for, and says nothing of the server. Take it at a moment
    until which every client had requests waiting, or compare `tokens_per_s`.

    Parameters
    ----------
    result : Result
    until_s : float
        On the engine's clock; needs a run with `detail` unless it is infinite.
    prompt_weight, output_weight : float
        Of tokens in `service`, > 0.
    **limits : float
        `ttft_s`, `tpot_s`, `e2e_s` of `Result.meets`; the targets of the requests if left out.

    Raises
    ------
    DetailError
        `until_s` is given, and the run kept no times of tokens.
    """
    require_positive(InvalidRequestError, prompt_weight=prompt_weight, output_weight=output_weight)
    require_type("result", result, Result)
    require_promises(limits)
    until_s = python_number(until_s)
    require(is_limit(until_s), "until_s", until_s, "seconds ≥ 0")
    rows = result.requests
    prompts, made = _received(result, until_s)
    done = rows.finish_reason.isin(["stop", "length"])
    table = pd.DataFrame(
        {
            "client_id": rows.client_id,
            "requests": 1,
            "finished": done,
            "service": float(prompt_weight) * prompts + float(output_weight) * made,
            "output_tokens": rows.output_tokens.where(done, 0),
            "seconds": rows.e2e_s.where(done, 0.0),
            "met": result.meets(**limits),
        }
    )
    latencies = rows[["queue_s", "ttft_s", "tpot_s", "e2e_s", "normalized_latency_s"]].where(done)
    sums = table.groupby("client_id", sort=False, dropna=False).sum()
    means = latencies.groupby(rows.client_id, sort=False, dropna=False).mean().add_suffix("_mean")
    speed = (sums.output_tokens / sums.seconds).rename("tokens_per_s")
    attained = (sums.met / sums.requests).rename("attainment")
    return pd.concat([sums[["requests", "finished", "service"]], speed, attained, means], axis=1)


def _received(result: Result, until_s: float) -> tuple[pd.Series, pd.Series]:
    """Return, for each row of `requests`, the prompt tokens and the output tokens served by a moment."""
    rows = result.requests
    if until_s == inf:
        begun, made = rows.output_tokens > 0, rows.output_tokens
    else:
        result.require_detail("the service until a moment")
        begun = rows.first_token_s <= until_s
        made = pd.Series([int(np.searchsorted(result.token_s[name], until_s, "right")) for name in rows.request_id])
    return rows.prompt_tokens.where(begun & (rows["sample"] == 0), 0), made
