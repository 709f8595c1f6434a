"""From where a waiting request can go on, and what of it is somewhere in pages already."""

from typing import NamedTuple

from contbatch.prefix_cache import PrefixCache
from contbatch.request import Request, RequestStatus

RUNNING, SWAPPED = RequestStatus.RUNNING, RequestStatus.SWAPPED


class Start(NamedTuple):
    """How many tokens of a request need no computing, and where their keys and values are."""

    num_tokens: int
    pages: list[int]
    """Full pages of its beginning that others hold, or the prefix cache, to be shared."""
    num_cached: int = 0
    """Tokens in `pages` if the prefix cache holds them."""
    partial: int | None = None
    """A page of another request that is not full of common tokens: to be copied, since both go on writing in it."""


def find_start(request: Request, cache: PrefixCache) -> Start:
    """Return the furthest start; always good only until the next change.

    A request that was swapped out goes on where it was: what is not shared comes from its host pages. A forked one, or
    a sample of a prompt, goes on from what it has in common with its parent or with another sample, whichever runs and
    has computed most of it. If none does, it begins like any other.
    """
    shared, size = cache.find(request), cache.pool.page_size
    cached = len(shared) * size
    if request.status is SWAPPED:
        return Start(max(cached, request.num_computed_tokens), shared, cached)
    kin = [r for r in (request.parent or request).samples if r.status is RUNNING] if request.num_forked_tokens else []
    if kin and request.sampling.prompt_logprobs is None:
        source = max(kin, key=lambda r: r.num_computed_tokens)
        common = min(source.num_computed_tokens, request.num_forked_tokens, request.num_tokens - 1)
        if common > cached:
            full, rest = divmod(common, size)
            return Start(common, source.pages[:full], 0, source.pages[full] if rest else None)
    return Start(cached, shared, cached)
