"""Policies rank and size; the scheduler enforces budget, seats and pages.

A policy says, before every step, who should compute how many tokens, best first:

    class ShortestPromptFirst(cb.Policy):
        def plan(self, waiting, running, budget):
            yield from ((r, r.num_uncomputed_tokens) for r in running)
            for r in sorted(waiting, key=lambda r: r.num_prompt_tokens):
                yield r, r.num_uncomputed_tokens

With thousands waiting, let the scheduler keep them sorted instead:

    class ShortestPromptFirst(cb.ChunkedPrefill):
        def rank(self, request):
            return request.num_prompt_tokens

A policy may keep state on itself: every scheduler works on a deep copy of the policy it was given.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from contbatch.request import Request

Plan = Iterator[tuple[Request, int]]


class Policy:
    """Base of all policies; `plan` must be written, the other hooks have the defaults of paged continuous batching.

    The scheduler checks every answer: one that breaks the rules raises `PolicyError` with the offence.
    """

    release: Literal["token", "batch"] = "token"
    """When tokens reach the client: as they are made, or all at once when the request leaves its seat."""

    steady: bool = False
    """A promise: while the same requests run and decode, and the same wait, `plan` names the same in the same order,
    whatever the time and the tokens so far. A simulation then need not ask before every step (see `FastForward`).
    Not inherited, since a subclass may plan otherwise."""

    decodes: Literal["first", "aside", "among"] = "among"
    """A further promise of a steady policy whose finished may leave at once, and that makes nobody give way.

    "first": `plan` names all who decode before the others, "aside": anywhere; and the others as if nobody decoded, the
    running before the waiting. A simulation then need not look at those who decode (see `Decoders`). Not inherited."""

    def __init_subclass__(cls) -> None:
        """Withdraw the promises of the class that a policy is derived from."""
        super().__init_subclass__()
        cls.steady = cls.__dict__.get("steady", False)
        cls.decodes = cls.__dict__.get("decodes", "among")

    now: float = 0.0
    """Seconds on the engine's clock at which the step being planned starts; the scheduler sets it before `plan`."""

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], budget: int) -> Plan:
        """Yield (request, number of tokens to compute), in order of preference.

        `waiting` comes in order of `rank` and `running` in order of admission; iterating over `waiting` ends as soon
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

    def rank(self, request: Request) -> float:  # noqa: ARG002
        """Place among the waiting: smaller goes first, ties go by arrival; any number but NaN.

        Asked once each time a request starts to wait: when it arrives and when it is preempted; of a further sample of
        a prompt when the prompt is computed.
        """
        return 0.0

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """Return who is preempted when pages run out, one of `candidates`: the running below whoever needs pages.

        They come in the order of the plan, then those it does not name. By default the last goes.
        """
        return candidates[-1]

    def may_swap(self, victim: Request) -> bool:  # noqa: ARG002
        """Whether the pages of a preempted request go to host memory if it has room, rather than be computed again."""
        return True

    def make_way(self, newcomer: Request, running: Sequence[Request]) -> Sequence[Request]:  # noqa: ARG002
        """Return those of `running` that may be preempted so that the waiting `newcomer` is admitted; here nobody.

        The most dispensable come last. Whoever the plan has named before `newcomer` is left alone all the same.
        """
        return ()

    def __repr__(self) -> str:
        """Show the parameters that differ from their defaults."""
        parameters = getattr(self, "__dataclass_fields__", {}).items()
        names = [name for name, f in parameters if f.init and getattr(self, name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def arrival_key(request: Request) -> tuple[float, int]:
    """Sort key: arrival time, ties by the order of adding."""
    return request.arrival_time, request.order


def everything(requests: Iterable[Request]) -> Plan:
    """Plan all that is left to compute of some requests, but the finished."""
    return ((r, r.num_uncomputed_tokens) for r in requests if r.finish_reason is None)


def decodes(running: Iterable[Request]) -> Plan:
    """Plan the token of each request that has only one to compute."""
    return ((r, 1) for r in running if r.num_uncomputed_tokens == 1 and r.finish_reason is None)


def prefills(running: Iterable[Request]) -> Plan:
    """Plan what is left of prompts (and of what is computed again after a preemption)."""
    return ((r, r.num_uncomputed_tokens) for r in running if r.num_uncomputed_tokens > 1)
