"""The ops of a layer as the model calls them, composed of the twins: residual sums and norms belong to the op behind them,
so that a GPU kernel can have them in its prologue.

`parts` [T, n, H] are what the last op adds to the residual stream x [T, H]: their sum is rounded once, then added, rounded.
"""

from __future__ import annotations

import torch

from simplellm.kernels.linear import linear_ref
from simplellm.kernels.norm import rmsnorm_ref
from simplellm.kernels.rope import rope_append_ref
from simplellm.kernels.router import router_ref
from simplellm.kernels.spans import Spans

Choices = tuple[torch.Tensor, torch.Tensor]  # experts [T, k] and their weights, best first


def embed_ref(
    tokens: torch.Tensor, newest: torch.Tensor, spans: Spans, weight: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """tokens [T], -1 for the newest token of the row (newest [rows]); weight [V, H] -> [T, H] of `dtype`."""
    return weight[torch.where(tokens < 0, newest[spans.rows], tokens)].to(dtype)


def add_ref(x: torch.Tensor, parts: torch.Tensor | None) -> torch.Tensor:
    """x [T, H] with the sum of parts [T, n, H], if there are any."""
    return x if parts is None else x + parts.double().sum(1).to(x.dtype)


def norm_qkv_ref(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor, ...],
    rope: torch.Tensor,
    spans: Spans,
    pages: torch.Tensor,
    kv: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> x with the parts added, and rotated q [T, Hq, D] of its norm; k and v go to their pages.

    weights: of q, k and v, one after another or stacked: [Q + 2 K, H] in all; rope [positions, 2, D/2]; pages [rows, P] by
    position // PAGE; kv [2, pages, Hkv, PAGE, D].
    """
    x = add_ref(x, parts)
    y = rmsnorm_ref(x, gain, eps)
    heads = torch.cat([linear_ref(y, w, b) for w, b in zip(weights, biases, strict=True)], -1).unflatten(-1, (-1, kv.shape[-1]))
    num_kv = kv.shape[2]
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
    return x, rope_append_ref(q, k, v, rope, spans, pages, kv)


def norm_router_ref(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor, Choices]:
    """-> x with the parts added, its norm y [T, H], and the experts of each token."""
    x = add_ref(x, parts)
    y = rmsnorm_ref(x, gain, eps)
    return x, y, router_ref(y, weight, bias, k)


def final_norm_ref(
    x: torch.Tensor, parts: torch.Tensor | None, gain: torch.Tensor, eps: float, outputs: torch.Tensor
) -> torch.Tensor:
    """The norm [N, H] of the rows `outputs` [N] of x with the parts added."""
    chosen = outputs.long()
    return rmsnorm_ref(add_ref(x[chosen], None if parts is None else parts[chosen]), gain, eps)
