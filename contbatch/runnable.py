"""Whether a scheduler could ever run a request: it must not block those behind it."""

from typing import TYPE_CHECKING

from contbatch.checks import require, require_type
from contbatch.errors import InvalidRequestError
from contbatch.policies.answers import reserve_of
from contbatch.request import Request
from contbatch.samples import sample_ids

if TYPE_CHECKING:
    from contbatch.scheduler import Scheduler


def require_unused(request: Request, scheduler: "Scheduler") -> None:
    """Raise `InvalidRequestError` if a request was used before, or has an id that is in use."""
    require_type("what is added", request, Request)
    for name in sample_ids(request):
        if name in scheduler.requests:
            raise InvalidRequestError(f"request id {name!r} is already in use by a live request")
    if request.order >= 0 or request.finish_reason is not None:
        raise InvalidRequestError(f"{request!r} has been added or rejected before; make a new Request")


def require_fitting(request: Request, scheduler: "Scheduler") -> None:
    """Raise `InvalidRequestError` if a request is too long, or needs more pages than there are."""
    pool, most = scheduler.pool, scheduler.max_model_len
    prompt, output = request.num_prompt_tokens, request.sampling.max_tokens
    need = pool.pages_for(max(prompt + output - 1, reserve_of(scheduler.policy, request)))
    if most is not None and prompt + output > most:
        fault = f"= {prompt + output} exceed max_model_len {most}"
    elif need > pool.num_pages:
        have = f"the pool has {pool.num_pages}: it can never run"
        fault = f"need {need} pages of {pool.page_size} tokens, {have}"
    else:
        return
    what = f"request {request.request_id!r}: {prompt} prompt + {output} output tokens"
    raise InvalidRequestError(f"{what} {fault}")


def require_forkable(parent: Request, child: Request, scheduler: "Scheduler") -> None:
    """Raise `InvalidRequestError` unless a request's known tokens but the last are those of a live parent."""
    for name, given in (("the parent", parent), ("the fork", child)):
        require_type(name, given, Request)
    common, n = child.num_tokens - 1, child.sampling.num_samples
    require(n == 1, f"n of the forked request {child.request_id!r}", n, "1")
    made, most = child.num_output_tokens, child.sampling.max_tokens
    require(made < most, f"output tokens of the forked request {child.request_id!r}", made, f"fewer than {most}")
    if scheduler.requests.get(parent.request_id) is not parent:
        raise InvalidRequestError(f"{child!r} can't be forked from {parent!r}, which is not live in this scheduler")
    if child.token_ids(0, common) != parent.token_ids(0, common) or child.cache_salt != parent.cache_salt:
        raise InvalidRequestError(f"{child!r} does not go on from the tokens of {parent!r}")
