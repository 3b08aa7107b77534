"""Greedy answers of a model in training, many conversations at once. The engine does it properly; this is quick."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.builtin.model import Block, Model, attend


@torch.no_grad()
def greedy(model: Model, prompts: Sequence[Sequence[int]], stops: Sequence[int], longest: int = 320) -> list[list[int]]:
    """What follows each prompt, up to and with a stop token, or `longest` tokens."""
    device, num = model.embed.device, len(prompts)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    total = min(int(lengths.max()) + longest, len(model.table))
    tokens = torch.zeros(num, int(lengths.max()), dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    weights = [block.weights(model.dtype) for block in model.layers]
    caches = [torch.zeros(2, num, total, model.shape.head_dim, device=device, dtype=model.dtype) for _ in weights]
    starts = torch.zeros_like(lengths)
    x = _advance(model, weights, caches, tokens.to(device), starts)
    last = model.logits(x[torch.arange(num, device=device), lengths - 1]).argmax(-1)
    ends, written = torch.tensor(stops, device=device), [last]
    done = torch.isin(last, ends)
    places = lengths.clone()
    while not bool(done.all()) and len(written) < longest and int(places.max()) < total:
        x = _advance(model, weights, caches, last[:, None], places)
        last = model.logits(x[:, 0]).argmax(-1)
        written.append(last)
        done, places = done | torch.isin(last, ends), places + 1
    rows = torch.stack(written, 1).tolist()
    stop_set = set(stops)
    return [row[: next((i + 1 for i, token in enumerate(row) if token in stop_set), len(row))] for row in rows]


def _advance(model: Model, weights: list[dict[str, Tensor]], caches: list[Tensor], tokens: Tensor, starts: Tensor) -> Tensor:
    """tokens [N, t] at positions from starts [N] on -> hidden states [N, t, H]; caches get their keys and values."""
    places = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    keys = torch.arange(caches[0].shape[2] if tokens.shape[1] == 1 else tokens.shape[1], device=tokens.device)
    seen = keys <= places[..., None]
    near = seen & (keys > places[..., None] - model.shape.sliding_window)
    x, rows = F.embedding(tokens, model.embed).to(model.dtype), torch.arange(len(tokens), device=tokens.device)[:, None]
    for block, w, cache in zip(model.layers, weights, caches, strict=True):
        assert isinstance(block, Block)
        q, k, v = block.project(x, w, model.table[places])
        cache[0, rows, places], cache[1, rows, places] = k, v
        mixed = attend(q, cache[0, :, : len(keys)], cache[1, :, : len(keys)], w["sinks"], near if block.window else seen)
        x, _ = block.finish(x, mixed, w)
    return x
