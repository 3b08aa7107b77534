"""The dense projections: y = x W^T (+ b), by dense_gemv.py or dense_ring.py for few tokens and by cuBLAS for many.

linear: x [T, K], W [N, K], b [N] -> [T, N] bf16. lm_head: logits in float32, not rounded to bf16. norm_qkv: the residual
sum and the norm before, RoPE and the append to the KV pages behind; rotation in float32 with the table unrounded, one
rounding at the end (from cuBLAS: q, k, v are rounded before it too). All move N K weights; 2 T N K FLOP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from simplellm.kernels.hopper import dense_gemv, dense_ring
from simplellm.kernels.hopper.dense_rope import rope_append
from simplellm.kernels.hopper.launch import launch, num_sms
from simplellm.kernels.hopper.norm import add_norm
from simplellm.kernels.spans import Spans


class Gemv(NamedTuple):
    """How gemv_kernel is cut: see there."""

    rows: int  # of a tile
    warps: int
    unit: int  # pieces of the next tile that are loaded together
    per_sm: int  # CTAs a multiprocessor, which loop over the tiles; 0: a tile a CTA
    maxnreg: int


class Ring(NamedTuple):
    """How ring_kernel is cut: see there."""

    rows: int  # of a tile
    warps: int
    depth: int  # stages of the ring
    per_sm: int  # CTAs a multiprocessor, which loop over the tiles


# By the op and the most tokens; beyond the last, cuBLAS, which is the faster one there.
PLANS: dict[str, dict[int, Gemv | Ring]] = {
    "qkv": {1: Gemv(16, 16, 6, 1, 128), 2: Gemv(8, 8, 6, 2, 128)},
    "linear": {2: Gemv(8, 8, 8, 2, 128), 8: Ring(16, 4, 5, 2), 16: Ring(16, 4, 10, 1)},
    "logits": {2: Gemv(8, 8, 6, 0, 128), 8: Ring(32, 4, 8, 1), 16: Ring(32, 4, 7, 1)},
}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] bf16."""
    plan = _plan("linear", len(x))
    if plan is None:
        return torch.addmm(bias, x, weight.T)
    y = x.new_empty(len(x), len(weight))
    _multiply("linear", plan, x, weight, bias, y)
    return y


def lm_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [N, H], weight [V, H] -> logits [N, V] float32."""
    plan = _plan("logits", len(x))
    if plan is None:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    logits = x.new_empty(len(x), len(weight), dtype=torch.float32)
    _multiply("logits", plan, x, weight, None, logits)
    return logits


def norm_qkv(
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
    """-> x [T, H] with parts [T, n, H] added, and rotated q [T, Hq, 64] of its norm; k and v of real tokens go to their pages.

    weights, biases: q, k and v stacked, ([Q + 2 K, H],) and ([Q + 2 K],); rope [positions, 2, 32] float32; pages [rows, P]
    int32; kv [2, pages, Hkv, 128, 64], kv[0] and kv[1] contiguous; spans with their work.
    """
    (weight,), (bias,) = weights, biases
    assert spans.work is not None and kv.shape[3:] == (128, 64) and kv[0].is_contiguous() and rope.is_contiguous()
    assert spans.rows.dtype == spans.positions.dtype == pages.dtype == torch.int32 and pages.stride(1) == 1
    plan = _plan("qkv", len(x))
    if plan is None:
        x, y = add_norm(x, parts, gain, eps)
        return x, rope_append(torch.addmm(bias, y, weight.T), rope, spans, pages, kv)
    assert gain.is_contiguous() and (parts is None or (parts.is_contiguous() and parts.shape[::2] == x.shape))
    kv_heads = kv.shape[2]
    q = x.new_empty(len(x), len(weight) // 64 - 2 * kv_heads, 64)
    new = x if parts is None else torch.empty_like(x)
    rotation = rope, spans.rows, spans.positions, spans.work.counts, pages, pages.stride(0), kv, kv.stride(0)
    _multiply("qkv", plan, x, weight, bias, q, (parts, gain, new, eps), rotation, kv_heads)
    return new, q


def _plan(kind: str, num_tokens: int) -> Gemv | Ring | None:
    return next((plan for most, plan in PLANS[kind].items() if num_tokens <= most), None)


def _multiply(
    kind: str,
    plan: Gemv | Ring,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    norm: tuple[Any, ...] = (None, None, None, 0.0),
    rotation: tuple[Any, ...] = (None, None, None, None, None, 0, None, 0),
    kv_heads: int = 0,
) -> None:
    num_tokens, (rows, k) = len(x), weight.shape
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype == torch.bfloat16
    assert rows % plan.rows == 0 and k % 64 == 0
    tiles = rows // plan.rows
    grid = min(tiles, plan.per_sm * num_sms()) if plan.per_sm else tiles
    if isinstance(plan, Gemv):
        launch(
            dense_gemv.gemv_kernel, (grid,), weight, bias, x, y, *norm, *rotation, M=rows, K=k, T=num_tokens, KIND=kind,
            PARTS=0 if norm[0] is None else norm[0].shape[1], KV_HEADS=kv_heads, ROWS=plan.rows, U=plan.unit,
            LOOP=grid < tiles, num_warps=plan.warps, maxnreg=plan.maxnreg,
        )  # fmt: skip
    else:
        assert kind != "qkv"
        half = TensorDescriptor.from_tensor(weight, [plan.rows // 2, 64 * plan.warps], gl.NVMMASharedLayout(128, 16, 2))
        launch(
            dense_ring.ring_kernel, (grid,), half, bias, x, y, num_tokens, M=rows, K=k, N=8 if num_tokens <= 8 else 16,
            KIND=kind, DEPTH=plan.depth, num_warps=plan.warps, maxnreg=128,
        )  # fmt: skip
