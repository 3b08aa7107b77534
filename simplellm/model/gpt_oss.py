"""gpt-oss as arithmetic: tokens of a batch in, hidden states of the rows that draw a token, then their logits.

embed, then per layer: x += attention(norm(x)); x += experts(norm(x)); then norm and lm_head. The residual stream has the
dtype of the activations: bfloat16, as the references round, or float32. Each sum is left to the op that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from simplellm import kernels
from simplellm.config import PAGE, WINDOW, ModelConfig
from simplellm.kernels import Spans
from simplellm.model.layers import Layer
from simplellm.model.weights import Weights


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens on the device: T tokens, N rows that need logits. On a Hopper GPU all int32."""

    tokens: torch.Tensor  # [T] ids; -1 for the newest token of the row
    newest: torch.Tensor  # [rows]
    spans: Spans
    full_pages: torch.Tensor  # [rows, P] page of a row by position // PAGE, full layers
    window_pages: torch.Tensor  # [rows, P] the same, window layers
    outputs: torch.Tensor  # [N] indices into tokens


class GptOss:
    """A loaded model. `body` runs a batch over the KV pages, `head` turns hidden states into logits."""

    def __init__(self, config: ModelConfig, weights: Weights[Layer], dtype: torch.dtype, max_context: int):
        self.config, self.weights, self.dtype = config, weights, dtype
        self.rope = kernels.rope_table(config, max_context, weights.embed.device)

    def new_kv(self, num_pages: int) -> torch.Tensor:
        """The pool: [layers of a kind, k or v, num_pages, Hkv, PAGE, D]. Not initialised: only what was written is read."""
        c = self.config
        shape = (c.page_layers, 2, num_pages, c.num_kv_heads, PAGE, c.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.weights.embed.device)

    def body(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """-> hidden states [N, H] of batch.outputs, after the final norm. Writes the batch's K and V into `kv`."""
        c, spans = self.config, batch.spans
        x = kernels.embed(batch.tokens, batch.newest, spans, self.weights.embed, self.dtype)
        parts = None  # what is yet to be added to x
        place = {kind: 0 for kind in c.layer_types}
        for layer, kind in zip(self.weights.layers, c.layer_types, strict=True):
            pages, window = (batch.window_pages, c.sliding_window) if kind == WINDOW else (batch.full_pages, None)
            own = kv[place[kind]]
            place[kind] += 1
            norm = (layer.input_norm, c.rms_norm_eps)
            x, q = kernels.norm_qkv(x, parts, *norm, layer.qkv_w, layer.qkv_b, self.rope, spans, pages, own)
            mixed = kernels.attention(q, own, pages, spans, layer.sinks, window)
            parts = kernels.linear(mixed, layer.o_w, layer.o_b)[:, None]
            norm = (layer.post_norm, c.rms_norm_eps)
            x, y, route = kernels.norm_router(x, parts, *norm, layer.router_w, layer.router_b, c.experts_per_token, spans)
            parts = kernels.experts(y, route, layer.gate_up, layer.down, c.swiglu_limit)
        return kernels.final_norm(x, parts, self.weights.norm, c.rms_norm_eps, batch.outputs)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> logits [N, V] float32."""
        return kernels.lm_head(hidden, self.weights.lm_head)
