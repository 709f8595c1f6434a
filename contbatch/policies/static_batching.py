"""Batches that start and leave together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from sys import maxsize
from typing import Literal

from contbatch.checks import is_one_of, require, take_counts
from contbatch.policies.policy import Plan, Policy
from contbatch.request import Request


@dataclass(frozen=True)
class StaticBatching(Policy):
    """A batch starts together and leaves together: request-level scheduling (FasterTransformer, Orca's baseline).

    The finished keep seat and pages until the longest of the batch ends; each seat reserves the pages that one needs.

    Parameters
    ----------
    batch_size : int
        Requests in a batch (fewer if fewer wait, or if seats or pages do not suffice).
    release : "batch" or "token"
        Whether answers reach their clients when the batch ends, or token by token though seats stay taken.
    pad : bool
        Also compute the rows of finished requests and throw the result away.
    """

    steady = True
    batch_size: int = 8
    release: Literal["token", "batch"] = "batch"
    pad: bool = False
    _batch: list[Request] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        take_counts(self, "batch_size")
        require(isinstance(self.pad, bool), "pad", self.pad, "True or False")
        require(is_one_of(self.release, ("token", "batch")), "release", self.release, "'token' or 'batch'")

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        if not running:
            self._batch[:] = islice(waiting, min(self.batch_size, maxsize))
        for r in self._batch:  # if the budget is too small for all their prompts, the last join in later steps
            if not r.is_finished or (self.pad and r in running):
                yield r, r.num_uncomputed_tokens

    def reserve(self, request: Request) -> int:  # noqa: D102
        return max((r.max_kv_tokens for r in self._batch), default=request.max_kv_tokens)

    def may_leave(self, running: Sequence[Request]) -> bool:  # noqa: D102
        return all(r.is_finished for r in running)
