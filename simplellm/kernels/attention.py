"""attention over paged KV with a sink logit per head, for any mix of spans and both kinds of layer.

z_j = scale q.k_j over the keys a query sees (all up to itself, or the last `window`), softmax over the z_j and sink,
which has no value and is neither scaled nor rotated. Reads 2 Hkv D elements a key of each span.
"""

from itertools import pairwise

import torch

from simplellm.config import PAGE
from simplellm.kernels.spans import Spans

SCORE_BYTES = 64 << 20  # of float64 scores at a time


def attention_ref(
    q: torch.Tensor,
    kv: torch.Tensor,
    pages: torch.Tensor,
    spans: Spans,
    sinks: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """-> [T, Hq * D] in q's dtype.

    q [T, Hq, D]; kv [2, pages, Hkv, PAGE, D], this step's keys included; pages [rows, P]: each row's pages by
    position // PAGE; sinks [Hq]; window: keys a query sees, itself included, or None for all.
    """
    assert spans.offsets is not None, "the twin walks the spans"
    out = torch.empty_like(q)
    offsets, rows, positions = spans.offsets.tolist(), spans.rows.tolist(), spans.positions.tolist()
    for begin, end in pairwise(offsets):
        row, start = rows[begin], positions[begin]
        block = max(1, SCORE_BYTES // (8 * q.shape[1] * (start + end - begin)))
        for at in range(begin, end, block):
            queries = q[at : min(at + block, end)]
            out[at : at + len(queries)] = _attend(queries, kv, pages[row], start + at - begin, sinks, window)
    return out.flatten(1)


def _attend(
    q: torch.Tensor, kv: torch.Tensor, pages: torch.Tensor, start: int, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Queries q [t, Hq, D] at positions start, start + 1, ... -> [t, Hq, D]."""
    num, num_heads, dim = q.shape
    num_kv = kv.shape[2]
    end = start + num
    first = 0 if window is None else max(0, start - window + 1)  # the oldest key any of them sees
    owned = pages[first // PAGE : (end + PAGE - 1) // PAGE].long()
    lead = first // PAGE * PAGE
    k, v = (side.transpose(0, 1).flatten(1, 2)[:, first - lead : end - lead].double() for side in kv[:, owned])
    wide = q.double().view(num, num_kv, num_heads // num_kv, dim).permute(1, 2, 0, 3)  # [Hkv, group, t, D]
    scores = (wide @ k[:, None].transpose(-1, -2)) * dim**-0.5  # [Hkv, group, t, keys]
    position = torch.arange(start, end, device=q.device)[:, None]
    key = torch.arange(first, end, device=q.device)
    hidden = key > position if window is None else (key > position) | (key <= position - window)
    scores.masked_fill_(hidden, -torch.inf)
    sink = sinks.double().view(num_kv, -1, 1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = (scores - top).exp()
    mixed: torch.Tensor = (weights @ v[:, None]) / (weights.sum(-1, keepdim=True) + (sink - top).exp())
    return mixed.permute(2, 0, 1, 3).reshape(num, num_heads, dim).to(q.dtype)
