"""Fields of an experiment by name, however deep: those of its workload, policy and backend among them."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from contbatch.checks import replaced
from contbatch.errors import ExperimentError

ROOT = "experiment"


def field_paths(value: Any, prefix: str = "") -> list[str]:
    """Return the paths of all fields of a dataclass instance and of those within it, such as "workload.prompt.low"."""
    found = []
    for f in fields(value):
        if f.init:
            found.append(prefix + f.name)
            part = getattr(value, f.name)
            if is_dataclass(part) and not isinstance(part, type):
                found += field_paths(part, f"{prefix}{f.name}.")
    return found


def find_path(name: str, points: Iterable[Any]) -> str:
    """Return the path of the field that is called `name` in any of several experiments.

    The end of a path will do if no other path ends so; "experiment.max_model_len" is never that of the policy.

    Raises
    ------
    ExperimentError
        No field is called so, or several are.
    """
    paths = dict.fromkeys(f"{ROOT}.{path}" for point in points for path in field_paths(point))
    found = [path for path in paths if path.endswith(f".{name}") or path == name]
    if len(found) == 1:
        return found[0].removeprefix(f"{ROOT}.")
    if found:
        raise ExperimentError(f"{name!r} is the name of several fields: write one of {', '.join(found)}")
    known = ", ".join(path.removeprefix(f"{ROOT}.") for path in paths)
    raise ExperimentError(f"a field to explore must be one of {known}, got {name!r}")


def get_field(value: Any, path: str) -> Any:
    """Return the field at a path."""
    for name in path.split("."):
        value = getattr(value, name)
    return value


def with_field(value: Any, path: str, new: Any) -> Any:
    """Return a copy of a frozen dataclass instance with the field at a path changed; its checks may raise."""
    head, _, rest = path.partition(".")
    part = with_field(getattr(value, head), rest, new) if rest else new
    return replaced(value, {head: part}, ExperimentError)


def field_type(value: Any, path: str) -> Any:
    """Return the annotation of the field at a path; the type of its value if that can't be resolved."""
    head, _, name = path.rpartition(".")
    owner = get_field(value, head) if head else value
    try:
        return get_type_hints(type(owner))[name]
    except (KeyError, NameError, TypeError):  # such as a class of which a name is known to type checkers only
        return type(getattr(owner, name))
