"""gpt-oss as arithmetic: tokens of a batch in, hidden states of the rows that draw a token, then their logits.

embed, then per layer: x += attention(norm(x)); x += experts(norm(x)); then norm and lm_head. The residual stream has the
dtype of the activations: bfloat16, as the references round, or float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from simplellm import kernels
from simplellm.config import PAGE, WINDOW, ModelConfig
from simplellm.model.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's spans on the device. S spans, T tokens, N rows that need logits."""

    tokens: torch.Tensor  # [T] ids
    positions: torch.Tensor  # [T]
    span_offsets: torch.Tensor  # [S + 1] where each span begins in tokens
    span_starts: torch.Tensor  # [S] position of each span's first token
    full_pages: torch.Tensor  # [S, n] page of a span's row by position // PAGE, full layers
    window_pages: torch.Tensor  # [S, n] the same, window layers
    full_slots: torch.Tensor  # [T] page * PAGE + offset, where a token's K and V go
    window_slots: torch.Tensor  # [T]
    outputs: torch.Tensor  # [N] indices into tokens


class GptOss:
    """A loaded model. `body` runs a batch over the KV pages, `head` turns hidden states into logits."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, max_context: int):
        self.config, self.weights, self.dtype = config, weights, dtype
        self.table = kernels.rope_table(config, max_context, weights.embed.device)

    def new_kv(self, num_pages: int) -> torch.Tensor:
        """The pool: [layers of a kind, k or v, num_pages, Hkv, PAGE, D]. Not initialised: only what was written is read."""
        c = self.config
        shape = (c.page_layers, 2, num_pages, c.num_kv_heads, PAGE, c.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.weights.embed.device)

    def body(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """-> hidden states [N, H] of batch.outputs, after the final norm. Writes the batch's K and V into `kv`."""
        c = self.config
        x = self.weights.embed[batch.tokens].to(self.dtype)
        place = {kind: 0 for kind in c.layer_types}
        for layer, kind in zip(self.weights.layers, c.layer_types, strict=True):
            x = x + self._attention(x, layer, batch, kv[place[kind]], kind == WINDOW)
            x = x + self._experts(x, layer)
            place[kind] += 1
        return kernels.rmsnorm(x[batch.outputs], self.weights.norm, c.rms_norm_eps)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> logits [N, V] float32."""
        return kernels.lm_head(hidden, self.weights.lm_head)

    def _attention(self, x: torch.Tensor, layer: LayerWeights, batch: Batch, kv: torch.Tensor, windowed: bool) -> torch.Tensor:
        c = self.config
        y = kernels.rmsnorm(x, layer.input_norm, c.rms_norm_eps)
        q = kernels.linear(y, layer.q_w, layer.q_b).view(-1, c.num_heads, c.head_dim)
        k = kernels.linear(y, layer.k_w, layer.k_b).view(-1, c.num_kv_heads, c.head_dim)
        v = kernels.linear(y, layer.v_w, layer.v_b).view(-1, c.num_kv_heads, c.head_dim)
        slots = batch.window_slots if windowed else batch.full_slots
        q = kernels.rope_append(q, k, v, self.table, batch.positions, slots, kv)
        pages = batch.window_pages if windowed else batch.full_pages
        window = c.sliding_window if windowed else None
        mixed = kernels.attention(q, kv, pages, batch.span_offsets, batch.span_starts, layer.sinks, window)
        return kernels.linear(mixed, layer.o_w, layer.o_b)

    def _experts(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        c = self.config
        y = kernels.rmsnorm(x, layer.post_norm, c.rms_norm_eps)
        experts, weights = kernels.router(y, layer.router_w, layer.router_b, c.experts_per_token)
        gate_up = (layer.gate_up_blocks, layer.gate_up_scales, layer.gate_up_b)
        down = (layer.down_blocks, layer.down_scales, layer.down_b)
        return kernels.experts(y, experts, weights, gate_up, down, c.swiglu_limit)
