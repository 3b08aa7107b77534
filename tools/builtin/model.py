"""gpt-oss in plain PyTorch, to train: whole rows of packed conversations, experts computed densely through MXFP4.

The forward pass sees what the engine will see: experts' weights rounded to MXFP4, all others and the activations to
bfloat16; gradients pass the rounding as if it were not there (straight-through). Parameters are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simplellm.config import ALPHA, ModelConfig
from simplellm.kernels.rope import rope_table

GROUP = 32  # weights that share a scale
Shape = ModelConfig


@dataclass
class Masks:
    """Which keys a query sees, [B, L, L] for full layers and [B, L / window, window, 2 window] for the others."""

    full: Tensor
    window: Tensor


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> E2M1 values [..., K / 32, 32] and exponents of their scales [..., K / 32, 1], both float32.

    The scale is the least power of two that keeps a block within 6, the largest value; values go to the nearest.
    """
    blocks = weight.float().unflatten(-1, (-1, GROUP))
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-60) / 6))
    scaled = blocks * torch.exp2(-exponent)
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.round(size / step) * step).clamp(max=6) * scaled.sign(), exponent


def through_mxfp4(weight: Tensor) -> Tensor:
    """The weight as MXFP4 holds it; its gradient is that of the result."""
    values, exponent = quantise(weight.detach())
    rounded = (values * torch.exp2(exponent)).flatten(-2)
    return weight + (rounded - weight).detach()


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    """q [..., t, G, D] of one KV head, k and v [..., m, D], seen [..., t, m] -> [..., t, G D]. A sink has no value."""
    scores = torch.einsum("...tgd,...md->...gtm", q, k).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen.unsqueeze(-3), -1e30)
    sink = sinks.float().view(-1, 1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink).detach()
    weights = (scores - top).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + (sink - top).exp())
    return torch.einsum("...gtm,...md->...tgd", weights.to(v.dtype), v).flatten(-2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x [..., L, heads, D]; table [..., L, 2, D / 2]."""
    cos, sin = table.to(x.dtype).unsqueeze(-3).unbind(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    """One layer; `window` is the number of keys it sees, or 0."""

    def __init__(self, shape: Shape, index: int):
        super().__init__()
        hidden, inner, experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
        assert shape.num_kv_heads == 1
        self.heads, self.dim, self.top = shape.num_heads, shape.head_dim, shape.experts_per_token
        self.experts, self.limit, self.eps = experts, shape.swiglu_limit, shape.rms_norm_eps
        self.window = shape.sliding_window if index in shape.window_layers else 0
        width = self.heads * self.dim

        def matrix(*size: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size) * gain / math.sqrt(size[-1]))

        less = 0.5 / math.sqrt(2 * shape.num_layers)  # for what is added to the residual stream
        self.input_norm, self.post_norm = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.q_w, self.k_w = matrix(width, hidden), matrix(self.dim, hidden)
        self.v_w, self.o_w = matrix(self.dim, hidden), matrix(hidden, width, gain=less)
        self.q_b, self.k_b = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(self.dim))
        self.v_b, self.o_b = nn.Parameter(torch.zeros(self.dim)), nn.Parameter(torch.zeros(hidden))
        self.sinks = nn.Parameter(torch.zeros(self.heads))
        self.router_w, self.router_b = matrix(experts, hidden), nn.Parameter(torch.zeros(experts))
        self.gate_up, self.gate_up_b = matrix(experts, 2 * inner, hidden), nn.Parameter(torch.zeros(experts, 2 * inner))
        self.down, self.down_b = matrix(experts, hidden, inner, gain=less), nn.Parameter(torch.zeros(experts, hidden))

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All weights as the checkpoint will hold them."""
        quantised = {"gate_up": through_mxfp4(self.gate_up), "down": through_mxfp4(self.down)}
        return {name: quantised.get(name, value).to(dtype) for name, value in self.named_parameters()}

    def forward(self, x: Tensor, table: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, L, H] -> the same, and how unevenly the experts are used (1 is even)."""
        w = self.weights(x.dtype)
        q, k, v = self.project(x, w, table)
        if self.window:
            q, k, v = (side.unflatten(1, (-1, self.window)) for side in (q, k, v))
            k, v = (torch.cat([F.pad(side, (0, 0, 0, 0, 1, 0))[:, :-1], side], 2) for side in (k, v))
        mixed = attend(q, k, v, w["sinks"], seen)
        mixed = mixed.flatten(1, 2) if self.window else mixed
        return self.finish(x, mixed, w)

    def project(self, x: Tensor, w: dict[str, Tensor], table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., H] -> q [..., heads, D], k, v [..., D], rotated."""
        y = self.norm(x, w["input_norm"])
        q = F.linear(y, w["q_w"], w["q_b"]).unflatten(-1, (self.heads, self.dim))
        k = F.linear(y, w["k_w"], w["k_b"]).unsqueeze(-2)
        return rotate(q, table), rotate(k, table).squeeze(-2), F.linear(y, w["v_w"], w["v_b"])

    def finish(self, x: Tensor, mixed: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = x + F.linear(mixed, w["o_w"], w["o_b"])
        y, unevenness = self.mix_experts(self.norm(x, w["post_norm"]), w)
        return x + y, unevenness

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * gain.float()).to(x.dtype)

    def mix_experts(self, x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """All experts at once, as one wide layer: those not chosen have share 0."""
        logits = F.linear(x, w["router_w"], w["router_b"]).float()
        best, chosen = logits.topk(self.top, dim=-1)
        share = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        used = (share > 0).float().flatten(0, -2).mean(0) / self.top
        unevenness = self.experts * (used * logits.softmax(-1).flatten(0, -2).mean(0)).sum()
        h = F.linear(x, w["gate_up"].flatten(0, 1), w["gate_up_b"].flatten())
        gate, up = h.unflatten(-1, (self.experts, -1, 2)).unbind(-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        inner = gate * torch.sigmoid(ALPHA * gate) * (up + 1) * share.to(x.dtype).unsqueeze(-1)
        out = F.linear(inner.flatten(-2), w["down"].transpose(0, 1).flatten(1))
        return out + share.to(x.dtype) @ w["down_b"], unevenness


class Model(nn.Module):
    """`dtype` is that of the activations."""

    def __init__(self, shape: Shape, length: int, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.embed = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.5)
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.lm_head = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.5 / math.sqrt(shape.hidden_size))
        self.layers = nn.ModuleList(Block(shape, i) for i in range(shape.num_layers))
        self.register_buffer("table", rope_table(shape, length, torch.device("cpu")), persistent=False)

    def masks(self, docs: Tensor) -> Masks:
        """docs [B, L]: the number of the conversation that a token belongs to."""
        length, window = docs.shape[1], self.shape.sliding_window
        place = torch.arange(length, device=docs.device)
        full = (docs[:, :, None] == docs[:, None, :]) & (place[:, None] >= place)
        chunks = docs.unflatten(1, (-1, window))
        keys = torch.cat([F.pad(chunks, (0, 0, 1, 0), value=-1)[:, :-1], chunks], 2)
        t, m = torch.arange(window, device=docs.device)[:, None], torch.arange(-window, window, device=docs.device)
        near = (m <= t) & (m > t - window)
        return Masks(full, (chunks[..., :, None] == keys[..., None, :]) & near)

    def forward(self, tokens: Tensor, docs: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, docs [B, L], L a multiple of the window -> hidden states [B, L, H], unevenness of the experts."""
        masks = self.masks(docs)
        x = F.embedding(tokens, self.embed).to(self.dtype)
        table, uneven = self.table[: tokens.shape[1]], torch.zeros((), device=x.device)
        for block in self.layers:
            x, more = block(x, table, masks.window if block.window else masks.full)
            uneven = uneven + more / len(self.layers)
        return x, uneven

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean over the targets, -100 where there is none."""
        return F.cross_entropy(self.logits(x).flatten(0, 1).float(), targets.flatten(), ignore_index=-100)

    def logits(self, x: Tensor) -> Tensor:
        y = self.layers[0].norm(x, self.norm.to(self.dtype))
        return F.linear(y, self.lm_head.to(self.dtype))
