"""A request's state: what is known of its tokens, how far it is planned and computed, which row and pages it has.

The caller fills the first fields; the rest is the scheduler's, to be read but not written by others.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from simplellm.config import PAGE
from simplellm.engine.prefix_cache import Node
from simplellm.request import Sampling

RETAINED_EVERY = 8  # every eighth page's window page stays cached


@dataclass(slots=True, eq=False)
class Request:
    """One answer being generated. Positions: a token at index i of `tokens` has its KV at position i."""

    rid: int
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int = 0
    priority: int = 0  # the lower runs first
    cache_salt: str = ""  # only requests with the same salt share pages
    group: int | None = None  # the same for the n answers to one prompt
    rules: Any = None  # what its answer may be, in terms of whoever makes constraints of them; None: anything

    arrival: int = 0  # orders requests of one priority
    limit: int = 0  # tokens, prompt included, that it ends with at the latest
    stops: frozenset[int] = frozenset()  # tokens that end it
    salt: Hashable | None = None  # of its prefix chain; None: shares nothing
    tokens: list[int] = field(default_factory=list)  # the prompt and what is known of the answer
    planned: int = 0  # positions below are planned
    computed: int = 0  # positions below are committed
    scored: int = 0  # prompt tokens whose log-probability was given out, not counting the first, which has none
    cached_tokens: int = 0  # found in the prefix cache when first admitted
    admitted_at: float | None = None  # time.monotonic() of the first admission
    row: int = -1  # -1: not running
    penalty_slot: int | None = None
    full: list[int] = field(default_factory=list)  # pages of the full-attention layers, from position 0
    window: list[int] = field(default_factory=list)  # pages of the window layers, from page index `window_start`
    window_start: int = 0
    nodes: list[Node] = field(default_factory=list)  # prefix cache entries of its first pages
    decoding: bool = False  # all tokens but the last drawn one are planned, so the next span has one token
    smooth: int = 0  # while planned < smooth, the next span needs neither pages nor thought
    due: int = 0  # while computed < due, a commit frees nothing and ends nothing but by a stop token
    deferred: bool = False  # its span in flight will give no token
    finished: bool = False

    def window_page(self, index: int) -> int | None:
        """The window page that it holds at `index`, if it does."""
        at = index - self.window_start
        return self.window[at] if 0 <= at < len(self.window) else None

    def retains(self, index: int) -> bool:
        """Whether the window page at `index` stays cached once it is out of sight.

        Every eighth page, and the last a longer or an equal prompt can hit: page len/PAGE, and the one before where
        the prompt ends with its page, since the last prompt token is always computed.
        """
        num = index + 1
        return num % RETAINED_EVERY == 0 or num in (len(self.prompt) // PAGE, (len(self.prompt) - 1) // PAGE)
