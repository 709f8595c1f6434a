"""Page ids and who holds them. No memory here: a page is an integer, a runner owns the bytes behind it.

    page ids    0   1   2   3   4   5        page_size tokens of keys and values each
    holders     1   0   2   1   0   1        0: free or cached, 1: one request's, 2: shared
    request A  [0, 2, 5]                     its page table: token t lies in page table[t // page_size],
    request B  [3, 2]                        slot t % page_size

Every page is in one of three states:

    free --take--> live --give_back--> free          its content is worth nothing
                    |  ^
              keep  |  share
                    v  |
                   kept and live --give_back--> cached --take, least recently used first--> live
                       ^------------share---------'

After PagedAttention (Kwon et al., SOSP 2023, section 4.2), whose "block" is a page here.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable

from contbatch.checks import require, require_counts
from contbatch.errors import PagePoolError

MAX_PAGES = 10_000_000
"""Each costs some 50 bytes of bookkeeping, whatever its content."""

MAX_PAGE_SIZE = 1_000_000
"""Tokens: more than any model takes."""


class PagePool:
    """A fixed number of equal pages, handed out by reference count.

    Parameters
    ----------
    num_pages : int
        Pages in the pool, in [1, `MAX_PAGES`].
    page_size : int
        Tokens in a page, in [1, `MAX_PAGE_SIZE`].
    """

    layout = "paged"

    def __init__(self, num_pages: int, page_size: int) -> None:
        num_pages, page_size = require_counts(num_pages=num_pages, page_size=page_size)
        require(num_pages <= MAX_PAGES, "num_pages", num_pages, f"at most {MAX_PAGES}")
        require(page_size <= MAX_PAGE_SIZE, "page_size", page_size, f"at most {MAX_PAGE_SIZE}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_evictions = 0
        """Cached pages taken for other content so far."""
        self.on_evict: Callable[[int], object] = lambda _page: None
        """Called with each page whose kept content is lost."""
        self.num_shared = 0
        """References to live pages beyond the first of each: entries of page tables that others have too."""
        self._live: set[int] = set()
        self._more_holders: dict[int, int] = {}
        """Of pages that are shared: how many hold them besides the first."""
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last, still in caches, goes first
        self._kept: set[int] = set()
        self.num_promised = 0
        """Pages that somebody will take, who has counted them only: live, though no ids are theirs yet."""
        self._cached: dict[int, None] = {}  # in order of being given back, which is that of eviction

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, or was promised, and whose content is worth nothing."""
        return len(self._free) - self.num_promised

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds, but whose content is kept until the page is needed."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that can be taken: free and cached."""
        return len(self._free) - self.num_promised + len(self._cached)

    @property
    def num_live(self) -> int:
        """Pages held by at least one request; always num_pages - num_free - num_cached."""
        return self.num_pages - self.num_available

    @property
    def cached_pages(self) -> tuple[int, ...]:
        """The cached pages, the next to be evicted first."""
        return tuple(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def can_take(self, count: int) -> bool:
        """Whether `count` pages can be taken at once."""
        return count <= self.num_available

    def take(self, count: int) -> list[int]:
        """Take `count` pages, cached ones only when no other is free; all or, with `PagePoolError`, none."""
        free = self._free
        if count > len(free) - self.num_promised:
            if count > self.num_available:
                raise PagePoolError(f"{count} pages asked for, {self.num_available} of {self.num_pages} free or cached")
            while count > self.num_free:
                page = next(iter(self._cached))
                self.num_evictions += 1
                self.forget(page)
        rest = len(free) - count
        taken = free[rest:]
        taken.reverse()
        del free[rest:]
        self._live.update(taken)
        return taken

    def grow(self, pages: list[int], count: int) -> bool:
        """Take `count` more pages for a page table; if that is impossible, return False and take none."""
        if count > self.num_available:
            return False
        pages += self.take(count)
        return True

    def move(self, pages: list[int], count: int) -> bool:  # noqa: ARG002
        """Exchange a run that can't grow for a longer one: pages that lie anywhere need no such thing."""
        return False

    def give_back(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page, the last first; a page without references is free, or cached if kept.

        Raises
        ------
        PagePoolError
            A page is not in the pool or is already free; nothing is given back then.
        """
        pages = list(pages)
        if not self._kept and not self._more_holders:  # as with most: they need not be looked at one by one
            unique = set(pages)
            if len(unique) == len(pages) and unique <= self._live:
                self._live -= unique
                self._set_free(pages[::-1])
                return
        for page, count in Counter(pages).items():
            if self.num_holders(page) < count:
                raise PagePoolError(f"page {page} given back more often than taken (pool of {self.num_pages})")
        freed = []
        for page in reversed(pages):
            if self._drop_holder(page):
                if page in self._kept:
                    self._cached[page] = None
                else:
                    freed.append(page)
        self._set_free(freed)

    def num_holders(self, page: int) -> int:
        """How many requests hold a page."""
        return 1 + self._more_holders.get(page, 0) if page in self._live else 0

    def _drop_holder(self, page: int) -> bool:
        """Take one holder from a live page; return whether it was the last."""
        if page not in self._more_holders:
            self._live.remove(page)
            return True
        self.num_shared -= 1
        self._more_holders[page] -= 1
        if not self._more_holders[page]:
            del self._more_holders[page]
        return False

    def _set_free(self, pages: list[int]) -> None:
        self._free += pages

    # ---- shared and kept pages -----------------------------------------------------------------------------------

    def count_cached(self, pages: Iterable[int]) -> int:
        """How many of `pages` are cached: sharing them makes that many fewer available."""
        return sum(page in self._cached for page in pages)

    def count_exclusive(self, pages: Iterable[int]) -> int:
        """How many pages have all their holders in `pages`, once each: giving these back makes so many available."""
        return sum(self.num_holders(page) == holders for page, holders in Counter(pages).items())

    def shared_first(self, pages: list[int]) -> list[int]:
        """Return the pages that are held more than once, of a page table: they are its first ones, a common prefix."""
        return pages[: bisect_left(pages, True, key=lambda page: page not in self._more_holders)]

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page, live or cached; `PagePoolError` for the first that is free."""
        for page in pages:
            self._require_content(page)
            if page in self._live:
                self.num_shared += 1
                self._more_holders[page] = self._more_holders.get(page, 0) + 1
            else:
                del self._cached[page]
                self._live.add(page)

    def keep(self, page: int) -> None:
        """Keep the content of a live page after its last reference is dropped, for as long as memory lasts."""
        self._require_content(page)
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Keep the content of a page no longer: a cached page is free from now on. Others are left alone."""
        if page not in self._kept:
            return
        self.on_evict(page)  # first, so that an interrupt leaves no one who believes in its content
        self._kept.remove(page)
        if page in self._cached:
            del self._cached[page]
            self._set_free([page])

    def _require_content(self, page: int) -> None:
        if page not in self._live and page not in self._cached:
            raise PagePoolError(f"page {page} is neither live nor cached (pool of {self.num_pages})")

    def check(self) -> None:
        """Raise `PagePoolError` unless free, cached and live pages make up the whole pool, each once."""
        free, live = set(self._free), self._live
        states = [*self._free, *self._cached, *live]
        consistent = self._cached.keys() == self._kept - live and free.isdisjoint(self._kept)
        consistent = consistent and self._more_holders.keys() <= live
        if (
            not consistent
            or sorted(states) != list(range(self.num_pages))
            or len(live) != self.num_live - self.num_promised
            or self.num_shared != sum(self._more_holders.values())
        ):
            raise PagePoolError(
                f"page accounting broken: {self.num_free} free + {self.num_cached} cached + {len(live)} live "
                f"of {self.num_pages}, {self.num_shared} shared"
            )
