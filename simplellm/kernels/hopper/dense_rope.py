"""rope_append: rotate q and k by position and write k and v into their pages, from a finished projection (many tokens).

qkv [T, Q + 2 K] bf16: heads of 64, q, then k, v. a' = a cos - b sin, b' = b cos + a sin on the halves of a head, in float32
with the table as it is, rounded once. Reads and writes T (Q + 2 K) elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.launch import launch
from simplellm.kernels.spans import Spans

TOKENS, HEADS = 4, 16  # of a program


@triton.jit(do_not_specialize=["tokens", "pages_stride"])
def rope_append_kernel(
    qkv_ptr, rope_ptr, rows_ptr, positions_ptr, counts_ptr, pages_ptr, pages_stride, kv_ptr, kv_stride, q_ptr, tokens,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[None, :, None]
    i = tl.arange(0, 32)[None, None, :]
    position = tl.load(positions_ptr + t, mask=t < tokens, other=0)
    row = tl.load(rows_ptr + t, mask=t < tokens, other=0)
    page = tl.load(pages_ptr + row * pages_stride + position // 128)
    real = (t < tl.load(counts_ptr))[:, None, None]
    slot = ((page.to(tl.int64) * (KV_HEADS * 128) + position % 128) * 64)[:, None, None]
    cos = tl.load(rope_ptr + position[:, None, None] * 64 + i)
    sin = tl.load(rope_ptr + position[:, None, None] * 64 + 32 + i)
    inside = (t < tokens)[:, None, None] & (head < Q_HEADS + 2 * KV_HEADS)
    source = qkv_ptr + t.to(tl.int64)[:, None, None] * ((Q_HEADS + 2 * KV_HEADS) * 64) + head * 64 + i
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + 32, mask=inside, other=0.0).to(tl.float32)
    turn = head < Q_HEADS + KV_HEADS
    first = tl.where(turn, a * cos - b * sin, a).to(tl.bfloat16)
    second = tl.where(turn, b * cos + a * sin, b).to(tl.bfloat16)
    to_q = q_ptr + t.to(tl.int64)[:, None, None] * (Q_HEADS * 64) + head * 64 + i
    tl.store(to_q, first, mask=inside & (head < Q_HEADS))
    tl.store(to_q + 32, second, mask=inside & (head < Q_HEADS))
    which = (head >= Q_HEADS + KV_HEADS).to(tl.int64)
    kv_head = head - Q_HEADS - which.to(tl.int32) * KV_HEADS
    to_kv = kv_ptr + slot + which * kv_stride + kv_head * (128 * 64) + i
    tl.store(to_kv, first, mask=inside & real & (head >= Q_HEADS))
    tl.store(to_kv + 32, second, mask=inside & real & (head >= Q_HEADS))


def rope_append(qkv: torch.Tensor, rope: torch.Tensor, spans: Spans, pages: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """qkv [T, Q + 2 K] -> rotated q [T, Hq, 64]; k and v of the counts[0] real tokens into kv [2, pages, Hkv, 128, 64]."""
    assert spans.work is not None and qkv.is_contiguous()
    num_tokens, kv_heads = len(qkv), kv.shape[2]
    q_heads = qkv.shape[1] // 64 - 2 * kv_heads
    q = qkv.new_empty(num_tokens, q_heads, 64)
    grid = triton.cdiv(num_tokens, TOKENS), triton.cdiv(q_heads + 2 * kv_heads, HEADS)
    launch(
        rope_append_kernel, grid, qkv, rope, spans.rows, spans.positions, spans.work.counts, pages, pages.stride(0), kv,
        kv.stride(0), q, num_tokens, Q_HEADS=q_heads, KV_HEADS=kv_heads, TOKENS=TOKENS, HEADS=HEADS, num_warps=4,
    )  # fmt: skip
    return q
