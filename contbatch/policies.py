"""Policies rank and size; the scheduler enforces budget, seats and pages.

A policy says, before every step, who should compute how many tokens, best first:

    class ShortestPromptFirst(cb.Policy):
        def plan(self, waiting, running, budget):
            yield from ((r, r.num_uncomputed_tokens) for r in running)
            for r in sorted(waiting, key=lambda r: r.num_prompt_tokens):
                yield r, r.num_uncomputed_tokens

It may keep state on itself: every scheduler works on a deep copy of the policy it was given.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from contbatch.checks import require_counts
from contbatch.errors import InvalidRequestError
from contbatch.request import Request

Plan = Iterator[tuple[Request, int]]


class Policy:
    """Base of all policies; `plan` must be written, the other hooks have the defaults of paged continuous batching."""

    release: Literal["token", "batch"] = "token"
    """When tokens reach the client: as they are made, or all at once when the request leaves its seat."""

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:
        """Yield (request, number of tokens to compute), in order of preference.

        `waiting` comes in order of arrival and `running` in order of admission; iterating over `waiting` ends as soon
        as this step can admit no more. Numbers may exceed what is left of `budget` (tokens): the scheduler cuts them.
        The first waiting request that does not fit ends the admission of this step: nobody overtakes it. Running
        requests yielded late, or not at all, are the first to be preempted when pages run out.
        """
        raise NotImplementedError(f"{type(self).__name__} must define plan(waiting, running, budget)")

    def reserve(self, request: Request) -> int:  # noqa: ARG002
        """Tokens whose pages must be held from admission on; 0 takes pages on demand."""
        return 0

    def may_leave(self, running: Sequence[Request]) -> bool:  # noqa: ARG002
        """Whether the finished among `running` may give up their seats and pages now."""
        return True


def _decodes(running: Sequence[Request]) -> Plan:
    return ((r, 1) for r in running if r.num_uncomputed_tokens == 1 and not r.is_finished)


def _prefills(running: Sequence[Request]) -> Plan:
    return ((r, r.num_uncomputed_tokens) for r in running if r.num_uncomputed_tokens > 1)


@dataclass(frozen=True)
class ContinuousBatching(Policy):
    """Iteration-level scheduling with pages on demand: whoever finished leaves, whoever waits joins, at every step.

    Prompts go first (as in the first vLLM), so a long prompt can stall the decoding requests of its step when the
    budget binds. First come, first served. Orca (Yu et al., OSDI 2022) for the iteration level, vLLM (Kwon et al.,
    SOSP 2023) for the pages.
    """

    def reserve(self, request: Request) -> int:  # noqa: D102
        # Else a prompt admitted for its first chunk would take the pages of older, decoding requests for its next.
        return request.num_tokens

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        yield from _prefills(running)
        yield from ((r, r.num_uncomputed_tokens) for r in waiting)
        yield from _decodes(running)


@dataclass(frozen=True)
class ChunkedPrefill(Policy):
    """Decoding requests go first and never stall; prompts fill what is left of the budget, in chunks.

    "Stall-free batching" of Sarathi-Serve (Agrawal et al., OSDI 2024); also vLLM's present default.
    """

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        yield from _decodes(running)
        yield from _prefills(running)
        yield from ((r, r.num_uncomputed_tokens) for r in waiting)


@dataclass(frozen=True)
class Orca(Policy):
    """Iteration-level scheduling that reserves memory for prompt + max_tokens at admission, so it never preempts.

    First come, first served at every iteration (Yu et al., OSDI 2022, section 4.2).
    """

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        yield from ((r, r.num_uncomputed_tokens) for r in running)
        yield from ((r, r.num_uncomputed_tokens) for r in waiting)

    def reserve(self, request: Request) -> int:  # noqa: D102
        return request.max_kv_tokens


@dataclass(frozen=True)
class OneAtATime(Policy):
    """One request after the other, each to its end: what a server without batching does."""

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:  # noqa: ARG002, D102
        for r in running or islice(waiting, 1):
            yield r, r.num_uncomputed_tokens


@dataclass(frozen=True)
class StaticBatching(Policy):
    """A batch starts together and leaves together: request-level scheduling, as FasterTransformer does it.

    A finished request keeps its seat and its pages until the longest of its batch ends. Each seat reserves the pages
    of the longest request in the batch.

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
        if self.release not in ("token", "batch"):
            raise InvalidRequestError(f"release must be 'token' or 'batch', got {self.release!r}")

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
