"""Contiguous memory, as before paging: whoever is admitted takes one run of neighbouring pages, by first fit.

    addresses   0  1  2  3  4  5  6  7  8  9
                A  A  A  .  .  B  B  .  .  .       free runs (3, 2) and (7, 3): five pages are free,
                                                   yet nobody who needs four can be admitted

A page is a slot of `page_size` tokens; with `page_size=1` this is the memory of FasterTransformer and Orca as the paper
on vLLM draws it (Kwon et al., SOSP 2023, figures 2 and 3). First fit and coalescing: Knuth, The Art of Computer
Programming, vol. 1, section 2.5.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

from contbatch.checks import is_one_of, require
from contbatch.errors import PagePoolError
from contbatch.pages import PagePool

LAYOUTS = ("paged", "contiguous")


class FreeRuns:
    """The free addresses of a range, as runs in order of address, none of which touches the next.

    Parameters
    ----------
    size : int
        Addresses 0..size-1, all free at first.
    """

    def __init__(self, size: int) -> None:
        self._starts, self._lengths = [0], [size]
        self._num_free = size

    def __len__(self) -> int:
        return self._num_free

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of each run."""
        return zip(self._starts, self._lengths, strict=True)

    def first_fit(self, count: int) -> int | None:
        """Return the lowest address at which a run of at least `count` begins; None if there is none."""
        return next((start for start, length in self if length >= count), None)

    def take(self, start: int, count: int) -> bool:
        """Take the addresses start..start+count-1; False, and none, unless all of them are free."""
        at = bisect_right(self._starts, start) - 1
        before = start - self._starts[at] if at >= 0 else 0
        if at < 0 or self._lengths[at] < before + count:
            return False
        after = self._lengths[at] - before - count
        rest = [(first, n) for first, n in ((self._starts[at], before), (start + count, after)) if n]
        self._starts[at : at + 1] = [first for first, _ in rest]
        self._lengths[at : at + 1] = [n for _, n in rest]
        self._num_free -= count
        return True

    def free(self, address: int) -> None:
        """Free a taken address; runs that come to touch become one."""
        at = bisect_left(self._starts, address)
        self._starts.insert(at, address)
        self._lengths.insert(at, 1)
        self._num_free += 1
        for left in (at, at - 1):  # with the run after it, then with the one before
            if 0 <= left < len(self._starts) - 1 and self._starts[left] + self._lengths[left] == self._starts[left + 1]:
                self._lengths[left] += self._lengths.pop(left + 1)
                del self._starts[left + 1]


class ContiguousPool(PagePool):
    """A page pool that hands out runs of neighbouring pages only; nobody shares them and nothing is kept in them.

    Parameters
    ----------
    num_pages, page_size : int
        As of `PagePool`.
    """

    layout = "contiguous"

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.free_runs = FreeRuns(num_pages)
        self._free = []  # free_runs has them

    @property
    def num_free(self) -> int:  # noqa: D102
        return len(self.free_runs)

    @property
    def num_available(self) -> int:  # noqa: D102
        return len(self.free_runs)  # nothing is cached

    def can_take(self, count: int) -> bool:
        """Whether a run of `count` pages is free: false also when enough are free, but not side by side."""
        return count == 0 or self.free_runs.first_fit(count) is not None

    def take(self, count: int) -> list[int]:
        """Take the run of `count` pages with the lowest address; all or, with `PagePoolError`, none."""
        if not count:
            return []
        start = self.free_runs.first_fit(count)
        taken = None if start is None else self._take_at(start, count)
        if taken is None:
            longest = max((length for _, length in self.free_runs), default=0)
            raise PagePoolError(
                f"{count} neighbouring pages asked for, the longest run has {longest} of the {self.num_free} free"
            )
        return taken

    def grow(self, pages: list[int], count: int) -> bool:
        """Take the `count` pages after the end of a run; if they are not free, return False and take none."""
        if (more := self._take_at(pages[-1] + 1, count)) is None:
            return False
        pages += more
        return True

    def move(self, pages: list[int], count: int) -> bool:
        """Exchange a run for one of `count` pages, which may overlap it; if there is none, return False and keep it."""
        old = list(pages)
        self.give_back(old)
        start = self.free_runs.first_fit(count)
        pages[:] = (self._take_at(old[0], len(old)) if start is None else self._take_at(start, count)) or []
        return start is not None

    def share(self, pages: Iterable[int]) -> None:
        """Raise `PagePoolError` for any page: a run has one holder."""
        for page in pages:
            raise PagePoolError(f"page {page} belongs to a contiguous run, which can't be shared")

    def keep(self, page: int) -> None:
        """Raise `PagePoolError`: nothing outlives its holder here."""
        raise PagePoolError(f"page {page} belongs to a contiguous run, whose content is not kept")

    def check(self) -> None:
        """Raise `PagePoolError` unless the free runs are apart, in order, and exactly the pages that nobody holds."""
        runs = list(self.free_runs)
        free = [page for start, length in runs for page in range(start, start + length)]
        apart = all(start + length < after for (start, length), (after, _) in pairwise(runs))
        if not apart or free != sorted({*range(self.num_pages)} - self._live):
            raise PagePoolError(f"page accounting broken: free runs {runs} of {self.num_pages} pages")
        if len(free) != self.num_free or self._more_holders:
            raise PagePoolError(f"page accounting broken: {len(free)} pages are free, {self.num_free} counted")

    def _take_at(self, start: int, count: int) -> list[int] | None:
        if not self.free_runs.take(start, count):
            return None
        self._live.update(range(start, start + count))
        return list(range(start, start + count))

    def _set_free(self, pages: list[int]) -> None:
        for page in pages:
            self.free_runs.free(page)


def make_pool(layout: str, num_pages: int, page_size: int, shared: bool) -> PagePool:
    """Make the pool of a layout, "paged" or "contiguous".

    Raises
    ------
    InvalidRequestError
        Another layout, or contiguous pages that shall be shared.
    """
    require(is_one_of(layout, LAYOUTS), "layout", layout, "'paged' or 'contiguous'")
    require(layout == "paged" or not shared, "prefix_cache", shared, "False with layout 'contiguous'")
    return (ContiguousPool if layout == "contiguous" else PagePool)(num_pages, page_size)
