"""Attention of chunks (many new tokens a sequence, their K and V already in the pages), in Gluon for Hopper.

z_j = q.k_j / 8 over the keys a query sees; out = sum_j exp(z_j) v_j / (sum_j exp(z_j) + exp(sink)), all in base 2, one fused
multiply-add and one ex2 a score. An item is a tile of work.tiles (at most TILE rows of a sequence) and a query head, head
fastest: the 8 heads of a KV head share the L2. Reads 256 bytes a key of each item, mostly from there; 4 * 64 FLOP a score.
Slots of the last page after the chunk must hold finite numbers: their weight is 0, but they are multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.attention_consumer import (
    FIELDS,
    NWG,
    PAGE,
    ROWS,
    D,
    consumer,
    flagged,
    item_count,
    item_of,
    page_range,
)
from simplellm.kernels.hopper.launch import launch, num_sms
from simplellm.kernels.spans import Spans

# One CTA a SM, persistent. A producer warp issues TMA for Q (two buffers) and a ring of ST pages of K and V; NWG consumer
# warpgroups own 64 rows each and walk the same pages. They fall out of step by themselves and fill one another's gaps; taking
# turns by barriers gained nothing.

CONFIG: dict[str, Any] = {"ST": 4, "CONSUMER_REGISTERS": 160, "PRODUCER_REGISTERS": 24}


@gluon.jit
def producer(data, HQ: gl.constexpr, HK: gl.constexpr, ST: gl.constexpr, WINDOW: gl.constexpr, REDO: gl.constexpr):
    (q_desc, k_desc, v_desc, q_s, q_full, q_empty, ring, tiles, pages, pages_stride, sinks, out, redo, n_items) = data
    k_s, v_s, k_full, v_full, empty = ring
    c = 0
    qc = 0
    for k in range(item_count(n_items)):
        item = item_of(k)
        run = True
        if REDO:
            run = flagged(redo, item)
        if run:
            meta = tiles + (item // HQ) * FIELDS
            head = item % HQ
            row0 = gl.load(meta)
            n_rows = gl.load(meta + 1)
            pos0 = gl.load(meta + 2)
            page = pages + gl.load(meta + 3).to(gl.int64) * pages_stride
            lo, hi = page_range(pos0, n_rows, WINDOW)
            qs = qc % 2
            mbarrier.wait(q_empty.index(qs), ((qc // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(qs), NWG * q_desc.block_type.nbytes)
            for g in gl.static_range(NWG):
                tma.async_copy_global_to_shared(q_desc, [row0 + g * ROWS, head * D], q_full.index(qs), q_s.index(qs * NWG + g))
            qc += 1
            nxt = gl.load(page + hi - 1)
            for t in range(hi - lo):
                kv_row = (nxt * HK + head // (HQ // HK)) * PAGE
                nxt = gl.load(page + gl.maximum(hi - 2 - t, 0))
                s = c % ST
                ph = ((c // ST) & 1) ^ 1
                mbarrier.wait(empty.index(s), ph)
                mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, [kv_row, 0], k_full.index(s), k_s.index(s))
                mbarrier.expect(v_full.index(s), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(v_desc, [kv_row, 0], v_full.index(s), v_s.index(s))
                c += 1


@gluon.jit(repr=lambda s: "attention_chunk_window" if s.constants["WINDOW"] else "attention_chunk_full")
def _chunk(
    q_desc,
    k_desc,
    v_desc,
    counts,
    tiles,
    pages,
    pages_stride,
    sinks,
    out,
    redo,
    HQ: gl.constexpr,
    HK: gl.constexpr,
    ST: gl.constexpr,
    WINDOW: gl.constexpr,
    FROZEN: gl.constexpr,
    REDO: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2 * NWG, ROWS, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [ST, PAGE, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [ST, PAGE, D], v_desc.layout)
    BL: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BL)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BL)
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=NWG)
    for i in gl.static_range(ST):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NWG)
    gdc_wait()
    gdc_launch_dependents()
    n_items = gl.load(counts + 3) * HQ
    ring = (k_s, v_s, k_full, v_full, empty)
    data = (q_desc, k_desc, v_desc, q_s, q_full, q_empty, ring, tiles, pages, pages_stride, sinks, out, redo, n_items)
    gl.warp_specialize(
        [
            (consumer, (data, HQ, HK, ST, WINDOW, FROZEN, REDO, 0)),
            (consumer, (data, HQ, HK, ST, WINDOW, FROZEN, REDO, 1)),
            (consumer, (data, HQ, HK, ST, WINDOW, FROZEN, REDO, 2)),
            (producer, (data, HQ, HK, ST, WINDOW, REDO)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _pages_of(side: torch.Tensor) -> TensorDescriptor:
    """A box is one page of one KV head: 16 KB in one piece."""
    layout = gl.NVMMASharedLayout.get_default_for([PAGE.value, D.value], gl.bfloat16)
    return TensorDescriptor.from_tensor(side.view(-1, D.value), [PAGE.value, D.value], layout)


def chunk(
    q: torch.Tensor,
    kv: torch.Tensor,
    pages: torch.Tensor,
    spans: Spans,
    sinks: torch.Tensor,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Rows num_decodes .. num_tokens - 1 of out [T, Hq * 64]; the others are left alone. Arguments as of `attention`."""
    work = spans.work
    assert work is not None
    num_heads, num_kv = q.shape[1], kv.shape[2]
    assert kv[0].numel() < 2**31 * D.value, "TMA counts rows in int32"
    layout = gl.NVMMASharedLayout.get_default_for([ROWS.value, D.value], gl.bfloat16)
    # Not kept for the next call: a descriptor holds its tensor, and would keep the pool alive. Rows beyond T read as zero.
    q_desc = TensorDescriptor.from_tensor(q.view(-1, num_heads * D.value), [ROWS.value, D.value], layout)
    args = (q_desc, _pages_of(kv[0]), _pages_of(kv[1]), work.counts, work.tiles, pages, pages.stride(0), sinks, out)
    sizes: dict[str, Any] = {"HQ": num_heads, "HK": num_kv, "WINDOW": window or 0, **CONFIG}
    if window is not None:  # at most three pages, nearly all of them masked
        launch(_chunk, (num_sms(),), *args, None, FROZEN=False, REDO=False, **sizes)
        return
    redo = torch.empty(work.tiles.shape[0], num_heads, NWG.value, dtype=torch.int32, device=q.device)
    launch(_chunk, (num_sms(),), *args, redo, FROZEN=True, REDO=False, **sizes)
    launch(_chunk, (num_sms(),), *args, redo, FROZEN=False, REDO=True, **sizes)
