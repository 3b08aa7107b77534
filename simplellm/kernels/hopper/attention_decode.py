"""Attention of decodes (one new token a sequence, its K and V already in the pages), split over the keys. Plain Triton.

z_j = q.k_j / 8 over the keys a token sees; out = sum_j exp(z_j) v_j / (sum_j exp(z_j) + exp(sink)), all in base 2. A CTA takes
one KV head and the keys of one item of work.items (full layers) or of a token's window; its 8 query heads are half of M = 16.
Of a token in several pieces each leaves (m, total, acc) in float32; the last to arrive adds them in order of their numbers, so
the result does not depend on who is last. Reads 256 bytes a key and KV head, once; of keys out of sight nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.launch import launch
from simplellm.kernels.spans import ITEM, Spans

D = tl.constexpr(64)
PAGE = tl.constexpr(128)
GROUP = tl.constexpr(8)  # query heads of a KV head
ROWS = tl.constexpr(16)  # the least M of an MMA: rows GROUP and up are zero and nobody reads them
LOG2E = tl.constexpr(1.4426950408889634)
SCALE = tl.constexpr(0.125 * 1.4426950408889634)  # of q.k, in base 2
FIELDS = tl.constexpr(ITEM)
MERGED = tl.constexpr(8)  # pieces added at a time, their loads in flight together; 16 would take 152 registers, a CTA a SM less

FULL: dict[str, Any] = {"KEYS": 64, "STAGES": 4, "num_warps": 2}  # keys a step; steps in the ring, plus one
ONE_STEP: dict[str, Any] = {"KEYS": 128, "STAGES": 1, "num_warps": 4}  # of a window


@triton.jit
def _step(q, k, v, seen, m, total, acc):
    """Online softmax over one block of keys, at least one of them in sight: q [ROWS, D], k and v [keys, D], seen [keys]."""
    scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * SCALE, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_new, total * alpha + tl.sum(p, 1), acc


@triton.jit
def _write(out, sink, token, h, m, total, acc, KV_HEADS: tl.constexpr):
    """The sink [8 or ROWS] joins the denominator, once; the 8 heads of acc [8 or ROWS, D] go to row `token` of out."""
    head = tl.arange(0, acc.shape[0])
    real = head < GROUP
    denominator = total + tl.exp2(sink.to(tl.float32) * LOG2E - m)
    at = (token.to(tl.int64) * KV_HEADS + h) * (GROUP * D) + head[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at, (acc / denominator[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _merge(out, sink, token, h, accs, sums, base, splits, KV_HEADS: tl.constexpr):
    """Adds all pieces of a token and KV head, and writes. Loads pass the L1 by: other SMs wrote the values."""
    heads = tl.arange(0, GROUP)
    pieces = tl.arange(0, MERGED)
    m = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, D], tl.float32)
    for first in range(0, splits, MERGED):
        there = first + pieces < splits
        rows = ((base + first + pieces) * KV_HEADS + h)[:, None] * GROUP + heads[None, :]
        places = rows[:, :, None] * D + tl.arange(0, D)[None, None, :]
        m_part = tl.load(sums + rows * 2, mask=there[:, None], other=-float("inf"), cache_modifier=".cg")
        total_part = tl.load(sums + rows * 2 + 1, mask=there[:, None], other=0.0, cache_modifier=".cg")
        part = tl.load(accs + places, mask=there[:, None, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(m_part, 0))
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(m_part - m_new[None, :])
        total = total * alpha + tl.sum(weight * total_part, 0)
        acc = acc * alpha[:, None] + tl.sum(weight[:, :, None] * part, 0)
        m = m_new
    _write(out, sink, token, h, m, total, acc, KV_HEADS)


@triton.jit(repr=lambda s: "attention_window" if s.constants["WINDOW"] else "attention_full")
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    pages,
    pages_stride,
    rows,
    positions,
    counts,
    items,
    sinks,
    out,
    accs,
    sums,
    arrived,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: a full layer
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    i = tl.program_id(0)
    h = tl.program_id(1)
    head = tl.arange(0, ROWS)
    real = head < GROUP
    sink = tl.load(sinks + h * GROUP + head, mask=real, other=0.0)
    sink_merged = tl.load(sinks + h * GROUP + tl.arange(0, GROUP))
    gdc_wait()
    if not WINDOW:
        gdc_launch_dependents()
    token = i
    splits = 1
    if WINDOW:  # read whether it is a true item or not: one trip to memory together with the count
        row = tl.load(rows + i)
        end = tl.load(positions + i) + 1
    else:
        item = items + i * FIELDS
        token = tl.load(item)
        first = tl.load(item + 1) * PAGE
        last = tl.load(item + 2) * PAGE
        number = tl.load(item + 3)
        splits = tl.load(item + 4)
        base = tl.load(item + 5)
        row = tl.load(item + 6)
        end = tl.load(item + 7)
    if i >= tl.load(counts + (1 if WINDOW else 2)):
        return
    table = pages + row.to(tl.int64) * pages_stride
    dim = tl.arange(0, D)
    own = (token.to(tl.int64) * KV_HEADS + h) * (GROUP * D)
    q = tl.load(q_ptr + own + head[:, None] * D + dim[None, :], mask=real[:, None], other=0.0)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)

    if WINDOW:  # one block, which may lie in two pages
        key = tl.maximum(end - WINDOW, 0) + tl.arange(0, PAGE)
        seen = key < end
        page = tl.load(table + key // PAGE, mask=seen, other=0)
        at = ((page.to(tl.int64) * KV_HEADS + h) * PAGE + key % PAGE)[:, None] * D + dim[None, :]
        k = tl.load(k_ptr + at, mask=seen[:, None], other=0.0)
        v = tl.load(v_ptr + at, mask=seen[:, None], other=0.0)
        m, total, acc = _step(q, k, v, seen, m, total, acc)
    else:
        last = tl.minimum(last, end)
        block = tl.arange(0, KEYS)
        page = tl.load(table + first // PAGE)
        for start in tl.range(first, last, KEYS, num_stages=STAGES):
            at = ((page.to(tl.int64) * KV_HEADS + h) * PAGE + start % PAGE) * D + block[:, None] * D + dim[None, :]
            seen = start + block < last
            k = tl.load(k_ptr + at, mask=seen[:, None], other=0.0)
            v = tl.load(v_ptr + at, mask=seen[:, None], other=0.0)
            m, total, acc = _step(q, k, v, seen, m, total, acc)
            page = tl.load(table + tl.minimum(start + KEYS, last - 1) // PAGE)

    if WINDOW:  # the weights of the kernel behind, on their way sooner, would come before the keys
        gdc_launch_dependents()
    if splits == 1:
        _write(out, sink, token, h, m, total, acc, KV_HEADS)
    elif not WINDOW:
        slot = ((base + number) * KV_HEADS + h) * GROUP + head
        tl.store(sums + slot * 2, m, mask=real)
        tl.store(sums + slot * 2 + 1, total, mask=real)
        tl.store(accs + slot[:, None] * D + dim[None, :], acc, mask=real[:, None])
        tl.debug_barrier()  # the stores of all threads come before the release
        counter = arrived + base * KV_HEADS + h
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            tl.store(counter, 0)
            _merge(out, sink_merged, token, h, accs, sums, base, splits, KV_HEADS)


@cache
def _workspace(device: torch.device, num_slots: int, num_kv: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of pieces, and the counters, which each use leaves at zero. Kept for good: captured graphs hold the addresses."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "run once before the capture: this memory is not the graph's"
    accs = torch.empty(num_slots, num_kv, GROUP.value, D.value, dtype=torch.float32, device=device)
    sums = torch.empty(num_slots, num_kv, GROUP.value, 2, dtype=torch.float32, device=device)
    return accs, sums, torch.zeros(num_slots, num_kv, dtype=torch.int32, device=device)


def decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    pages: torch.Tensor,
    spans: Spans,
    sinks: torch.Tensor,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Rows 0 .. num_decodes - 1 of out [T, Hq * 64]; the others are left alone. Arguments as of `attention`.

    Calls share one workspace per number of items: they must follow one another, as on one stream.
    """
    work = spans.work
    assert work is not None
    num_kv = kv.shape[2]
    num_items = work.items.shape[0]
    workspace: tuple[torch.Tensor | None, ...] = (None, None, None)
    if window is None:
        workspace = _workspace(q.device, triton.next_power_of_2(num_items), num_kv)
    launch(
        _decode,
        (num_items if window is None else q.shape[0], num_kv),
        q,
        kv[0],
        kv[1],
        pages,
        pages.stride(0),
        spans.rows,
        spans.positions,
        work.counts,
        work.items if window is None else None,
        sinks,
        out,
        *workspace,
        KV_HEADS=num_kv,
        WINDOW=window or 0,
        **(FULL if window is None else ONE_STEP),
    )
