"""Reads one answer as its tokens arrive: plain text, or a chat answer's messages; stop strings cut either.

Stop strings are found across tokens, and nothing is shown that one may swallow. In a chat answer they are looked for in
the content only, not in reasoning or arguments, nor across these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Protocol

from simplellm.text.parser import ContentDelta, Delta, Parser


class Decoder(Protocol):
    """What `Tokenizer.decoder()` gives."""

    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class Stops:
    """Text goes in, text that is certain comes out; after a stop string nothing does, and `found` is set."""

    def __init__(self, stops: tuple[str, ...]):
        self.stops, self.found = stops, False
        self._held = ""  # perhaps the beginning of a stop string
        self._released = 0
        self._ends: list[int] = []  # characters that came in up to each token's end
        self._certain = 0  # tokens at whose end nothing was held

    def push(self, text: str) -> str:
        """What of `text`, and of what was held, is certain."""
        if not self.stops:  # the usual case, once per token
            self._released += len(text)
            return text
        self._held += text
        return self._release(last=False)

    def end_token(self) -> None:
        """What came in since the last call is one token's."""
        self._ends.append(self._released + len(self._held))
        if not self._held:
            self._certain = len(self._ends)

    def flush(self) -> str:
        """What is held, since text that is not searched comes between."""
        return self._release(last=True)

    def close(self, text: str = "") -> str:
        """The rest; `text` belongs to the last token."""
        self._held += text
        if self._ends:
            self._ends[-1] = self._released + len(self._held)
        return self._release(last=True)

    @property
    def num_tokens(self) -> int:
        """Tokens that are certain: all, or up to the one in which the text that came out ends. Never fewer than before."""
        if not self._held:
            return len(self._ends)
        out = self._released
        return max(self._certain, bisect_left(self._ends, max(out, 1)) + (out > 0))

    def _release(self, last: bool) -> str:
        if self.found:
            return ""
        places = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        self.found = bool(places)
        whole = len(self._held) if last else len(self._held) - self._overlap()
        keep = min(places, default=whole)
        text, self._held = self._held[:keep], self._held[keep:]
        self._released += keep
        return text

    def _overlap(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        most = min(max(map(len, self.stops), default=1) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if any(stop.startswith(self._held[-n:]) for stop in self.stops)), 0)


class TextReader:
    """Plain text: every token's bytes, control tokens left out."""

    reasoning_tokens = 0
    finish_kind: str | None = None
    repairs: Mapping[str, int] = {}

    def __init__(self, decoder: Decoder, stops: tuple[str, ...] = ()):
        self.decoder, self._stops = decoder, Stops(stops)

    @property
    def cut(self) -> bool:
        """A stop string was found."""
        return self._stops.found

    @property
    def complete(self) -> bool:
        """No further token belongs to the answer."""
        return self._stops.found

    @property
    def num_tokens(self) -> int:
        """Tokens whose text is certain; those that survive a stop string."""
        return self._stops.num_tokens

    def push(self, token: int) -> list[Delta]:
        """What the token adds for certain."""
        text = self._stops.push(self.decoder.push([token]))
        self._stops.end_token()
        return _content(text)

    def close(self) -> list[Delta]:
        """The rest, once no token follows."""
        return _content(self._stops.close(self.decoder.flush()))


class ChatReader:
    """A chat answer in harmony: reasoning, content and tool calls."""

    def __init__(self, parser: Parser, stops: tuple[str, ...] = ()):
        self.parser, self._stops = parser, Stops(stops)

    @property
    def cut(self) -> bool:
        """A stop string was found in the content."""
        return self._stops.found

    @property
    def complete(self) -> bool:
        """No further token belongs to the answer."""
        return self._stops.found or self.parser.stopped

    @property
    def num_tokens(self) -> int:
        """Tokens whose text is certain; those that survive a stop string."""
        return self._stops.num_tokens

    @property
    def reasoning_tokens(self) -> int:
        return self.parser.reasoning_tokens

    @property
    def repairs(self) -> Mapping[str, int]:
        return self.parser.repairs

    @property
    def finish_kind(self) -> str | None:
        """ "stop" or "tool_calls" once the answer is complete; a stop string always means "stop"."""
        return "stop" if self._stops.found else self.parser.finish_kind

    def push(self, token: int) -> list[Delta]:
        """What the token adds for certain."""
        deltas = self._filter(self.parser.push([token]))
        self._stops.end_token()
        return deltas

    def close(self) -> list[Delta]:
        """The rest, once no token follows."""
        deltas = self._filter(self.parser.finish())
        return deltas + _content(self._stops.close())

    def _filter(self, deltas: list[Delta]) -> list[Delta]:
        """Content passes through the stop strings; nothing passes after one."""
        passed: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                passed += _content(self._stops.push(delta.text))
                continue
            passed += _content(self._stops.flush())  # before what comes between
            if not self._stops.found:
                passed.append(delta)
        return passed


def _content(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []
