"""Objects of this package as the code that makes them, to be pasted into a notebook."""

from dataclasses import fields, is_dataclass
from typing import Any

import contbatch


def expression(value: Any) -> str:
    """Return code that makes an equal value, after `import contbatch as cb`; of what is not ours, its repr."""
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(expression, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    told = {f.name: getattr(value, f.name) for f in fields(value) if f.init and getattr(value, f.name) != f.default}
    return f"{_public_name(type(value))}({', '.join(f'{key}={expression(part)}' for key, part in told.items())})"


def change(before: Any, after: Any, name: str) -> str:
    """Return code that makes `after` of `before`, a dataclass instance that is called `name` and has a `replace`."""
    if type(before) is not type(after) or not (is_dataclass(before) and hasattr(before, "replace")):
        return expression(after)
    told = []
    for f in fields(before):
        old, new = getattr(before, f.name), getattr(after, f.name)
        if f.init and old != new:
            told.append(f"{f.name}={change(old, new, f'{name}.{f.name}')}")
    return f"{name}.replace({', '.join(told)})" if told else name


def _public_name(cls: type) -> str:
    """Return how users call a class: "cb.Poisson", "cb.lengths.Uniform", or just its name if it is their own."""
    package, _, module = cls.__module__.partition(".")
    if package != contbatch.__name__:
        return cls.__name__
    return f"cb.{cls.__name__}" if cls.__name__ in contbatch.__all__ else f"cb.{module}.{cls.__name__}"
