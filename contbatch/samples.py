"""Several answers to one prompt: whose request becomes the parent of the others."""

from collections.abc import Mapping, Sequence

from contbatch.request import Request, RequestStatus

FINISHED = RequestStatus.FINISHED


def sample_ids(request: Request) -> list[int | str]:
    """Return the ids of all samples of a request: its own, then "id#1", "id#2" and so on."""
    name, sampling = request.request_id, request.sampling
    if sampling.n == 1 and sampling.best_of is None:
        return [name]
    return [name, *(f"{name}#{i}" for i in range(1, request.sampling.num_samples))]


def make_children(parent: Request) -> tuple[Request, ...]:
    """Make the further samples of a request that has its `order`; theirs follow it, so nobody comes in between.

    They wait, as `FORKING`, until the parent has computed the prompt; then all draw their first token from its logits.
    """
    if parent.sampling.num_samples == 1:
        return ()
    parent.num_forked_tokens = parent.num_prompt_tokens
    own = parent.sampling.replace(n=1, best_of=None, prompt_logprobs=None)
    lengths_only = parent.prompt_token_ids is None
    children = []
    for i, name in enumerate(sample_ids(parent)[1:], 1):
        child = Request(
            name,
            parent.prompt_token_ids,
            own,
            num_prompt_tokens=parent.num_prompt_tokens if lengths_only else None,
            arrival_time=parent.arrival_time,
            eos_token_ids=parent.eos_token_ids,
            priority=parent.priority,
            client_id=parent.client_id,
            ttft_target_s=parent.ttft_target_s,
            tpot_target_s=parent.tpot_target_s,
            expected_output_tokens=parent.expected_output_tokens,
            cache_salt=parent.cache_salt,
        )
        child.status, child.sample_index, child.order = RequestStatus.FORKING, i, parent.order + i
        child.parent, child.num_forked_tokens = parent, parent.num_prompt_tokens
        children.append(child)
    return tuple(children)


def live_samples(request_id: int | str, live: Mapping[int | str, Request]) -> list[Request]:
    """Return the request of an id and its further samples, those that live; it may have ended before them."""
    if request_id in live:
        return [r for r in live[request_id].samples if live.get(r.request_id) is r]
    return [r for r in live.values() if r.sample_index and r.parent and r.parent.request_id == request_id]


def unforked(parent: Request) -> list[Request]:
    """Return the children that have no token yet and so depend on the parent."""
    return [child for child in parent.children if child.status is RequestStatus.FORKING]


def answered(left: Sequence[Request]) -> list[Request]:
    """Return the requests of prompts of which the last sample is among those that just left."""
    first: dict[Request, None] = {}
    for r in left:
        first[r.parent if r.sample_index and r.parent else r] = None
    return [r for r in first if r.status is FINISHED and not (r.children and _any_live(r.children))]


def _any_live(requests: Sequence[Request]) -> bool:
    return any(r.status is not FINISHED for r in requests)


def best_samples(request: Request) -> list[Request]:
    """Return the n samples to give: in order, or those of the largest cumulative log-probability, failed ones last."""
    samples, n = request.samples, request.sampling.n
    if len(samples) == n:
        return list(samples)
    return sorted(samples, key=lambda r: (r.error is not None, -(r.cumulative_logprob or 0.0)))[:n]
