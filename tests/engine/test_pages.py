"""The page pool: order of taking back, refcounts, the conservation law."""

import pytest

from simplellm.engine.pages import PagePool


def test_hands_out_every_page_but_the_dummy() -> None:
    pool = PagePool(5)
    pages = [pool.take() for _ in range(4)]
    assert sorted(pages) == [1, 2, 3, 4]
    assert pool.num_available == 0
    pool.check(pages)


def test_page_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = PagePool(3)
    page = pool.take()
    pool.share(page)
    pool.release(page)
    assert pool.num_available == 1
    pool.check([page])
    pool.release(page)
    assert pool.num_available == 2
    pool.check([])


def test_cached_page_stays_idle_and_the_longest_idle_goes_first() -> None:
    pool = PagePool(4)
    taken = []
    pool.reclaim = lambda page: (taken.append(page), pool.drop(page))[0]
    pages = [pool.take() for _ in range(3)]
    for page in pages:
        pool.keep(page)
        pool.release(page)
    assert (pool.num_available, pool.free) == (3, [])
    pool.touch(pages[0])
    pool.share(pages[1])  # held again: not to be taken
    assert [pool.take(), pool.take()] == taken == [pages[2], pages[0]]
    pool.check(pages)


def test_free_pages_are_taken_before_idle_ones() -> None:
    pool = PagePool(3)
    first = pool.take()
    pool.keep(first)
    pool.release(first)
    assert pool.take() != first
    assert list(pool.idle) == [first]


def test_page_dropped_while_held_becomes_free_at_its_release() -> None:
    pool = PagePool(3)
    page = pool.take()
    pool.keep(page)
    pool.drop(page)
    pool.check([page])
    pool.release(page)
    assert page in pool.free and not pool.idle


def test_check_finds_a_lost_page_and_a_wrong_refcount() -> None:
    pool = PagePool(4)
    page = pool.take()
    with pytest.raises(AssertionError, match="refcounts"):
        pool.check([page, page])
    pool.free.pop()
    with pytest.raises(AssertionError, match="not all"):
        pool.check([page])
