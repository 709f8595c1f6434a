"""Cost models: seconds for a step of the scheduler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from math import inf
from numbers import Real
from typing import Any, Protocol

from contbatch.checks import is_int, require, require_seconds, shown, take_python_numbers
from contbatch.errors import CostModelError
from contbatch.step_shape import StepShape


class CostModel(Protocol):
    """Predicts the time of a step from its shape alone: equal shapes, equal seconds.

    A class may have a field `resize_s`: the seconds that a step takes longer if it has another number of rows than the
    step before, as where a library prepares its kernels for each number; and `min_rows`, if fewer are computed as so
    many.
    """

    def seconds(self, shape: StepShape) -> float:
        """Seconds, finite and ≥ 0, that a step of this shape takes."""
        ...

    def swap_seconds(self, num_pages: int, page_size: int) -> float:
        """Seconds to move so many pages of `page_size` tokens between the device and the host, one way."""
        ...


def require_cost_model(value: object) -> None:
    """Raise `CostModelError`, which names it, if a method of a `CostModel` is missing."""
    for name in ("seconds", "swap_seconds"):
        has_it = callable(getattr(value, name, None))
        require(has_it, "cost", value, f"None or a CostModel, with a method {name}", CostModelError)


SecondsOf = Callable[[Iterable[int]], Iterable[float]]
"""Seconds of steps by their `decode_context`."""


def seconds_by_context(cost: CostModel, shape: StepShape) -> SecondsOf:
    """Return the seconds of steps that differ from a shape in their `decode_context` only, as a function of these.

    A class may have a method of this name that does it sooner, to the last bit. It is not inherited: a subclass may
    have other `seconds`.
    """
    if "seconds_by_context" in vars(type(cost)):
        quick: SecondsOf = cost.seconds_by_context(shape)  # type: ignore[attr-defined]
        return quick

    def seconds(context: int) -> float:
        return require_number(cost, "seconds", cost.seconds(shape._replace(decode_context=context)))

    return partial(map, seconds)


def require_number(cost: CostModel, name: str, value: Any) -> float:
    """Return what a cost model said; `CostModelError`, which names both, if it is no number."""
    if type(value) is not float and not isinstance(value, Real):  # numpy's are, but to ask takes longer
        raise CostModelError(f"{name} of the cost model {cost!r:.80} must be a number of seconds, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:  # of an integer; the engine refuses it
        return inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A sum of a constant and terms in proportion to the sums of a `StepShape`; seconds, each ≥ 0.

    A product with weights takes as long as reading them while rows are few, and grows with the rows then: the roofline
    (Williams et al. 2009), with a step where a library turns to another kernel.

    Parameters
    ----------
    step_s : float
        Of every step.
    token_s : float
        Of a row of the linear layers, the first `few_rows` excepted.
    few_rows : int
        Rows that cost no more than the weights do.
    many_rows_s : float
        Of a step that has more.
    seq_s : float
        Of a request in the step.
    logits_s : float
        Of a row of logits, sampling included.
    decode_context_s : float
        Of a position that a single query reads.
    cold_context_s : float
        Of such a position besides, unless another request of the step reads it too and has brought it from memory.
    prefill_pair_s : float
        Of a pair of a query and a position, in grants of several tokens.
    resize_s : float
        Of a step that has another number of rows than the step before.
    min_rows : int
        A step of fewer rows is computed with so many, so that from one to the other nothing changes.
    swapped_token_s : float
        Of a token's keys and values moved to the host or back.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    few_rows: int = 0
    many_rows_s: float = 0.0
    seq_s: float = 0.0
    logits_s: float = 0.0
    decode_context_s: float = 0.0
    cold_context_s: float = 0.0
    prefill_pair_s: float = 0.0
    resize_s: float = 0.0
    min_rows: int = 1
    swapped_token_s: float = 0.0

    def __post_init__(self) -> None:
        take_python_numbers(self)
        for name, least in (("few_rows", 0), ("min_rows", 1)):
            rows = getattr(self, name)
            require(is_int(rows, least), name, rows, f"an integer ≥ {least}", CostModelError)
        seconds = {f.name: getattr(self, f.name) for f in fields(Linear) if f.name.endswith("_s")}
        require_seconds(CostModelError, **seconds)

    def seconds(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes after one with as many rows."""
        tokens, seqs, logits, decode_context, _, pairs, shared = shape
        return (
            self.step_s
            + self.token_s * max(tokens - self.few_rows, 0)
            + self.seq_s * seqs
            + self.logits_s * logits
            + self.decode_context_s * decode_context
            + self.cold_context_s * (decode_context - shared)
            + self.prefill_pair_s * pairs
            + self.many_rows_s * (tokens > self.few_rows)
        )

    def swap_seconds(self, num_pages: int, page_size: int) -> float:
        """Seconds to move pages between the device and the host."""
        return self.swapped_token_s * num_pages * page_size
