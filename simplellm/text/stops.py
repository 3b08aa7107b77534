"""Text of one answer as its tokens arrive: stop strings found across tokens, nothing shown that a stop may swallow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """What `Tokenizer.decoder()` gives."""

    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class TextStream:
    """Feeds on tokens, releases text. After a stop string: `stopped`, and `num_tokens` counts those that survive it."""

    def __init__(self, decoder: Decoder, stops: tuple[str, ...] = ()):
        self.decoder, self.stops = decoder, stops
        self.stopped = False
        self.ends: list[int] = []  # characters of text once token i is decoded
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._released = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the text so far needs: all of them, unless a stop string cut it."""
        if not self.stopped:
            return len(self.ends)
        cut = self._released
        return 0 if cut == 0 else next(i for i, end in enumerate(self.ends) if end >= cut) + 1

    def push(self, token: int) -> str:
        """Text that is certain now."""
        assert not self.stopped, "a token after a stop string"
        self._held += self.decoder.push([token])
        self.ends.append(self._released + len(self._held))
        return self._release()

    def close(self) -> str:
        """The rest, once no token follows."""
        if self.stopped:
            return ""
        self._held += self.decoder.flush()
        if self.ends:
            self.ends[-1] = self._released + len(self._held)
        return self._release(last=True)

    def _release(self, last: bool = False) -> str:
        found = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped, keep = True, min(found)
        else:
            keep = len(self._held) if last else len(self._held) - self._overlap()
        text, self._held = self._held[:keep], self._held[keep:]
        self._released += len(text)
        return text

    def _overlap(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        most = min(max(map(len, self.stops), default=1) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if any(stop.startswith(self._held[-n:]) for stop in self.stops)), 0)
