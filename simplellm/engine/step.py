"""A plan as one int32 array, for a device that replays graphs: the host fills pinned memory, one copy brings it over, the
kernels read views at fixed addresses. The true sizes travel with it; what lies beyond them is left over from earlier steps.

Decodes (spans of one token) come first. A decode's keys in the full layers are cut in pieces of whole pages so that about
PIECES of them keep all multiprocessors busy, whether one sequence is long or a thousand are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from simplellm.config import PAGE
from simplellm.kernels.spans import COUNTS, ITEM, TILE, TILE_FIELDS, Spans, Work
from simplellm.request import Plan, Span

PIECES = 64  # with 8 KV heads: 512 CTAs, about four a multiprocessor


@dataclass(frozen=True)
class StepShape:
    """How many tokens, outputs, decodes and tiles a step has room for."""

    tokens: int
    outputs: int
    decodes: int
    tiles: int

    @classmethod
    def of(cls, tokens: int, outputs: int, decodes: int, chunks: bool) -> StepShape:
        """For `tokens` tokens, at most `outputs` of them outputs and `decodes` of them decodes; with chunks or without."""
        tiles = tokens // 2 + tokens // TILE + 1 if chunks else 0  # a chunk has two tokens at least
        return cls(tokens, min(tokens, outputs), min(tokens, decodes), tiles)

    @property
    def items(self) -> int:
        return self.decodes + PIECES

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of counts, tokens, rows, positions, outputs, items, tiles in the array."""
        t = self.tokens
        return COUNTS, t, t, t, self.outputs, ITEM * self.items, TILE_FIELDS * self.tiles

    @property
    def size(self) -> int:
        return sum(-(-size // 4) * 4 for size in self.sizes)  # each part begins at 16 bytes

    def parts(self, array: torch.Tensor) -> list[torch.Tensor]:
        """Views of the parts of an array that is at least `size` long."""
        views, at = [], 0
        for size in self.sizes:
            views.append(array[at : at + size])
            at += -(-size // 4) * 4
        return views


@dataclass(frozen=True)
class StepViews:
    """The device's array as the model takes it."""

    tokens: torch.Tensor
    spans: Spans
    outputs: torch.Tensor

    @classmethod
    def of(cls, shape: StepShape, array: torch.Tensor) -> StepViews:
        counts, tokens, rows, positions, outputs, items, tiles = shape.parts(array)
        work = Work(counts, items.view(-1, ITEM), tiles.view(-1, TILE_FIELDS))
        return cls(tokens, Spans(rows, positions, None, work), outputs)


def sort_spans(plan: Plan) -> tuple[list[Span], int]:
    """Decodes first, and how many they are."""
    decodes = [span for span in plan.spans if len(span.tokens) == 1]
    if len(decodes) == len(plan.spans):
        return decodes, len(decodes)
    return decodes + [span for span in plan.spans if len(span.tokens) > 1], len(decodes)


def fill(shape: StepShape, array: torch.Tensor, spans: Sequence[Span], num_decodes: int) -> int:
    """Write the sorted spans into an array on the host; the number of outputs: drawing spans, then scored tokens."""
    counts, tokens, rows, positions, outputs, items, tiles = (part.numpy() for part in shape.parts(array))
    decodes, chunks = spans[:num_decodes], spans[num_decodes:]
    tokens[:num_decodes] = [span.tokens[0] for span in decodes]
    rows[:num_decodes] = [span.row for span in decodes]
    positions[:num_decodes] = [span.start for span in decodes]
    at, ends = num_decodes, list(range(1, num_decodes + 1))
    cut: list[tuple[int, int, int, int]] = []
    for span in chunks:
        num = len(span.tokens)
        tokens[at : at + num] = span.tokens
        rows[at : at + num] = span.row
        positions[at : at + num] = np.arange(span.start, span.end)
        cut += [(at + i, min(TILE, num - i), span.start + i, span.row) for i in range(0, num, TILE)]
        at += num
        ends.append(at)
    tokens[at:], rows[at:], positions[at:] = 0, 0, 0  # padding runs through the layers: let it be harmless
    chosen = [end - 1 for span, end in zip(spans, ends, strict=True) if span.sample]
    for span, end in zip(spans, ends, strict=True):
        if span.targets:
            begin = end - len(span.tokens)
            chosen += range(begin, begin + len(span.targets))
    outputs[: len(chosen)], outputs[len(chosen) :] = chosen, 0
    pieces = cut_decodes(rows[:num_decodes], positions[:num_decodes])
    assert len(pieces) <= shape.items and len(cut) <= shape.tiles, "more than the step has room for"
    items[: pieces.size] = pieces.ravel()
    if cut:
        cut.sort(key=lambda tile: -(tile[2] + tile[1]))  # longest first, so that short ones fill the end
        tiles[: TILE_FIELDS * len(cut)] = np.array(cut, dtype=np.int32).ravel()
    counts[:5] = at, num_decodes, len(pieces), len(cut), len(chosen)
    return len(chosen)


def cut_decodes(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Items [n, ITEM] (kernels/spans.py) for decodes of these rows at these positions; a token's are equal but for a page."""
    pages = positions // PAGE + 1
    piece = max(1, -(-int(pages.sum()) // PIECES))
    num = -(-pages // piece)
    token = np.repeat(np.arange(len(pages), dtype=np.int32), num)
    base = np.cumsum(num) - num
    split = np.arange(len(token), dtype=np.int32) - base[token]
    first, last = (pages[token] * (split + at) // num[token] for at in (0, 1))
    fields = [token, first, last, split, num[token], base[token], rows[token], positions[token] + 1]
    return np.stack(fields, axis=1).astype(np.int32)
