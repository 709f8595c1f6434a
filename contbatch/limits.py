"""Which limit decided how fast a run was: a comparison of policies holds only where the studied one did."""

from collections.abc import Collection, Mapping

import pandas as pd

from contbatch.checks import is_one_of, is_real, python_number, require, require_type, tuple_of
from contbatch.metrics import Result

LIMITS = ("seats", "tokens", "pages")
"""Of requests (`max_num_seqs`), of a step (`max_num_batched_tokens`), of memory (`num_pages`)."""


def limits_bound(
    results: Mapping[str, Result], studied: Collection[str] = (), *, at_least: float = 0.01
) -> pd.DataFrame:
    """Return the share of steps, in per cent, in which each limit kept out what the policy asked for; a row a run.

    The column `warning` names the limits that were binding though they are not what is studied.

    Parameters
    ----------
    results : mapping from name to Result
    studied : collection of str
        Some of `LIMITS`.
    at_least : float
        Share of the steps, in [0, 1], from which on a limit counts as binding.

    Raises
    ------
    InvalidRequestError
        A limit that there is not.
    """
    require_type("results", results, Mapping)
    studied = tuple_of(studied, "studied", f"some of {', '.join(LIMITS)}")
    for name in studied:
        require(is_one_of(name, LIMITS), "a studied limit", name, f"one of {', '.join(LIMITS)}")
    at_least = python_number(at_least)
    require(is_real(at_least) and 0 <= at_least <= 1, "at_least", at_least, "a share of the steps, in [0, 1]")
    rows = {}
    for run, result in results.items():
        require_type("what is compared", result, Result)
        shares = {name: float(result.steps[f"{name}_bound"].astype(float).mean()) for name in LIMITS}
        also = [name for name in LIMITS if name not in studied and shares[name] > 0 and shares[name] >= at_least]
        percent: dict[str, object] = {name: 100 * share for name, share in shares.items()}
        rows[run] = percent | {"warning": f"{' and '.join(also)} bound too" if also else ""}
    return pd.DataFrame.from_dict(rows, orient="index", columns=[*LIMITS, "warning"])
