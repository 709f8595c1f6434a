"""From a range to the widget that moves a value through it."""

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from contbatch.checks import is_int, is_real
from contbatch.explorer_ranges import ends_of
from contbatch.expressions import expression
from contbatch.field_paths import field_type

if TYPE_CHECKING:
    from ipywidgets import Widget

LOG_RATIO = 64
"""From this ratio of its ends on, a slider is logarithmic."""


def control(name: str, given: Any, value: Any, kind: Any) -> "Widget":
    """Make the widget of a field: a slider for a range, a checkbox for False and True, else a list to choose from.

    Parameters
    ----------
    name : str
        What is written beside it.
    given : tuple, range or list
        See `explore`.
    value : object
        Where it begins; the nearest that it can take, or the first of a list.
    kind : type or union of types
        Of the field: one that takes a float gets a slider without steps of 1.
    """
    import ipywidgets

    look = {"description": name, "style": {"description_width": "initial"}, "layout": {"width": "22em"}}
    if (ends := ends_of(given)) is None:
        values = list(given)
        start = value if value in values else values[0]
        if len(values) == 2 and all(isinstance(v, bool) for v in values):
            return ipywidgets.Checkbox(start, indent=False, **look)
        return ipywidgets.Dropdown(options=[(label(v), v) for v in values], value=start, **look)
    low, high, *step = ends
    start = min(max(value, low), high) if is_real(value) else high
    whole = all(is_int(v) for v in (low, high, *step)) and not takes(kind, float)
    if low > 0 and high / low >= LOG_RATIO and not step:
        if not whole:
            exponents = {"min": math.log10(low), "max": math.log10(high), "step": 0.01}
            return ipywidgets.FloatLogSlider(start, **exponents, readout_format=".3g", **look)
        return ipywidgets.SelectionSlider(options=_geometric(low, high, start), value=start, **look)
    if whole:
        return ipywidgets.IntSlider(int(start), low, high, *step, **look)
    fine = step[0] if step else 10.0 ** math.floor(math.log10((high - low) / 50))
    return ipywidgets.FloatSlider(float(start), min=low, max=high, step=fine, readout_format=".4g", **look)


def parameter(policy: Any, name: str) -> "Widget | None":
    """Make the widget of a policy's parameter that no range was given for; None if it is of no simple kind."""
    import ipywidgets

    value, kind = getattr(policy, name), field_type(policy, name)
    look = {"description": name, "style": {"description_width": "initial"}, "layout": {"width": "22em"}}
    if get_origin(kind) is Literal:
        return control(name, list(get_args(kind)), value, kind)
    if isinstance(value, bool):
        return ipywidgets.Checkbox(value, indent=False, **look)
    if is_int(value) and not takes(kind, float):
        return ipywidgets.IntText(value, continuous_update=False, **look)
    if is_real(value):
        return ipywidgets.FloatText(value, continuous_update=False, **look)
    return None


def parameters(policy: Any) -> list[str]:
    """Return the names of the parameters of a policy that is a dataclass."""
    return [f.name for f in fields(policy) if f.init] if hasattr(policy, "__dataclass_fields__") else []


def label(value: Any) -> str:
    """Return what is written for a value in a list."""
    return value if isinstance(value, str) else expression(value).removeprefix("cb.")


def takes(kind: Any, wanted: type) -> bool:
    """Whether an annotation, or one part of a union, is a type."""
    return kind is wanted or wanted in get_args(kind)


def _geometric(low: int, high: int, start: int) -> list[int]:
    """Return integers from low to high, round ones, ten to a factor of ten where there are so many; and `start`."""
    steps = (round(m * 10.0**k) for k in range(20) for m in (1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.4, 8))
    return sorted({low, high, start, *(step for step in steps if low < step < high)})
