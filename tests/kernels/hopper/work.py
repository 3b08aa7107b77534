"""Spans and their Work from a list of (row, start, length), as a step's maker will do it; and poisoned pages to attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from simplellm.config import PAGE
from simplellm.kernels.attention import attention_ref
from simplellm.kernels.spans import COUNTS, ITEM, TILE, TILE_FIELDS, Spans, Work

PIECES = 64  # a step's decode pages are cut into about this many pieces

Span = tuple[int, int, int]  # row of the page tables, first position, number of tokens


def make_items(rows: list[int], ends: list[int], target: int = PIECES) -> list[list[int]]:
    """Of decodes of these rows with so many keys each: about `target` pieces, those of a token differing by a page at most."""
    pages = [-(-end // PAGE) for end in ends]
    piece = max(1, -(-sum(pages) // target))
    items: list[list[int]] = []
    for token, num in enumerate(pages):
        splits, base = -(-num // piece), len(items)
        cuts = [num * n // splits for n in range(splits + 1)]
        items += [[token, cuts[n], cuts[n + 1], n, splits, base, rows[token], ends[token]] for n in range(splits)]
    return items


def make_tiles(chunks: list[Span], first_token: int) -> list[list[int]]:
    """Of chunks whose tokens begin at first_token: at most TILE tokens each, the most keys first."""
    tiles: list[list[int]] = []
    for row, start, length in chunks:
        tiles += [[first_token + at, min(TILE, length - at), start + at, row] for at in range(0, length, TILE)]
        first_token += length
    return sorted(tiles, key=lambda tile: -(tile[1] + tile[2]))


def make_spans(spans: list[Span], num_decodes: int = 0, device: str = "cuda", padding: int = 0, target: int = PIECES) -> Spans:
    """The first num_decodes spans, of one token each, are decodes, the others chunks. `padding`: tokens, items and tiles
    beyond the true ones; were such an item or tile done, token 0 would get a wrong value. `target`: of `make_items`."""
    assert all(length == 1 for _, _, length in spans[:num_decodes])
    rows_of, starts = [row for row, _, _ in spans[:num_decodes]], [start for _, start, _ in spans[:num_decodes]]
    items = make_items(rows_of, [start + 1 for start in starts], target)
    tiles = make_tiles(spans[num_decodes:], num_decodes)
    lengths = torch.tensor([length for _, _, length in spans])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    counts = [int(offsets[-1]), num_decodes, len(items), len(tiles), int(offsets[-1])] + [0] * (COUNTS - 5)
    rows = torch.tensor([row for row, _, _ in spans] + [0]).repeat_interleave(torch.cat([lengths, torch.tensor([padding])]))
    positions = [torch.arange(start, start + length) for _, start, length in spans] + [torch.zeros(padding)]

    def place(values: torch.Tensor) -> torch.Tensor:
        return values.to(device, torch.int32)

    work = Work(
        place(torch.tensor(counts)),
        place(torch.tensor(items + [[0, 0, 1, 0, 1, 0, 0, 1]] * padding * bool(items)).view(-1, ITEM)),
        place(torch.tensor(tiles + [[0, 1, 0, 0]] * padding * bool(tiles)).view(-1, TILE_FIELDS)),
    )
    return Spans(place(rows), place(torch.cat(positions)), place(offsets), work)


@dataclass
class Case:
    """Random queries, keys and values; a span's pages are anywhere. What nobody may look at is NaN: the dummy page, a
    decode's slots after its token, padded queries; the slots after a chunk are zero, as an earlier kernel leaves them."""

    spans: Spans
    q: torch.Tensor  # [T, Hq, D]
    kv: torch.Tensor  # [2, pages, Hkv, PAGE, D]
    pages: torch.Tensor  # [rows, P]
    sinks: torch.Tensor  # [Hq]

    @classmethod
    def make(
        cls,
        spans: list[Span],
        num_decodes: int = 0,
        *,
        num_kv: int = 8,
        device: str = "cuda",
        seed: int = 0,
        padding: int = 0,
        sink: float = 0.0,
        sharp: float = 1.0,
    ) -> Case:
        """Spans of different rows. sink: added to all sinks; sharp: a factor of the queries."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

        owned = [-(-(start + length) // PAGE) for _, start, length in spans]
        order = (torch.randperm(sum(owned), device=device, generator=generator) + 1).to(torch.int32)
        pages = torch.zeros(max(row for row, _, _ in spans) + 1, max(owned) + 3, dtype=torch.int32, device=device)
        kv = normal(2, 2, len(order) + 1, num_kv, PAGE, 64)[1]  # of two layers, the second
        kv[:, 0] = torch.nan
        for i, ((row, start, length), mine) in enumerate(zip(spans, order.split(owned), strict=True)):
            pages[row, : len(mine)] = mine
            kv[:, int(mine[-1]), :, (start + length - 1) % PAGE + 1 :] = torch.nan if i < num_decodes else 0
        q = normal(sum(length for _, _, length in spans) + padding, 8 * num_kv, 64) * sharp
        q[len(q) - padding :] = torch.nan
        return cls(make_spans(spans, num_decodes, device, padding), q, kv, pages, normal(8 * num_kv) + sink)

    def twin(self, window: int | None, dtype: torch.dtype = torch.float32, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """[true tokens or `tokens`, Hq * D] by the twin, in the dtype."""
        offsets = self.spans.offsets
        assert offsets is not None
        spans, q = self.spans, self.q[: int(offsets[-1])]
        if tokens is not None:  # each by itself
            spans = Spans(spans.rows[tokens], spans.positions[tokens], torch.arange(len(tokens) + 1))
            q = q[tokens]
        return attention_ref(q.to(dtype), self.kv.to(dtype), self.pages, spans, self.sinks, window)
