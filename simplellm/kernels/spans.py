"""Where a step's tokens stand: which row of the page tables, which position, which span. All int32 on the model's device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE = 192  # tokens of one tile of chunk attention
ITEM, TILE_FIELDS, COUNTS = 8, 4, 8  # int32s of an item, of a tile, of `counts`


@dataclass(frozen=True, slots=True)
class Work:
    """What the Hopper kernels read in place of spans: lists at fixed addresses, their true lengths in `counts`.

    Tokens 0 .. num_decodes - 1 are spans of one token, the others belong to chunks. An item is a piece of a decode's keys in
    the full layers: token, first page index, one past the last, its number among the token's pieces, how many there are, the
    token's first slot for partial results, its row, its number of keys. A tile: first token, number of tokens (at most TILE),
    position, row; longest first.
    """

    counts: torch.Tensor  # [COUNTS]: num_tokens, num_decodes, num_items, num_tiles, num_outputs
    items: torch.Tensor  # [I, ITEM]; entries beyond num_items hold leftovers
    tiles: torch.Tensor  # [J, TILE_FIELDS]; the same


@dataclass(frozen=True, slots=True)
class Spans:
    """T tokens of S spans, one after another."""

    rows: torch.Tensor  # [T] row of each token in the page tables
    positions: torch.Tensor  # [T]
    offsets: torch.Tensor | None = None  # [S + 1] where each span begins in the tokens; the twins read it
    work: Work | None = None
