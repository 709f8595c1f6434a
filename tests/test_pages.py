import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contbatch.errors import InvalidRequestError, PagePoolError
from contbatch.pages import PagePool


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, None, "4"])
def test_sizes_are_positive_integers(bad):
    with pytest.raises(InvalidRequestError, match="num_pages"):
        PagePool(bad, 16)
    with pytest.raises(InvalidRequestError, match="page_size"):
        PagePool(4, bad)


@given(st.integers(0, 10**6), st.integers(1, 300))
def test_pages_for_is_the_least_that_hold_the_tokens(num_tokens, page_size):
    pages = PagePool(1, page_size).pages_for(num_tokens)
    assert (pages - 1) * page_size < num_tokens <= pages * page_size


def test_take_all_or_none():
    pool = PagePool(3, 4)
    assert sorted(pool.take(2)) == [0, 1]
    with pytest.raises(PagePoolError, match="2 pages asked for, 1 of 3 free"):
        pool.take(2)
    assert (pool.num_free, pool.num_live) == (1, 2)
    assert pool.take(0) == []


def test_the_page_freed_last_is_taken_first():
    pool = PagePool(4, 4)
    pages = pool.take(4)
    pool.give_back([pages[2]])
    pool.give_back([pages[0], pages[3]])
    assert pool.take(3) == [pages[0], pages[3], pages[2]]


@pytest.mark.parametrize("bad", [[0, 0], [0, 2], [3], [-1], [0, 1, 0]])
def test_giving_back_twice_or_foreign_pages_changes_nothing(bad):
    pool = PagePool(3, 4)
    pool.take(2)
    with pytest.raises(PagePoolError, match="more often than taken"):
        pool.give_back(bad)
    assert (pool.num_free, pool.num_live) == (1, 2)
    pool.check()


def test_the_last_page_freed_twice():
    pool = PagePool(4, 4)
    [page] = pool.take(1)
    pool.give_back([page])
    with pytest.raises(PagePoolError, match=f"page {page}"):
        pool.give_back([page])
    pool.check()
    assert pool.num_free == 4


def test_check_sees_a_lost_page_and_a_page_that_is_free_and_live():
    lost, double, cached, live = PagePool(2, 1), PagePool(2, 1), cached_pool(1), cached_pool(1)
    lost._free.pop()
    double._live.add(0)
    cached._kept.clear()
    live._cached.clear()
    for pool in (lost, double, cached, live):
        with pytest.raises(PagePoolError, match="accounting"):
            pool.check()


def cached_pool(*pages):
    """A pool of 3 pages, of which `pages` have been given back in this order and are cached."""
    pool = PagePool(3, 4)
    pool.take(3)
    for page in pages:
        pool.keep(page)
        pool.give_back([page])
    return pool


def test_cached_pages_are_taken_last_and_the_least_recently_held_first():
    pool, lost = cached_pool(1, 0), []
    pool.on_evict = lost.append
    pool.give_back([2])
    assert (pool.num_free, pool.num_cached, pool.num_live, pool.num_available) == (1, 2, 0, 3)
    assert [pool.take(1), pool.take(1), lost] == [[2], [1], [1]]
    pool.share([0])
    assert pool.num_available == 0
    with pytest.raises(PagePoolError, match="1 pages asked for, 0 of 3 free or cached"):
        pool.take(1)
    pool.give_back([0])
    assert [pool.take(1), lost, pool.num_evictions] == [[0], [1, 0], 2]


def test_the_end_of_a_page_table_is_evicted_before_its_beginning():
    pool = PagePool(3, 4)
    table = pool.take(3)
    for page in table:
        pool.keep(page)
    pool.give_back(table)
    assert [pool.take(1)[0] for _ in table] == table[::-1]


def test_pages_that_nobody_holds_can_be_shared_only_while_cached():
    pool = cached_pool(1)
    pool.forget(1)
    assert (pool.num_free, pool.num_cached, pool.num_evictions) == (1, 0, 0)
    for call in (pool.keep, lambda page: pool.share([page])):
        for page in (1, 3, -1):
            with pytest.raises(PagePoolError, match=f"page {page} is neither live nor cached"):
                call(page)
    pool.forget(1)
    pool.check()


class Pool(RuleBasedStateMachine):
    """Taking, sharing, keeping and giving back, against lists of page ids."""

    def __init__(self):
        super().__init__()
        self.pool, self.mine = PagePool(5, 2), []
        self.kept, self.cached, self.evicted = set(), [], []
        self.pool.on_evict = self.evicted.append

    @rule(count=st.integers(0, 6))
    def take(self, count):
        if count > 5 - len(set(self.mine)):
            with pytest.raises(PagePoolError):
                self.pool.take(count)
        else:
            lost = max(0, count - (5 - len(set(self.mine)) - len(self.cached)))
            taken = self.pool.take(count)
            assert len(set(taken) - set(self.mine)) == count
            self.mine += taken
            assert self.evicted == self.cached[:lost]
            self.lose(self.cached[:lost])

    def lose(self, pages):
        self.kept -= set(pages)
        self.cached = [page for page in self.cached if page not in pages]
        self.evicted.clear()

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def give_back(self, data):
        some = data.draw(st.lists(st.sampled_from(self.mine), unique=True))
        self.pool.give_back(some)
        for page in reversed(some):
            self.mine.remove(page)
            if page in self.kept and page not in self.mine:
                self.cached.append(page)

    @precondition(lambda self: self.mine or self.cached)
    @rule(data=st.data())
    def share(self, data):
        some = data.draw(st.lists(st.sampled_from(sorted({*self.mine, *self.cached})), unique=True))
        assert self.pool.count_cached(some) == len(set(some) & set(self.cached))
        self.pool.share(some)
        self.mine += some
        self.cached = [page for page in self.cached if page not in some]

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def keep(self, data):
        page = data.draw(st.sampled_from(self.mine))
        self.pool.keep(page)
        self.kept.add(page)

    @rule(page=st.integers(0, 4))
    def forget(self, page):
        self.pool.forget(page)
        assert self.evicted == [page] * (page in self.kept)
        self.lose([page])

    @invariant()
    def every_page_is_once_somewhere(self):
        self.pool.check()
        live = set(self.mine)
        assert (self.pool.num_live, self.pool.num_cached) == (len(live), len(self.cached))
        assert self.pool.num_free == 5 - len(live) - len(self.cached)
        assert live | set(self.cached) <= set(range(5))


TestPool = Pool.TestCase
