"""Batches that start and leave together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from contbatch.checks import require, require_counts
from contbatch.policies.policy import Plan, Policy
from contbatch.request import Request


@dataclass(frozen=True)
class StaticBatching(Policy):
    """A batch starts together and leaves together: request-level scheduling, as FasterTransformer does it.

    A finished request keeps its seat and its pages until the longest of its batch ends. Each seat reserves the pages
    of the longest request in the batch. The baseline of Orca (Yu et al., OSDI 2022, section 3).

    Parameters
    ----------
    batch_size : int
        Requests in a batch (fewer if fewer wait, or if seats or pages do not suffice).
    release : "batch" or "token"
        "batch": answers reach their clients when the batch ends. "token": a streaming server hands out each token at
        once, though seats stay taken.
    pad : bool
        Also compute the rows of finished requests and throw the result away.
    """

    batch_size: int = 8
    release: Literal["token", "batch"] = "batch"
    pad: bool = False
    _batch: list[Request] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_counts(batch_size=self.batch_size)
        require(self.release in ("token", "batch"), "release", self.release, "'token' or 'batch'")

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        if not running:
            self._batch[:] = islice(waiting, self.batch_size)
        # A budget too small for all prompts of the batch lets its last members join in later steps.
        for r in self._batch:
            if not r.is_finished:
                yield r, r.num_uncomputed_tokens
            elif self.pad and r in running:
                yield r, 1

    def reserve(self, request: Request) -> int:  # noqa: D102
        return max((r.max_kv_tokens for r in self._batch), default=request.max_kv_tokens)

    def may_leave(self, running: Sequence[Request]) -> bool:  # noqa: D102
        return all(r.is_finished for r in running)
