"""Checks of values from outside: a bad one raises a typed error that names it and its limit."""

import math
from dataclasses import fields, replace
from typing import Any, TypeVar

from contbatch.errors import ContbatchError, InvalidRequestError

T = TypeVar("T")


def require(
    condition: bool, name: str, value: object, limit: str, error: type[ContbatchError] = InvalidRequestError
) -> None:
    """Raise `error` saying that `name` must be `limit`, unless `condition` holds."""
    if not condition:
        raise error(f"{name} must be {limit}, got {value!r}")


def is_int(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether a value is an integer, and no bool, in [low, high]."""
    return (type(value) is int or (isinstance(value, int) and not isinstance(value, bool))) and low <= value <= high


def is_real(value: object) -> bool:
    """Whether a value is a finite number, and no bool."""
    if type(value) is float:
        return math.isfinite(value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_positive(error: type[ContbatchError], **values: float) -> None:
    """Raise `error` for the first value that is no finite number > 0."""
    for name, value in values.items():
        require(is_real(value) and value > 0, name, value, "a finite number > 0", error)


def require_seconds(error: type[ContbatchError], **values: float) -> None:
    """Raise `error` for the first value that is no finite number of seconds ≥ 0."""
    for name, value in values.items():
        require(is_real(value) and value >= 0, name, value, "finite seconds ≥ 0", error)


def require_counts(**values: object) -> None:
    """Raise `InvalidRequestError` for the first value that is no integer ≥ 1."""
    for name, value in values.items():
        require(is_int(value, 1), name, value, "an integer ≥ 1")


def replaced(value: T, changes: dict[str, Any], error: type[ContbatchError] = InvalidRequestError) -> T:
    """Return a copy of a dataclass instance with some fields changed; `error` for a field that it does not take."""
    names = [f.name for f in fields(value) if f.init]  # type: ignore[arg-type]
    unknown = sorted(set(changes) - set(names))
    require(not unknown, "the field to replace", ", ".join(unknown), f"one of {', '.join(names)}", error)
    return replace(value, **changes)  # type: ignore[type-var]
