"""Which pages each request holds: its two page tables, and how pages enter and leave the prefix cache.

The tables themselves live on the device; what changes in them is appended to `updates` as PageUpdates.
"""

from __future__ import annotations

from collections.abc import Iterable

from simplellm.config import PAGE
from simplellm.engine.pages import PagePool
from simplellm.engine.prefix_cache import PrefixCache
from simplellm.engine.sequence import Request
from simplellm.request import PageUpdate


class Tables:
    """Hands pages to requests and takes them back."""

    def __init__(self, num_pages: int, sliding_window: int):
        assert 0 < sliding_window <= PAGE, "a hit needs the keys of one window page only"
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool)
        self.sliding_window = sliding_window

    def need(self, request: Request, num_hit: int) -> int:
        """Available pages that admitting it uses up: full ones for all known tokens, window ones to make progress."""
        num_full = num_pages(len(request.tokens))
        num_window = 1 if num_hit or num_full == 1 else 2
        hits = [node.full for node in request.nodes[:num_hit]]
        if num_hit:
            window = request.nodes[num_hit - 1].window
            assert window is not None
            hits.append(window)
        return num_full - num_hit + num_window + sum(self.pool.refs[page] == 0 for page in hits)

    def start(self, request: Request, num_hit: int, updates: list[PageUpdate]) -> None:
        """Share the pages of a hit, take the other full pages of all known tokens."""
        del request.nodes[num_hit:]
        for index, node in enumerate(request.nodes):
            self.pool.share(node.full)
            request.full.append(node.full)
            updates.append(PageUpdate(request.row, False, index, node.full))
        request.window_start = max(num_hit - 1, 0)
        if num_hit:
            window = request.nodes[-1].window
            assert window is not None
            self.pool.share(window)
            request.window.append(window)
            updates.append(PageUpdate(request.row, True, num_hit - 1, window))
        self.take_full(request, len(request.tokens), updates)

    def take_full(self, request: Request, end: int, updates: list[PageUpdate]) -> None:
        """Full pages for all positions below `end`."""
        for index in range(len(request.full), num_pages(end)):
            request.full.append(self.pool.take())
            updates.append(PageUpdate(request.row, False, index, request.full[-1]))

    def take_window(self, request: Request, end: int, updates: list[PageUpdate]) -> None:
        """Window pages for the positions below `end` that have none yet."""
        for index in range(request.window_start + len(request.window), num_pages(end)):
            request.window.append(self.pool.take())
            updates.append(PageUpdate(request.row, True, index, request.window[-1]))

    def register(self, request: Request, end: int, step: int) -> None:
        """Name the full pages below position `end`, written by plans up to `step`, in the prefix cache.

        All their tokens must be known. So no page with the KV of a discarded token is ever named: such a token was drawn on
        the device and never became known. Whatever is still in flight writes known tokens, each at its place.
        """
        if request.salt is None:
            return
        nodes = request.nodes
        if nodes and nodes[-1].dropped:  # a page of another request that it built upon was taken back
            nodes.clear()
        for index in range(len(nodes), end // PAGE):
            tokens = request.tokens[index * PAGE : (index + 1) * PAGE]
            pages = (request.full[index], request.window_page(index))
            nodes.append(self.cache.insert(request.salt, nodes[-1] if nodes else None, tokens, pages, step))

    def drop_windows(self, request: Request, first: int, last_known: int = -1) -> None:
        """Give back window pages below page `first`. Those to retain, and the one at page `last_known`, stay cached."""
        num = max(first - request.window_start, 0)
        for index, page in enumerate(request.window[:num], request.window_start):
            node = request.nodes[index] if index < len(request.nodes) else None
            stays = request.retains(index) or index == last_known
            if node is not None and node.window == page and not (stays or node.wanted):
                self.cache.forget_window(node)
            self.pool.release(page)
        del request.window[:num]
        request.window_start += num

    def drop_unseen(self, request: Request) -> None:
        """Give back the window pages that no query at or after `computed` can see."""
        self.drop_windows(request, max(request.computed - self.sliding_window + 1, 0) // PAGE)

    def release(self, request: Request, step: int) -> None:
        """Give back all its pages. Its known full pages stay cached, the last one with its window page."""
        known = min(request.planned, len(request.tokens))
        self.register(request, known, step)
        self.drop_windows(request, request.window_start + len(request.window), known // PAGE - 1)
        for index in range(len(request.full) - 1, -1, -1):  # so the end of a chain is taken back first
            self.pool.release(request.full[index])
            if index < len(request.nodes):
                self.cache.touch(request.nodes[index])
        request.full, request.nodes, request.window_start = [], [], 0

    def audit(self, running: Iterable[Request]) -> None:
        """Raise AssertionError unless pool, cache and `running`, the holders of all pages, agree."""
        held = []
        for request in running:
            held += request.full + request.window
            assert len(request.full) * PAGE >= request.planned, "a planned position has no full page"
            assert (request.window_start + len(request.window)) * PAGE >= request.planned, "nor a window page"
            seen = max(request.computed - self.sliding_window + 1, 0) // PAGE
            assert request.window_start <= seen or request.computed == 0, "a window page was given back too early"
        self.pool.check(held)
        self.cache.check()


def num_pages(num_tokens: int) -> int:
    """Pages that so many tokens take."""
    return (num_tokens + PAGE - 1) // PAGE
