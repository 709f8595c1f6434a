"""What a policy answers, checked: a broken policy raises `PolicyError` and leaves the scheduler whole."""

from collections.abc import Sequence

from contbatch.checks import is_int, require
from contbatch.errors import PolicyError
from contbatch.policies.policy import Policy
from contbatch.request import Request


def rank_of(policy: Policy, request: Request) -> float:
    """Return `policy.rank(request)`, a number but NaN."""
    rank = policy.rank(request)
    what = f"{type(policy).__name__}.rank of request {request.request_id!r}"
    require(isinstance(rank, (int, float)) and rank == rank, what, rank, "a number", PolicyError)
    return rank


def reserve_of(policy: Policy, request: Request) -> int:
    """Return `policy.reserve(request)`, an integer ≥ 0."""
    tokens = policy.reserve(request)
    what = f"{type(policy).__name__}.reserve of request {request.request_id!r}"
    require(is_int(tokens, 0), what, tokens, "an integer ≥ 0", PolicyError)
    return tokens


def victim_of(policy: Policy, candidates: Sequence[Request]) -> Request:
    """Return `policy.choose_victim(candidates)`, one of them."""
    victim = policy.choose_victim(candidates)
    names = ", ".join(repr(r.request_id) for r in candidates)
    what = f"the victim that {type(policy).__name__}.choose_victim returns"
    require(any(victim is r for r in candidates), what, victim, f"one of the requests {names}", PolicyError)
    return victim
