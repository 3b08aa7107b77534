"""The pool of KV pages: who is free, who is held how often, who is idle in the prefix cache.

A page is free, held (by one or more requests) or idle (nobody holds it, the prefix cache names it): free + held + idle =
all. Page 0 is the dummy page: never handed out and outside the count. An idle page is taken back, the longest idle first,
when no page is free, so whatever is free or idle is available.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable


class PagePool:
    """Pages 1 to num_pages - 1. `reclaim(page)` must `drop` an idle page; the prefix cache sets it."""

    def __init__(self, num_pages: int):
        self.num_usable = num_pages - 1
        self.free = list(range(num_pages - 1, 0, -1))
        self.refs = [0] * num_pages
        self.cached: set[int] = set()  # pages that the prefix cache names, held or idle
        self.idle: OrderedDict[int, None] = OrderedDict()  # the longest idle first
        self.reclaim: Callable[[int], None] = self.drop

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.idle)

    def take(self) -> int:
        """A page for one holder. Its content is rubbish. There must be one available."""
        if not self.free:
            self.reclaim(next(iter(self.idle)))
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a held or idle page."""
        if self.refs[page] == 0:
            del self.idle[page]
        self.refs[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one leaves the page idle if it is cached, else free."""
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if page in self.cached:
                self.idle[page] = None
            else:
                self.free.append(page)

    def keep(self, page: int) -> None:
        """The prefix cache names this held page from now on."""
        assert self.refs[page] > 0 and page not in self.cached
        self.cached.add(page)

    def drop(self, page: int) -> None:
        """The prefix cache names this page no longer."""
        self.cached.remove(page)
        if self.refs[page] == 0:
            del self.idle[page]
            self.free.append(page)

    def touch(self, page: int) -> None:
        """An idle page counts as used just now."""
        if page in self.idle:
            self.idle.move_to_end(page)

    def check(self, held: Iterable[int]) -> None:
        """The conservation law. held: every holder's pages, a page as often as it is held."""
        counts = Counter(held)
        assert {page: refs for page, refs in enumerate(self.refs) if refs} == counts, "refcounts differ from the tables"
        assert len(self.free) + len(counts) + len(self.idle) == self.num_usable, "free + held + idle is not all"
        assert len({0, *self.free, *counts, *self.idle}) == self.num_usable + 1, "a page is in two places"
        assert self.cached - counts.keys() == self.idle.keys(), "idle pages are not the cached pages nobody holds"
