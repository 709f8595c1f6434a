"""What an object is, as JSON: its class and its fields. Equal descriptions, equal experiments."""

import dataclasses
import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from contbatch.checks import python_number
from contbatch.errors import ExperimentError

_PACKAGE = __name__.split(".", maxsplit=1)[0]


def describe(value: Any) -> Any:
    """Return numbers, texts, lists and dictionaries that say all about a value.

    Frozen dataclasses of this package become {"type": "contbatch.module.Class", field: value, …}. An object with a
    method `description`, such as an LLM, is what that says. Of an instance of another class, such as a policy written
    in a notebook, the source of its methods and its attributes are told.

    Raises
    ------
    ExperimentError
        The source of a class can't be found, or a value is none of these.
    """
    value = python_number(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, Mapping):
        return {"items": [[describe(key), describe(item)] for key, item in value.items()]}
    if callable(tell := getattr(value, "description", None)):
        return describe(tell())
    cls = type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if dataclasses.is_dataclass(value) and _is_ours(cls.__module__):
        return {"type": name} | {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    try:
        sources = [_members(base) for base in cls.__mro__ if base is not object and not _is_ours(base.__module__)]
    except (OSError, TypeError):
        raise ExperimentError(f"{value!r} can't be described: the source of its class {name} is nowhere") from None
    attributes = describe(getattr(value, "__dict__", {}))
    return {"class": cls.__qualname__, "sources": sources, "attributes": attributes}


def _members(cls: type) -> dict[str, str]:
    """Return what the body of a class defines: functions by their source, which notebooks keep, values as written."""
    told = {}
    for name, member in vars(cls).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if inspect.isfunction(function):
            told[name] = inspect.getsource(function)
        elif not name.startswith("__"):
            told[name] = repr(member)
    return told


def restore(data: Any) -> Any:
    """Make the value that `describe` described; lists become tuples.

    Raises
    ------
    ExperimentError
        It names a class that is not a dataclass of this package, or fields that it does not have.
    """
    if isinstance(data, list):
        return tuple(restore(item) for item in data)
    if not isinstance(data, dict):
        return data
    if "float" in data:
        return float(data["float"])
    if "items" in data:
        return {restore(key): restore(item) for key, item in data["items"]}
    if "class" in data:
        raise ExperimentError(f"class {data['class']} was defined outside this package: make its instance anew")
    module, _, name = str(data.get("type")).rpartition(".")
    if not _is_ours(module):
        raise ExperimentError(f"type must be a dataclass of {_PACKAGE}, got {data.get('type')!r}")
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        cls = None
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ExperimentError(f"type must be a dataclass of {_PACKAGE}, got {data['type']!r}")
    try:
        return cls(**{key: restore(item) for key, item in data.items() if key != "type"})
    except TypeError as error:
        raise ExperimentError(f"{data['type']}: {error}") from None


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == _PACKAGE


def digest(description: Any) -> str:
    """Hash a description: 16 hexadecimal digits of SHA-256 over its JSON."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def code_version() -> str:
    """Hash the source of this package, kernels and notebooks apart: 12 digits, equal in a checkout and installed.

    Once a process: what it has loaded does not change with the files.
    """
    found = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(("plugins/", "notebooks/")):  # which lie elsewhere in a checkout
            found.update(name.encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:12]
