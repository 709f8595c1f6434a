"""Checks of values from outside: a bad one raises a typed error that names it and its limit."""

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, replace
from functools import cache
from numbers import Integral, Rational, Real
from operator import attrgetter, index
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


_PYTHON = {bool, int, float, str, type(None)}


def python_number(value: Any) -> Any:
    """Return the Python number that NumPy's, or one like it, stands for; anything else as it is."""
    if type(value) in _PYTHON or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return index(value) if hasattr(value, "__index__") else value  # NumPy counts a timedelta64 among the integers
    return value if isinstance(value, Rational) else float(value)  # a Fraction can be too large for a float


def take_python_numbers(value: Any) -> None:
    """Replace NumPy's numbers among a dataclass instance's fields: settings hash, compare and print as Python's do."""
    names, get = _fields(value.__class__)
    given = get(value)
    if not _PYTHON.issuperset(map(type, given)):
        for name, one in zip(names, given, strict=False):
            object.__setattr__(value, name, python_number(one))


@cache
def _fields(kind: Any) -> tuple[list[str], Callable[[object], tuple[Any, ...]]]:
    names = [f.name for f in fields(kind) if f.init]
    return names, attrgetter(*names, names[0])  # of one name alone it gets no tuple


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


def require_positive(error: type[ContbatchError], **values: float) -> tuple[float, ...]:
    """Return the values as Python numbers; `error` for the first that is no finite number > 0."""
    numbers = tuple(map(python_number, values.values()))
    for name, value in zip(values, numbers, strict=True):
        require(is_real(value) and value > 0, name, value, "a finite number > 0", error)
    return numbers


def require_seconds(error: type[ContbatchError], **values: float) -> None:
    """Raise `error` for the first value that is no finite number of seconds ≥ 0."""
    for name, value in values.items():
        require(is_real(value) and value >= 0, name, value, "finite seconds ≥ 0", error)


def require_counts(**values: Any) -> tuple[int, ...]:
    """Return the values as Python integers; `InvalidRequestError` for the first that is no integer ≥ 1."""
    numbers = tuple(map(python_number, values.values()))
    for name, value in zip(values, numbers, strict=True):
        require(is_int(value, 1), name, value, "an integer ≥ 1")
    return numbers


def take_counts(settings: Any, *names: str) -> None:
    """Do as `take_python_numbers`; `InvalidRequestError` for the first field of `names` that is no integer ≥ 1."""
    take_python_numbers(settings)
    require_counts(**{name: getattr(settings, name) for name in names})


def replaced(value: T, changes: dict[str, Any], error: type[ContbatchError] = InvalidRequestError) -> T:
    """Return a copy of a dataclass instance with some fields changed; `error` for a field that it does not take."""
    names = [f.name for f in fields(value) if f.init]  # type: ignore[arg-type]
    unknown = sorted(set(changes) - set(names))
    require(not unknown, "the field to replace", ", ".join(unknown), f"one of {', '.join(names)}", error)
    return replace(value, **changes)  # type: ignore[type-var]
