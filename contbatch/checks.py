"""Checks of values from outside: a bad one raises a typed error that names it and its limit."""

import sys
from collections.abc import Collection, Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from contbatch.errors import ContbatchError, InvalidRequestError

T = TypeVar("T")
_MOST, _LARGEST = sys.float_info.max, 2**1023
"""Larger integers are refused: they are no floats, and beyond 4300 digits Python does not even print them."""


def require(
    condition: bool, name: str, value: object, limit: str, error: type[ContbatchError] = InvalidRequestError
) -> None:
    """Raise `error` saying that `name` must be `limit`, unless `condition` holds."""
    if not condition:
        raise error(f"{name} must be {limit}, got {shown(value)}")


def require_type(name: str, value: object, kind: type, error: type[ContbatchError] = InvalidRequestError) -> None:
    """Raise `error` for a value that is no instance of `kind`."""
    if not isinstance(value, kind):
        require(False, name, value, f"of type {kind.__name__}", error)


def shown(value: object) -> str:
    """Return `repr(value)`, or what stands for it if that raises: a message must not hide another."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} that can't be printed"


def is_int(value: object, low: float = -_LARGEST, high: float = _LARGEST) -> bool:
    """Whether a value is an integer, and no bool, in [low, high]."""
    return (type(value) is int or (isinstance(value, int) and not isinstance(value, bool))) and low <= value <= high


def is_real(value: object) -> bool:
    """Whether a value is a finite number, and no bool."""
    if type(value) is float:
        return -_MOST <= value <= _MOST
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_MOST <= value <= _MOST


def is_limit(value: object) -> bool:
    """Whether a value is a number ≥ 0, or infinity for none."""
    return (is_real(value) or isinstance(value, float)) and value >= 0  # type: ignore[operator]


def is_one_of(value: object, names: Collection[str]) -> bool:
    """Whether a value is a string, and one of these."""
    return isinstance(value, str) and value in names


def is_key(value: object) -> bool:
    """Whether a value, with all that it holds, is hashable and can be printed."""
    try:
        hash(value)
        str(value)
    except Exception:
        return False
    return True


def tuple_of(
    value: object, name: str, limit: str, error: type[ContbatchError] = InvalidRequestError
) -> tuple[Any, ...]:
    """Return the items of a value as a tuple; `error`, which says what it must be, if it has none."""
    require(isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0, name, value, limit, error)
    return tuple(value)  # type: ignore[arg-type]


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
