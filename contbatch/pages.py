"""Page ids and who holds them. No memory here: a page is an integer, a runner owns the bytes behind it.

    page ids    0   1   2   3   4   5        page_size tokens of keys and values each
    counts      1   0   2   1   0   1        0: free, 1: one request's, 2: shared
    request A  [0, 2, 5]                     its page table: token t lies in page table[t // page_size],
    request B  [3, 2]                        slot t % page_size

After PagedAttention (Kwon et al., SOSP 2023, section 4.2), whose "block" is a page here.
"""

from collections import Counter
from collections.abc import Iterable

from contbatch.checks import require_counts
from contbatch.errors import PagePoolError


class PagePool:
    """A fixed number of equal pages, handed out by reference count.

    Parameters
    ----------
    num_pages : int
        Pages in the pool, ≥ 1.
    page_size : int
        Tokens in a page, ≥ 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        require_counts(num_pages=num_pages, page_size=page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last, still in caches, goes first

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_live(self) -> int:
        """Pages held by at least one request; always num_pages - num_free."""
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Take `count` free pages; all or, with `PagePoolError`, none."""
        if count > len(self._free):
            raise PagePoolError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._counts[page] = 1
        return taken

    def give_back(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page; a page without references is free again.

        Raises
        ------
        PagePoolError
            A page is not in the pool or is already free; nothing is given back then.
        """
        pages = list(pages)
        for page, count in Counter(pages).items():
            if not 0 <= page < self.num_pages or self._counts[page] < count:
                raise PagePoolError(f"page {page} given back more often than taken (pool of {self.num_pages})")
        for page in reversed(pages):
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free.append(page)

    def check(self) -> None:
        """Raise `PagePoolError` unless free and live pages make up the whole pool, each once."""
        free = set(self._free)
        consistent = len(free) == len(self._free) and all((p in free) == (c == 0) for p, c in enumerate(self._counts))
        if not consistent or self.num_free + self.num_live != self.num_pages:
            raise PagePoolError(f"page accounting broken: {len(self._free)} free of {self.num_pages}")
