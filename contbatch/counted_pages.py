"""Pages that are counted and have no ids: for a simulation in which nobody asks which pages a request has."""

from collections.abc import Iterable

from contbatch.errors import PagePoolError
from contbatch.pages import PagePool

UNNAMED = -1
"""Stands in page tables for each page."""


class CountedPool(PagePool):
    """A page pool that knows how many pages are free, not which; nobody shares them and nothing is kept in them.

    Parameters
    ----------
    num_pages, page_size : int
        As of `PagePool`.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._free = []
        self._num_not_taken = num_pages

    @property
    def num_free(self) -> int:  # noqa: D102
        return self._num_not_taken - self.num_promised

    @property
    def num_available(self) -> int:  # noqa: D102
        return self._num_not_taken - self.num_promised  # nothing is cached

    def take(self, count: int) -> list[int]:
        """Take `count` pages; all or, with `PagePoolError`, none."""
        if count > self._num_not_taken - self.num_promised:
            raise PagePoolError(f"{count} pages asked for, {self.num_free} of {self.num_pages} free")
        self._num_not_taken -= count
        return [UNNAMED] * count

    def give_back(self, pages: Iterable[int]) -> None:
        """Give pages back; `PagePoolError`, and none is, if these are more than were taken."""
        count = len(list(pages))
        if self._num_not_taken + count > self.num_pages:
            taken = self.num_pages - self._num_not_taken
            raise PagePoolError(f"{count} pages given back, {taken} of {self.num_pages} taken")
        self._num_not_taken += count

    def count_exclusive(self, pages: Iterable[int]) -> int:
        """How many pages have all their holders in `pages`: all of them."""
        return len(list(pages))

    def num_holders(self, page: int) -> int:
        """Raise `PagePoolError`: pages can't be told apart."""
        raise PagePoolError(f"page {page} of a pool that is counted only has no id")

    def share(self, pages: Iterable[int]) -> None:
        """Raise `PagePoolError` for any page: pages can't be told apart."""
        for page in pages:
            self.num_holders(page)

    def keep(self, page: int) -> None:
        """Raise `PagePoolError`: pages can't be told apart."""
        self.num_holders(page)

    def check(self) -> None:
        """Raise `PagePoolError` unless the free pages are no more than there are, and those promised are among them."""
        if not 0 <= self.num_promised <= self._num_not_taken <= self.num_pages:
            counts = f"{self._num_not_taken} of {self.num_pages} not taken, {self.num_promised} of these promised"
            raise PagePoolError(f"page accounting broken: {counts}")
