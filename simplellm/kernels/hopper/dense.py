"""The dense projections: y = x W^T (+ b), by dense_stream.py for few tokens and by cuBLAS for many.

linear: x [T, K], W [N, K], b [N] -> [T, N] bf16. lm_head: logits in float32, not rounded to bf16. norm_qkv: the residual
sum and the norm before, RoPE and the append to the KV pages behind; rotation in float32 with the table unrounded, one
rounding at the end (from cuBLAS: q, k, v are rounded before it too). All move N K weights; 2 T N K FLOP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from triton import cdiv

from simplellm.kernels.hopper import dense_stream
from simplellm.kernels.hopper.dense_rope import rope_append
from simplellm.kernels.hopper.launch import launch, num_sms
from simplellm.kernels.hopper.norm import add_norm
from simplellm.kernels.spans import Spans

MAX_STREAMED, MAX_STREAMED_LOGITS = 2, 0  # tokens; above, cuBLAS, which is the faster one
MAX_FUSED = 1  # tokens whose residual sum and norm every CTA redoes; above, a kernel before it does them once
SHARED = 112 << 10  # bytes of shared memory a CTA may have if two are to fit a multiprocessor


@dataclass(frozen=True, slots=True)
class Plan:
    """How dense_kernel is cut: see there. `per_sm` CTAs are resident on a multiprocessor."""

    rows: int  # of a tile
    warps: int
    wk: int  # warps along k
    unit: int
    ahead: int
    per_sm: int
    maxnreg: int


PLANS = {  # by token columns
    8: Plan(16, 8, 8, 2, 3, 2, 128),
    16: Plan(32, 8, 8, 2, 2, 2, 128),
    32: Plan(64, 8, 2, 2, 2, 2, 128),
    64: Plan(128, 8, 1, 1, 3, 2, 128),
}
FUSED = Plan(32, 8, 8, 2, 2, 2, 128)
LOGITS = {8: Plan(32, 8, 8, 2, 2, 2, 128), 16: Plan(32, 8, 8, 2, 2, 2, 128), 32: Plan(64, 16, 4, 1, 2, 1, 128)}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] bf16."""
    if len(x) > MAX_STREAMED:
        return torch.addmm(bias, x, weight.T)
    y = x.new_empty(len(x), len(weight))
    _stream("linear", x, weight, bias, y)
    return y


def lm_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [N, H], weight [V, H] -> logits [N, V] float32."""
    if len(x) > MAX_STREAMED_LOGITS:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    logits = x.new_empty(len(x), len(weight), dtype=torch.float32)
    _stream("logits", x, weight, None, logits)
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
    num_tokens, kv_heads = len(x), kv.shape[2]
    fused = num_tokens <= MAX_FUSED
    if not fused:
        x, y = add_norm(x, parts, gain, eps)
        if num_tokens > MAX_STREAMED:
            return x, rope_append(torch.addmm(bias, y, weight.T), rope, spans, pages, kv)
    q = x.new_empty(num_tokens, len(weight) // 64 - 2 * kv_heads, 64)
    rotation = rope, spans.rows, spans.positions, spans.work.counts, pages, pages.stride(0), kv, kv.stride(0)
    if not fused:
        _stream("qkv", y, weight, bias, q, rotation=rotation, kv_heads=kv_heads)
        return x, q
    new = x if parts is None else torch.empty_like(x)
    assert gain.is_contiguous() and (parts is None or (parts.is_contiguous() and parts.shape[::2] == x.shape))
    _stream("qkv", x, weight, bias, q, (parts, gain, new, eps), rotation, kv_heads)
    return new, q


def _stream(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    norm: tuple[Any, ...] = (None, None, None, 0.0),
    rotation: tuple[Any, ...] = (None, None, None, None, None, 0, None, 0),
    kv_heads: int = 0,
) -> None:
    num_tokens = len(x)
    fused = norm[1] is not None
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype == torch.bfloat16
    columns = next(n for n in PLANS if num_tokens <= n)
    plan, tiles, splits, grid = _cut(kind, columns, fused, *weight.shape)
    workspace = arrived = None
    if splits > 1:
        workspace = x.new_empty(tiles * splits * plan.rows * columns, dtype=torch.float32)
        arrived = _arrived(x.device)
    launch(
        dense_stream.dense_kernel, (grid,), weight, bias, x, y, num_tokens, *norm, *rotation, workspace, arrived,
        M=weight.shape[0], K=weight.shape[1], N=columns, KIND=kind, PARTS=0 if norm[0] is None else norm[0].shape[1],
        NT=1 << (num_tokens - 1).bit_length() if fused else 0, KV_HEADS=kv_heads, ROWS=plan.rows, WK=plan.wk, U=plan.unit,
        AHEAD=plan.ahead, SPLITS=splits, num_warps=plan.warps, maxnreg=plan.maxnreg,
    )  # fmt: skip


@cache
def _cut(kind: str, columns: int, fused: bool, rows: int, k: int) -> tuple[Plan, int, int, int]:
    """(plan, tiles of rows, pieces of k, CTAs): as few pieces as let plan.per_sm CTAs share a multiprocessor."""
    assert rows % 16 == 0 and k % 64 == 0
    plan = FUSED if fused else LOGITS[columns] if kind == "logits" else PLANS[columns]
    tiles = cdiv(rows, plan.rows)
    blocks, splits = plan.unit * plan.wk, 1
    while kind != "logits" and not fused:
        units = cdiv(cdiv(k // 32, splits), blocks)
        if units * blocks * columns * 64 + plan.wk * plan.rows * columns * 4 <= SHARED:
            break
        splits += 1
    units = cdiv(cdiv(k // 32, splits), blocks)
    plan = replace(plan, ahead=min(plan.ahead, units))
    return plan, tiles, splits, min(tiles, num_sms() * plan.per_sm) if kind == "logits" else tiles * splits


@cache
def _arrived(device: torch.device) -> torch.Tensor:
    """Counters of dense_kernel, which leaves them at zero; one launch uses them at a time."""
    return torch.zeros(4096, dtype=torch.int32, device=device)
