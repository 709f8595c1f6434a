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
    """A page of the parent that is not full of common tokens: to be copied, since both go on writing in it."""


def find_start(request: Request, cache: PrefixCache) -> Start:
    """Return the furthest start; always good only until the next change.

    A request that was swapped out goes on where it was: what is not shared comes from its host pages. A forked one
    goes on from what it has in common with its parent, as far as that has computed it; without a running parent it
    begins like any other.
    """
    shared, size = cache.find(request), cache.pool.page_size
    cached = len(shared) * size
    if request.status is SWAPPED:
        return Start(max(cached, request.num_computed_tokens), shared, cached)
    parent = request.parent
    if parent is not None and parent.status is RUNNING:
        common = min(parent.num_computed_tokens, request.num_forked_tokens)
        if common > cached:
            full, rest = divmod(common, size)
            return Start(common, parent.pages[:full], 0, parent.pages[full] if rest else None)
    return Start(cached, shared, cached)
