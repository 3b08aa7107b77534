"""A plan as one int32 array, for a device that replays graphs: the host fills pinned memory, a kernel brings it over
(engine/mailbox.py), the others read views at fixed addresses. The true sizes travel with it; what lies beyond them is left over
from earlier steps.

Decodes (spans of one token) come first. A decode's keys in the full layers are cut in pieces of whole pages so that about
PIECES of them keep all multiprocessors busy, whether one sequence is long or a thousand are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from simplellm.config import PAGE
from simplellm.kernels.spans import COUNTS, ITEM, TILE, TILE_FIELDS, Spans, Work
from simplellm.request import Plan, Span

PIECES = 64  # with 8 KV heads: 512 CTAs, about four a multiprocessor
DRAW = 2  # int32s of a draw: a row, or -1 for none, and the position where its token will stand

Int32s = npt.NDArray[np.int32]
Array = TypeVar("Array", Int32s, torch.Tensor)


@dataclass(frozen=True)
class StepShape:
    """How many tokens, outputs, decodes, draws and tiles a step has room for."""

    tokens: int
    outputs: int
    decodes: int
    draws: int
    tiles: int

    @classmethod
    def of(cls, tokens: int, outputs: int, rows: int, chunks: bool) -> StepShape:
        """For `tokens` tokens of `rows` rows, at most `outputs` of them outputs; with chunks or without.

        Every head that can follow finds its draws: one of decodes alone has at most as many rows as they are.
        """
        tiles = tokens // 2 + tokens // TILE + 1 if chunks else 0  # a chunk has two tokens at least
        return cls(tokens, min(tokens, outputs), min(tokens, rows), rows if chunks else min(tokens, rows), tiles)

    @property
    def items(self) -> int:
        return self.decodes + PIECES

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Of counts, draws, tokens, rows, positions, outputs, items, tiles in the array; each begins at 16 bytes."""
        t = self.tokens
        sizes = (COUNTS, DRAW * self.draws, t, t, t, self.outputs, ITEM * self.items, TILE_FIELDS * self.tiles)
        ends = np.cumsum([-(-size // 4) * 4 for size in sizes]).tolist()
        return tuple(slice(begin, begin + size) for begin, size in zip([0, *ends], sizes, strict=False))

    @cached_property
    def size(self) -> int:
        """A multiple of 4."""
        end: int = self.places[-1].stop
        return -(-end // 4) * 4

    def parts(self, array: Array) -> list[Array]:
        """Views of the parts of an array that is at least `size` long."""
        return [array[place] for place in self.places]


@dataclass(frozen=True)
class StepViews:
    """The device's array as the model takes it."""

    tokens: torch.Tensor
    spans: Spans
    outputs: torch.Tensor

    @classmethod
    def of(cls, shape: StepShape, array: torch.Tensor) -> StepViews:
        counts, _, tokens, rows, positions, outputs, items, tiles = shape.parts(array)
        work = Work(counts, items.view(-1, ITEM), tiles.view(-1, TILE_FIELDS))
        return cls(tokens, Spans(rows, positions, None, work), outputs)


def draws_of(array: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, DRAW]: the first draws of a step's array. They stand at the same place in every shape."""
    return array[COUNTS : COUNTS + DRAW * num_rows].view(-1, DRAW)


@dataclass(slots=True)
class StepSpans:
    """A plan's spans in the order of the step."""

    spans: Sequence[Span]  # decodes first
    num_decodes: int
    num_tokens: int
    drawing: Sequence[Span]  # those that draw a token, in the order of the draws and of the first outputs
    scoring: Sequence[Span]  # those whose tokens are scored, in the order of the outputs behind

    @classmethod
    def of(cls, plan: Plan) -> StepSpans:
        spans: Sequence[Span] = plan.spans
        _, _, _, tokens, sample, targets = zip(*spans, strict=True)
        num_decodes = num_tokens = len(spans)
        lengths = list(map(len, tokens))
        if lengths.count(1) < len(spans):
            decodes = [span for span, length in zip(spans, lengths, strict=True) if length == 1]
            spans = decodes + [span for span, length in zip(spans, lengths, strict=True) if length > 1]
            num_decodes, num_tokens = len(decodes), sum(lengths)
        drawing = spans if all(sample) else [span for span in spans if span.sample]
        scoring = [span for span in spans if span.targets] if any(targets) else ()
        return cls(spans, num_decodes, num_tokens, drawing, scoring)

    @property
    def drawing_decodes(self) -> bool:
        """Whether every span is a decode that draws, and nothing is scored: token i is output i and draw i."""
        return self.num_decodes == len(self.drawing) == len(self.spans) and not self.scoring


def fill(shape: StepShape, array: Int32s, step: StepSpans) -> None:
    """Write a step into an array on the host."""
    counts, draws, tokens, rows, positions, outputs, items, tiles = shape.parts(array)
    at, cut = step.num_decodes, []
    if at:
        _, own_rows, starts, own_tokens, _, _ = zip(*step.spans[:at], strict=True)
        tokens[:at] = np.fromiter(chain.from_iterable(own_tokens), np.int32, at)
        rows[:at], positions[:at] = np.fromiter(own_rows, np.int32, at), np.fromiter(starts, np.int32, at)
    for span in step.spans[at:]:
        num = len(span.tokens)
        tokens[at : at + num] = span.tokens
        rows[at : at + num] = span.row
        positions[at : at + num] = np.arange(span.start, span.end)
        cut += [(at + i, min(TILE, num - i), span.start + i, span.row) for i in range(0, num, TILE)]
        at += num
    for part in (tokens, rows, positions):
        part[at:] = 0  # padding runs through the layers: let it be harmless
    num_draws = len(step.drawing)
    chosen = np.arange(num_draws, dtype=np.int32) if step.drawing_decodes else _choose(step)
    outputs[: len(chosen)], outputs[len(chosen) :] = chosen, 0
    last = chosen[:num_draws]
    draws[: DRAW * num_draws : DRAW], draws[1 : DRAW * num_draws : DRAW] = rows[last], positions[last] + 1
    draws[DRAW * num_draws :] = -1
    pieces = cut_decodes(rows[: step.num_decodes], positions[: step.num_decodes])
    assert len(pieces) <= shape.items and len(cut) <= shape.tiles, "more than the step has room for"
    items[: pieces.size] = pieces.ravel()
    if cut:
        cut.sort(key=lambda tile: -(tile[2] + tile[1]))  # longest first, so that short ones fill the end
        tiles[: TILE_FIELDS * len(cut)] = np.array(cut, dtype=np.int32).ravel()
    counts[:5] = at, step.num_decodes, len(pieces), len(cut), len(chosen)


def _choose(step: StepSpans) -> Int32s:
    """The outputs: each drawing span's last token, then the scored tokens."""
    drawn: list[int] = []
    scored: list[int] = []
    at = 0
    for span in step.spans:
        scored += range(at, at + len(span.targets))
        at += len(span.tokens)
        if span.sample:
            drawn.append(at - 1)
    return np.array(drawn + scored, np.int32)


def cut_decodes(rows: Int32s, positions: Int32s) -> Int32s:
    """Items [n, ITEM] (kernels/spans.py) for decodes of these rows at these positions; a token's are equal but for a page."""
    pages = positions // PAGE + 1
    piece = max(1, -(-int(pages.sum()) // PIECES))
    num = -(-pages // piece)
    of_token = np.zeros((len(rows), ITEM), np.int32)  # with all its pages, and the piece 0
    of_token[:, 0], of_token[:, 2] = np.arange(len(rows)), pages
    of_token[:, 4], of_token[:, 5], of_token[:, 6], of_token[:, 7] = num, num.cumsum() - num, rows, positions + 1
    items = of_token.repeat(num, 0)
    items[:, 3] = np.arange(len(items)) - items[:, 5]
    pages, num, split = items[:, 2].copy(), items[:, 4], items[:, 3]
    items[:, 1], items[:, 2] = pages * split // num, pages * (split + 1) // num
    return items
