"""What a policy answers, checked: a broken policy raises `PolicyError` and leaves the scheduler whole."""

import copy
from collections.abc import Mapping, Sequence

from contbatch.checks import is_int, is_one_of, require, shown
from contbatch.errors import PolicyError
from contbatch.policies.policy import Plan, Policy
from contbatch.request import Request, RequestStatus

FORKING = RequestStatus.FORKING


def checked(policy: Policy) -> Policy:
    """Return an own copy of a policy, if it is one and says when tokens reach the client."""
    if not isinstance(policy, Policy):
        raise PolicyError(f"policy must be an instance of Policy, got {shown(policy)}")
    what = f"{type(policy).__name__}.release"
    require(is_one_of(policy.release, ("token", "batch")), what, policy.release, "'token' or 'batch'", PolicyError)
    return copy.deepcopy(policy)


def rank_of(policy: Policy, request: Request) -> float:
    """Return `policy.rank(request)`, a number but NaN."""
    rank = policy.rank(request)
    if not isinstance(rank, (int, float)) or rank != rank:
        require(False, f"{type(policy).__name__}.rank of request {request.request_id!r}", rank, "a number", PolicyError)
    return rank


def reserve_of(policy: Policy, request: Request) -> int:
    """Return `policy.reserve(request)`, an integer ≥ 0."""
    tokens = policy.reserve(request)
    if (type(tokens) is not int or tokens < 0) and not is_int(tokens, 0):
        what = f"{type(policy).__name__}.reserve of request {request.request_id!r}"
        require(False, what, tokens, "an integer ≥ 0", PolicyError)
    return tokens


def victim_of(policy: Policy, candidates: Sequence[Request]) -> Request:
    """Return `policy.choose_victim(candidates)`, one of them."""
    victim = policy.choose_victim(candidates)
    names = ", ".join(repr(r.request_id) for r in candidates)
    what = f"the victim that {type(policy).__name__}.choose_victim returns"
    require(any(victim is r for r in candidates), what, victim, f"one of the requests {names}", PolicyError)
    return victim


def planned(
    policy: Policy, plan: Plan, requests: Mapping[int | str, Request], seen: set[int | str], restarted: list[Request]
) -> Plan:
    """Yield what a plan yields, checked: live requests of `requests`, each once; their ids are added to `seen`.

    Those `restarted` in this step have more to compute all of a sudden, and may be named again for it: passed over.
    """
    if not hasattr(plan, "__iter__"):
        raise PolicyError(f"{_name(policy)} must yield (request, number of tokens), but returned {plan!r}")
    for item in plan:
        try:
            request, wanted = item
            known = requests.get(request.request_id) is request and request.status is not FORKING
        except (TypeError, ValueError, AttributeError):
            raise PolicyError(f"{_name(policy)} must yield (request, number of tokens), got {item!r}") from None
        if not known:
            raise PolicyError(f"{_name(policy)} yielded {request!r}, which is not a live request of this scheduler")
        if restarted and request in restarted:
            continue
        if request.request_id in seen:
            raise PolicyError(f"{_name(policy)} yielded request {request.request_id!r} twice in one step")
        limit = request.num_uncomputed_tokens
        if not isinstance(wanted, int) or not 1 <= wanted <= limit:
            raise PolicyError(
                f"{_name(policy)} wants {wanted!r} tokens for request {request.request_id!r}, possible are 1 to {limit}"
            )
        seen.add(request.request_id)
        yield request, wanted


def _name(policy: Policy) -> str:
    return f"{type(policy).__name__}.plan"
