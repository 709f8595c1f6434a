"""Pages in host memory, for requests that wait with what they have computed."""

from collections.abc import Iterable

from contbatch.checks import is_int, python_number, require
from contbatch.errors import PagePoolError
from contbatch.pages import MAX_PAGES


class SwapSpace:
    """A fixed number of host pages, each as large as a device page. A request has its host pages for itself.

    Parameters
    ----------
    num_pages : int
        Host pages, in [0, `MAX_PAGES`].
    """

    def __init__(self, num_pages: int) -> None:
        num_pages = python_number(num_pages)
        require(is_int(num_pages, 0, MAX_PAGES), "num_host_pages", num_pages, f"an integer in [0, {MAX_PAGES}]")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Host pages that nobody has."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` pages; if fewer are free, none."""
        if count > len(self._free):
            return []
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Free pages taken before; the list is empty afterwards."""
        self._free += pages
        pages.clear()

    def check(self, held: Iterable[int]) -> None:
        """Raise `PagePoolError` unless the free pages and those `held` by requests are all pages, each once."""
        held = list(held)
        if sorted([*self._free, *held]) != list(range(self.num_pages)):
            raise PagePoolError(
                f"host page accounting broken: {self.num_free} free + {len(held)} held of {self.num_pages}"
            )
