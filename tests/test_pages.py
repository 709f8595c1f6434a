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
    lost, double = PagePool(2, 1), PagePool(2, 1)
    lost._free.pop()
    double._counts[0] = 1
    for pool in (lost, double):
        with pytest.raises(PagePoolError, match="accounting"):
            pool.check()


class Pool(RuleBasedStateMachine):
    """Taking and giving back, against a set of page ids."""

    def __init__(self):
        super().__init__()
        self.pool, self.mine = PagePool(5, 2), []

    @rule(count=st.integers(0, 6))
    def take(self, count):
        if count > 5 - len(self.mine):
            with pytest.raises(PagePoolError):
                self.pool.take(count)
        else:
            taken = self.pool.take(count)
            assert len(taken) == count
            self.mine += taken

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def give_back(self, data):
        some = data.draw(st.lists(st.sampled_from(self.mine), unique=True))
        self.pool.give_back(some)
        self.mine = [page for page in self.mine if page not in some]

    @invariant()
    def every_page_is_once_somewhere(self):
        self.pool.check()
        assert len(set(self.mine)) == len(self.mine) == self.pool.num_live == 5 - self.pool.num_free
        assert set(self.mine) <= set(range(5))


TestPool = Pool.TestCase
