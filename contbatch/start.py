"""From where a waiting request can go on, and what of it is somewhere in pages already."""

from contbatch.prefix_cache import PrefixCache
from contbatch.request import Request, RequestStatus

RUNNING, SWAPPED = RequestStatus.RUNNING, RequestStatus.SWAPPED

Start = tuple[int, list[int], int, int | None]
"""num_tokens, shared, num_cached, partial: see `find_start`."""
NOWHERE: Start = 0, [], 0, None


def find_start(request: Request, cache: PrefixCache) -> Start:
    """Return the furthest start; always good only until the next change.

    A request that was swapped out goes on where it was: what is not shared comes from its host pages. A forked one, or
    a sample of a prompt, goes on from what it has in common with its parent or with another sample, whichever runs and
    has computed most of it. If none does, it begins like any other.

    Returns
    -------
    num_tokens : int
        First so many tokens need no computing.
    shared : list of int
        Full pages of its beginning that others hold, or the prefix cache.
    num_cached : int
        Tokens in `shared` if the prefix cache holds them; not more than `num_tokens`.
    partial : int or None
        A page of another request that is not full of common tokens: to be copied, since both go on writing in it.
    """
    if not (cache.enabled or request.num_forked_tokens or request.status is SWAPPED):
        return NOWHERE
    shared, size = cache.find(request), cache.pool.page_size
    cached = len(shared) * size
    if request.status is SWAPPED:
        return max(cached, request.num_computed_tokens), shared, cached, None
    forked = request.num_forked_tokens and cache.pool.layout != "contiguous"  # where a run has one holder
    if not forked or request.sampling.prompt_logprobs is not None:
        return cached, shared, cached, None
    if kin := [r for r in _kin(request) if r.status is RUNNING]:
        source = max(kin, key=lambda r: r.num_computed_tokens)
        common = min(source.num_computed_tokens, request.num_forked_tokens, request.num_tokens - 1)
        if common > cached:
            full, rest = divmod(common, size)
            return common, source.pages[:full], 0, source.pages[full] if rest else None
    return cached, shared, cached, None


def _kin(request: Request) -> tuple[Request, ...]:
    """Return those whose first `num_forked_tokens` tokens are a request's own: the samples of a prompt, or a parent."""
    if request.parent is None:
        return request.samples
    return request.parent.samples if request.sample_index else (request.parent,)
