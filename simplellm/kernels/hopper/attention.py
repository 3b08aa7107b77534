"""The attention op on Hopper: attention_decode.py for decodes, attention_chunk.py for chunks, where there may be some."""

from __future__ import annotations

import torch

from simplellm.config import PAGE
from simplellm.kernels.hopper.attention_chunk import chunk
from simplellm.kernels.hopper.attention_decode import decode
from simplellm.kernels.spans import Spans


def attention(
    q: torch.Tensor, kv: torch.Tensor, pages: torch.Tensor, spans: Spans, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """-> [T, Hq * 64] in bf16; rows of padded tokens are not written.

    q [T, Hq, 64]; kv [2, num_pages, Hkv, PAGE, 64] with Hq = 8 Hkv, both halves contiguous, this step's keys included;
    pages [rows, P] int32: each row's pages by position // PAGE; sinks [Hq]; window: keys a query sees, itself included (at most
    PAGE), or None for all. A step whose work has room for no item has no decodes, for no tile no chunks: no kernel then.
    """
    work = spans.work
    assert work is not None, "the kernels read spans.work"
    num_tokens, num_heads, dim = q.shape
    assert q.is_contiguous() and kv[0].is_contiguous() and pages.stride(1) == 1
    assert dim == 64 and kv.shape[2:] == (num_heads // 8, PAGE, dim) and num_heads % 8 == 0
    assert window is None or 0 < window <= PAGE, "a window's keys lie in two pages"
    out = torch.empty(num_tokens, num_heads * dim, dtype=q.dtype, device=q.device)
    if work.items.shape[0]:
        decode(q, kv, pages, spans, sinks, window, out)
    if work.tiles.shape[0]:
        chunk(q, kv, pages, spans, sinks, window, out)
    return out
