"""The prefix cache: a tree of full pages in the pool of all pages, found by salt and tokens.

A node is a page of PAGE tokens after those of its parent; the tokens themselves are the key, so there are no collisions. It
names a full page and perhaps a window page. A hit of n tokens needs n/PAGE nodes from the root, the last one with its window
page. A node that nobody holds, with neither a window page nor children, can never give a hit and is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from simplellm.config import PAGE
from simplellm.engine.pages import PagePool


class Node:
    """One cached page. A root has no page and the salt for its key."""

    __slots__ = ("parent", "key", "full", "window", "children", "step", "wanted")

    def __init__(self, parent: Node | None, key: Hashable, full: int, step: int):
        self.parent, self.key, self.full, self.step = parent, key, full, step
        self.window: int | None = None
        self.children: dict[Hashable, Node] = {}
        self.wanted = False  # a prompt branched off here in vain: next time, let the window page stay

    @property
    def dropped(self) -> bool:
        return self.full == 0 and self.parent is not None


class PrefixCache:
    """Names pages of `pool`; gives them back when the pool asks."""

    def __init__(self, pool: PagePool):
        self.pool = pool
        pool.reclaim = self.reclaim
        self.roots: dict[Hashable, Node] = {}
        self.owner: dict[int, Node] = {}  # of every cached page, full or window
        self.num_queried = 0  # prompt tokens of admitted requests
        self.num_hit = 0  # those of them that were found

    def match(self, salt: Hashable, tokens: Sequence[int], path: list[Node], step: int) -> tuple[int, bool]:
        """Extend `path`, what an earlier call found, to the longest chain of nodes for `tokens`.

        Returns the number of pages of the longest hit, and whether it pays to ask again at the next step, because the
        step being planned writes a page on the way: pages can be read from the step after the one that writes them.
        """
        while path and path[-1].dropped:  # with a node goes all that is below it, so what remains is whole
            path.pop()
        node = path[-1] if path else self.roots.get(salt)
        last = (len(tokens) - 1) // PAGE  # the last token is always computed
        while node is not None and len(path) < last:
            at = len(path) * PAGE
            node = node.children.get(tuple(tokens[at : at + PAGE]))
            if node is not None:
                path.append(node)
        num = len(path)
        while num and path[num - 1].window is None:
            num -= 1
        if path and step in (path[-1].step, path[num - 1].step if num else -1):
            return num, True
        if num < len(path):
            path[-1].wanted = True
        return num, False

    def insert(
        self, salt: Hashable, parent: Node | None, tokens: Sequence[int], pages: tuple[int, int | None], step: int
    ) -> Node:
        """The node for PAGE `tokens` after `parent` (None: at the root); pages (full, window) are taken where it lacks them.

        A request that computed a page which is known already keeps its own copy for itself.
        """
        parent = parent or self.roots.setdefault(salt, Node(None, salt, 0, -1))
        full, window = pages
        key = tuple(tokens)
        assert len(key) == PAGE, "a page with unknown tokens"
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, full, step)
            self._name(node, full)
        if node.window is None and window is not None:
            node.window, node.step = window, step
            self._name(node, window)
        return node

    def forget_window(self, node: Node) -> None:
        """The node's window page is no longer cached."""
        if node.window is not None:
            page, node.window = node.window, None
            self._unname(page)
            self.trim(node)

    def touch(self, node: Node) -> None:
        """A request just let go of this node, and of those below it before."""
        if node.window is not None:
            self.pool.touch(node.window)
        self.pool.touch(node.full)
        self.trim(node)

    def trim(self, node: Node) -> None:
        """Drop the node, then those above it, while they can give no hit and nobody holds them."""
        while node.full and node.window is None and not node.children and self.pool.refs[node.full] == 0:
            assert node.parent is not None
            self._drop(node)
            node = node.parent

    def reclaim(self, page: int) -> None:
        """Give up an idle page: a window page alone, a full page with all that is below it (idle longer, or private now)."""
        node = self.owner[page]
        if page == node.window:
            self.forget_window(node)
        else:
            self._drop(node)
            assert node.parent is not None
            self.trim(node.parent)

    def forget_salt(self, salt: Hashable) -> None:
        """Drop everything below a root."""
        for child in list(self.roots[salt].children.values()) if salt in self.roots else ():
            self._drop(child)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Names and pages agree, and no node is left that can give no hit."""
        pages: dict[int, Node] = {}
        for node in self.nodes():
            named = [node.full] if node.window is None else [node.full, node.window]
            assert 0 not in named and not set(named) & pages.keys(), "a page is cached twice"
            pages.update(dict.fromkeys(named, node))
            assert node.children or node.window is not None or self.pool.refs[node.full], "a useless node is left"
        assert pages == self.owner and pages.keys() == self.pool.cached, "the cache and the pool name different pages"
        assert all(root.children for root in self.roots.values()), "an empty root is left"

    def _name(self, node: Node, page: int) -> None:
        self.owner[page] = node
        self.pool.keep(page)

    def _unname(self, page: int) -> None:
        del self.owner[page]
        self.pool.drop(page)

    def _drop(self, top: Node) -> None:
        """Unname a node's pages and those of all below it."""
        parent = top.parent
        assert parent is not None
        del parent.children[top.key]
        if parent.parent is None and not parent.children:
            del self.roots[parent.key]
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.children = {}
            self._unname(node.full)
            node.full = 0
            if node.window is not None:
                self._unname(node.window)
                node.window = None
