"""The ranges of an explorer: what they offer, and which field each is of."""

from collections.abc import Mapping
from typing import Any

import contbatch
from contbatch.checks import is_real, python_number, require
from contbatch.errors import ExperimentError
from contbatch.experiment import Experiment
from contbatch.field_paths import find_path, get_field, with_field
from contbatch.policies import Policy


def by_path(experiment: Experiment, ranges: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ranges by path, wholes before their parts, after a look at every value that they offer."""
    points = [experiment]
    for name in [name for name in ranges if name in ("policy", "workload", "backend")]:
        points += [with_field(experiment, name, value) for value in values_of(name, ranges[name])]
    found: dict[str, Any] = {}
    for name, given in ranges.items():
        path = find_path(name, points)
        require(path not in found, "a range", name, f"given once for {path}", ExperimentError)
        found[path] = given
        for value in values_of(name, given):
            for point in points:
                if _has(point, path):
                    with_field(point, path, value)
    return dict(sorted(found.items(), key=lambda item: item[0].count(".")))


def _has(point: Experiment, path: str) -> bool:
    try:
        get_field(point, path)
    except AttributeError:
        return False
    return True


def usual_ranges(experiment: Experiment) -> dict[str, Any]:
    """Return ranges around the fields that are asked about most."""
    ready = [cls for cls in vars(contbatch.policies).values() if isinstance(cls, type) and issubclass(cls, Policy)]
    found: dict[str, Any] = {"policy": [experiment.policy]}
    found["policy"] += [
        cls() for cls in ready if cls.__name__ in contbatch.__all__ and cls not in (Policy, type(experiment.policy))
    ]
    if (rate := getattr(experiment.workload, "rate", None)) is not None:
        found["rate"] = (rate / 8, rate * 8)
    found["max_num_seqs"] = (1, max(256, experiment.max_num_seqs))
    found["max_num_batched_tokens"] = (16, max(8192, experiment.max_num_batched_tokens))
    return found


def values_of(name: str, given: Any) -> list[Any]:
    """Return the values that a range must be able to take: its ends, or all of a list.

    Raises
    ------
    ExperimentError
        It is no range.
    """
    if (ends := ends_of(given)) is None:
        listed = isinstance(given, (list, tuple, range)) and len(given) > 0
        require(
            listed, f"the range of {name}", given, "(low, high), (low, high, step), a range or a list", ExperimentError
        )
        return list(map(python_number, given))
    low, high, *step = ends
    rising = low < high and all(0 < size <= high - low for size in step)
    limit = "(low, high) or (low, high, step) with low < high and a step that fits in between, or a list"
    require(rising, f"the range of {name}", given, limit, ExperimentError)
    return [low, high]


def ends_of(given: Any) -> tuple[Any, ...] | None:
    """Return lowest and highest value, and the step if there is one; None of a list."""
    if isinstance(given, range) and len(given) > 1:
        return min(given), max(given), abs(given.step)
    ends = tuple(map(python_number, given)) if isinstance(given, tuple) else ()
    return ends if len(ends) in (2, 3) and all(map(is_real, ends)) else None
