"""The prefix cache's rules: what is a hit, what stays, what goes first. Pages of 128 tokens, made by hand."""

import pytest

from simplellm.config import PAGE
from simplellm.engine.pages import PagePool
from simplellm.engine.prefix_cache import Node, PrefixCache
from simplellm.engine.sequence import Request
from simplellm.request import Sampling


def page(letter: str) -> list[int]:
    return [ord(letter)] * PAGE


def text(letters: str) -> list[int]:
    """A page of tokens for each letter, and one token more, which is always computed."""
    return [token for letter in letters for token in page(letter)] + [0]


class Cache:
    """A cache filled by hand: `put("abC")` caches three pages, those in capitals with their window pages."""

    def __init__(self, num_pages: int = 40):
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool)

    def put(self, letters: str, step: int = 0, salt: str = "", keep_held: bool = False) -> list[Node]:
        nodes: list[Node] = []
        held = []
        for letter in letters:
            full, window = self.pool.take(), self.pool.take() if letter.isupper() else None
            held += [full] if window is None else [full, window]
            parent = nodes[-1] if nodes else None
            nodes.append(self.cache.insert(salt, parent, page(letter.lower()), (full, window), step))
        if not keep_held:
            for one in reversed(held):
                self.pool.release(one)
            for node in reversed(nodes):
                self.cache.touch(node)
        return nodes

    def match(self, letters: str, step: int = 9, salt: str = "") -> tuple[int, bool]:
        return self.cache.match(salt, text(letters), [], step)

    def take(self, num: int) -> None:
        """Hold `num` pages for good."""
        for _ in range(num):
            self.pool.take()


def test_hit_is_the_longest_that_ends_with_a_window_page() -> None:
    cache = Cache()
    cache.put("aBcDe" + "F")
    assert [cache.match("abcdef"[:n])[0] for n in range(7)] == [0, 0, 2, 2, 4, 4, 6]
    assert cache.match("abxdef") == (2, False)
    assert cache.match("b") == (0, False), "the beginning counts, too"


def test_last_token_is_never_part_of_a_hit() -> None:
    cache = Cache()
    cache.put("AB")
    tokens = text("ab")
    assert cache.cache.match("", tokens[:-1], [], 9) == (1, False)
    assert cache.cache.match("", tokens, [], 9) == (2, False)


def test_salts_do_not_meet() -> None:
    cache = Cache()
    cache.put("A", salt="x")
    assert (cache.match("a", salt="x"), cache.match("a", salt="y")) == ((1, False), (0, False))


def test_page_cannot_be_read_in_the_step_that_writes_it() -> None:
    cache = Cache()
    cache.put("AB", step=5)
    assert cache.match("ab", step=5)[1], "it pays to wait"
    assert cache.match("ab", step=6) == (2, False)


def test_window_page_written_this_step_for_an_old_page_must_wait_too() -> None:
    cache = Cache()
    first, *_ = cache.put("abC", step=0)
    cache.cache.insert("", None, page("a"), (first.full, cache.pool.take()), 5)
    assert cache.match("a", step=5)[1]
    assert cache.match("a", step=6) == (1, False)


def test_path_is_resumed_and_survives_dropped_nodes() -> None:
    cache = Cache()
    nodes = cache.put("ABC", keep_held=True)
    path: list[Node] = []
    assert cache.cache.match("", text("abc"), path, 9) == (3, False)
    assert path == nodes
    cache.cache.reclaim(nodes[1].full)
    assert cache.cache.match("", text("abc"), path, 9) == (1, False)
    assert path == nodes[:1]


def test_known_page_is_not_cached_twice() -> None:
    cache = Cache()
    (node,) = cache.put("A")
    copy = cache.pool.take()
    assert cache.cache.insert("", None, page("a"), (copy, None), 3) is node
    assert node.full != copy and copy not in cache.pool.cached
    cache.cache.check()


def test_eviction_takes_the_end_of_a_chain_first_and_what_can_give_no_hit_with_it() -> None:
    cache = Cache(num_pages=9)
    cache.put("AbcD")  # 6 pages of 8
    cache.take(3)  # one of the six: the last window page; b, c and d are useless without it
    assert cache.match("abcd")[0] == 1
    assert len(cache.pool.free) == 3
    cache.cache.check()


def test_eviction_takes_the_least_recently_used_chain_first() -> None:
    cache = Cache(num_pages=9)
    cache.put("aB")
    cache.put("cD")
    path: list[Node] = []
    assert cache.cache.match("", text("ab"), path, 9)[0] == 2
    for node in path:  # used once more
        cache.pool.share(node.full)
    for node in reversed(path):
        cache.pool.release(node.full)
        cache.cache.touch(node)
    cache.take(3)
    assert (cache.match("ab")[0], cache.match("cd")[0]) == (2, 0)


def test_beginning_shared_by_two_chains_outlives_one_of_them() -> None:
    cache = Cache(num_pages=11)
    cache.put("aB")
    cache.put("aC")  # its own copy of a is free again
    cache.take(cache.pool.num_available - 3)
    assert (cache.match("ab")[0], cache.match("ac")[0]) == (0, 2)
    cache.cache.check()


def test_losing_a_page_takes_all_below_it_out_of_the_cache() -> None:
    """A page in the middle goes first only if a request built upon another's pages; its own stay its own."""
    cache = Cache()
    nodes = cache.put("aBC", keep_held=True)
    for node in nodes[1:]:
        assert cache.pool.refs[node.full] == 1
    held = [page for page, refs in enumerate(cache.pool.refs) if refs]
    cache.cache.reclaim(nodes[0].full)
    assert all(node.dropped for node in nodes) and not cache.cache.roots
    cache.pool.check(held)
    cache.cache.check()


def test_forgotten_salt_leaves_nothing() -> None:
    cache = Cache()
    cache.put("ABc" + "D", salt="x")
    cache.put("A", salt="y")
    cache.cache.forget_salt("x")
    assert list(cache.cache.roots) == ["y"]
    assert cache.pool.num_available == cache.pool.num_usable
    assert len(cache.pool.idle) == 2
    cache.cache.check()


@pytest.mark.parametrize(
    "num_prompt, retained", [(1000, {6, 7, 15}), (1024, {6, 7, 15}), (1025, {7, 15}), (300, {1, 7, 15}), (100, {7, 15})]
)
def test_window_pages_that_stay(num_prompt: int, retained: set[int]) -> None:
    """Every eighth, the prompt's last full page, and the one before where the last token is the page's last."""
    request = Request(0, tuple(range(num_prompt)), Sampling())
    assert {index for index in range(16) if request.retains(index)} == retained
