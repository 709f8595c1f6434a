"""The prefix cache: which page holds the keys and values of which tokens after which prefix.

    prompt        [ s0 s1 s2 s3 | s4 s5 s6 s7 | a0 a1 ]        page_size = 4, salt None
    hash chain    h0 = hash(salt)    h1 = hash(h0, s0..s3)    h2 = hash(h1, s4..s7)
    index          h1 → page 7        h2 → page 2

Only full pages whose tokens are computed are published, so a published page is never written again. A page is found by
the hash of its whole prefix (vLLM's automatic prefix caching); then its tokens, and the page before it, are compared,
so that two prefixes of equal hash are never taken for one another.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from contbatch.checks import require, require_type
from contbatch.pages import PagePool
from contbatch.request import Request, RequestStatus
from contbatch.step import Grant

RUNNING = RequestStatus.RUNNING


@dataclass(frozen=True, slots=True)
class _Root:
    """Where a chain begins: requests share pages only if all fields are equal. A new kind of key is a new field."""

    key: int
    salt: str | None


@dataclass(frozen=True, slots=True, eq=False)
class _Published:
    """A published page. Equal to itself only: its `parent` stands for the whole prefix."""

    key: int
    parent: "_Published | _Root"
    tokens: tuple[int, ...]
    page: int

    def holds(self, parent: "_Published | _Root", tokens: tuple[int, ...]) -> bool:
        return self.parent == parent and self.tokens == tokens


class PrefixCache:
    """Finds pages that hold a request's prefix already, and publishes those that requests fill.

    Parameters
    ----------
    pool : PagePool
        Keeps published pages until it needs them for others, the least recently held first. Whoever holds a page holds
        all pages before it and gives it back before them, so the end of a prefix is evicted before its beginning.
    enabled : bool
        False finds and publishes nothing.
    hash_page : callable
        Hash of (key of the page before, tokens of the page). Collisions cost hits, never correctness.
    """

    def __init__(self, pool: PagePool, enabled: bool = True, hash_page: Callable[[Hashable], int] = hash) -> None:
        require_type("pool", pool, PagePool)
        require(isinstance(enabled, bool), "prefix_cache", enabled, "True or False")
        self.pool = pool
        self.enabled = enabled
        self.num_prompt_tokens = 0
        """Prompt tokens of the requests admitted so far; a preempted request counts once."""
        self.num_cached_tokens = 0
        """Those of them that were found in the cache."""
        self._hash = hash_page
        self._by_key: dict[int, _Published] = {}
        self._by_page: dict[int, _Published] = {}
        pool.on_evict = self._drop

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens admitted so far that were found in the cache; NaN before any."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else float("nan")

    def find(self, request: Request) -> list[int]:
        """Return the pages that hold the longest cached prefix of a request; always good only until the next change.

        The last known token is never among their tokens: its logits are needed, so it must be computed. A request that
        wants the log-probabilities of its prompt needs the logits of all, so it finds nothing.
        """
        if not self.enabled or request.prompt_token_ids is None or request.sampling.prompt_logprobs is not None:
            return []
        size, found = self.pool.page_size, list[int]()
        parent: _Published | _Root = self._root(request)
        for start in range(0, request.num_tokens - size, size):
            tokens = tuple(request.token_ids(start, start + size))
            entry = self._by_key.get(self._hash((parent.key, tokens)))
            if entry is None or not entry.holds(parent, tokens):
                break
            found.append(entry.page)
            parent = entry
        return found

    def count(self, request: Request, num_cached_tokens: int) -> None:
        """Count a request just admitted with what was found; one forked from a parent did not need the cache."""
        if not request.num_preemptions and request.parent is None:
            request.num_cached_tokens = num_cached_tokens
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += num_cached_tokens

    def publish_step(self, grants: Iterable[Grant]) -> None:
        """Publish the pages that a step has filled; a finished request's when it leaves: padding may write them."""
        if not self.enabled:
            return
        size = self.pool.page_size
        for request, start, num_tokens, _, _ in grants:
            if (start % size) + num_tokens >= size and request.status is RUNNING and not request.is_finished:
                self.publish(request)

    def publish(self, request: Request) -> None:
        """Publish the full, computed pages of a request.

        A page whose content is published already is given back, and the request goes on with the published one: so
        requests that computed the same prefix side by side share it from then on.
        """
        if not self.enabled or request.prompt_token_ids is None:
            return
        size, pages = self.pool.page_size, request.pages
        stop = request.num_computed_tokens // size
        first = stop
        while first and pages[first - 1] not in self._by_page:
            first -= 1
        parent = self._by_page[pages[first - 1]] if first else self._root(request)
        for i in range(first, stop):
            tokens = tuple(request.token_ids(i * size, (i + 1) * size))
            key = self._hash((parent.key, tokens))
            known = self._by_key.get(key)
            if known is not None and known.holds(parent, tokens):
                self.pool.share([known.page])
                self.pool.give_back([pages[i]])
                pages[i] = known.page
                parent = known
            else:
                if known is not None:  # a collision, or the page before it is lost and it can't be found any more
                    self.pool.forget(known.page)
                self.pool.keep(pages[i])
                parent = self._by_page[pages[i]] = _Published(key, parent, tokens, pages[i])
                self._by_key[key] = parent

    def leave(self, request: Request) -> None:
        """Publish the pages of a request that leaves; forget those of one that failed: they may hold the cause."""
        if request.error is None:
            self.publish(request)
            return
        for page in request.pages:
            self.pool.forget(page)

    def _root(self, request: Request) -> _Root:
        return _Root(self._hash(("salt", request.cache_salt)), request.cache_salt)

    def _drop(self, page: int) -> None:
        if entry := self._by_page.pop(page, None):  # None, and no key, if publishing it was interrupted
            self._by_key.pop(entry.key, None)
