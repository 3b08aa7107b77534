"""Attention of decodes as in attention_decode.py, with the keys read while the kernel before still runs. Plain Triton.

z_j = q.k_j / 8 over the keys a token sees; out = sum_j exp(z_j) v_j / (sum_j exp(z_j) + exp(sink)), all in base 2. A CTA takes
one KV head and the keys of one item of work.items (full layers) or of a token's window. Each warp has keys of its own and
its own maximum, sum and acc, added once at the end; so a step has no exchange between warps.

Before the wait for the kernel before: the item, the page numbers, and the first KEYS keys and values but for the token's own.
That is sound since every kernel waits before it lets its successor start: at this kernel's start only the one before it may
be running, and that writes q, and K and V of this step's tokens. Items, positions, rows and page tables are older, and a
decode's other keys are of earlier steps: a page can be shared from the step after the one that writes it. The token's own key
and value are added at the end by themselves.

A token in several pieces: each leaves (m, total, acc) in float32. "count": the last to arrive adds them, in order of their
numbers. "spin": the last by number does; a value not yet there is EMPTY, bits that no arithmetic yields, so neither fence nor
counter is needed; it waits for CTAs of lower ids only, and leaves EMPTY behind. Reads 256 bytes a key and KV head, once.
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
FLOOR = tl.constexpr(-1e20)  # a warp's maximum before it has seen a key
EMPTY = tl.constexpr(-1)  # as int32

# KEYS before the wait, then STEP at a time in a ring of STAGES - 1; STAGES 0: 2 KEYS before the wait, then KEYS at a time, two
# steps ahead in registers. MERGED pieces are added at a time.
FULL: dict[str, Any] = {"KEYS": 128, "STEP": 64, "STAGES": 4, "MERGED": 16, "SPIN": True, "num_warps": 4}
WINDOW_ONLY: dict[str, Any] = {"KEYS": 128, "STEP": 64, "STAGES": 1, "MERGED": 1, "SPIN": False, "num_warps": 4}


@triton.jit
def _load(ptr, page, h, slot, local, seen, KV_HEADS: tl.constexpr):
    """-> [warps, keys, D] of a page's slots slot + local [warps, keys]."""
    base = ptr + ((page.to(tl.int64) * KV_HEADS + h) * PAGE + slot) * D  # one address, so that the others are small offsets
    return tl.load(base + local[:, :, None] * D + tl.arange(0, D)[None, None, :], mask=seen[:, :, None], other=0.0)


@triton.jit
def _load_window(ptr, pages, h, slots, seen, KV_HEADS: tl.constexpr):
    """-> [warps, keys, D] of the slots [warps, keys], each of its own page."""
    at = ((pages.to(tl.int64) * KV_HEADS + h) * PAGE + slots) * D
    return tl.load(ptr + at[:, :, None] + tl.arange(0, D)[None, None, :], mask=seen[:, :, None], other=0.0)


@triton.jit
def _step(q, k, v, seen, m, total, acc):
    """Online softmax of each warp: q [warps, ROWS, D], k and v [warps, keys, D], seen [warps, keys]."""
    scores = tl.where(seen[:, None, :], tl.dot(q, tl.permute(k, (0, 2, 1))) * SCALE, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, 2))
    p = tl.exp2(scores - m_new[:, :, None])
    alpha = tl.exp2(m - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, :, None])
    return m_new, total * alpha + tl.sum(p, 2), acc


@triton.jit
def _join(q, k, v, own, m, total, acc):
    """All warps' results, and where `own` the token's own k and v [D] -> m, total [ROWS], acc [ROWS, D]."""
    score = tl.where(own, tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * SCALE, -float("inf"))
    m_all = tl.maximum(tl.max(m, 0), score)
    weight = tl.exp2(m - m_all[None, :])
    p = tl.exp2(score - m_all)
    acc = tl.sum(weight[:, :, None] * acc, 0) + p[:, None] * v.to(tl.float32)[None, :]
    return m_all, tl.sum(weight * total, 0) + p, acc


@triton.jit
def _write(out, sinks, token, h, m, total, acc, KV_HEADS: tl.constexpr):
    """The sink joins the denominator, once; the 8 heads of acc [8 or ROWS, D] go to row `token` of out."""
    head = tl.arange(0, acc.shape[0])
    real = head < GROUP
    sink = tl.load(sinks + h * GROUP + head, mask=real, other=0.0).to(tl.float32)
    denominator = total + tl.exp2(sink * LOG2E - m)
    at = (token.to(tl.int64) * KV_HEADS + h) * (GROUP * D) + head[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at, (acc / denominator[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _missing(values):
    return tl.max((values.to(tl.int32, bitcast=True) == EMPTY).to(tl.int32))


@triton.jit
def _merge(out, sinks, token, h, accs, sums, base, splits, KV_HEADS: tl.constexpr, MERGED: tl.constexpr, SPIN: tl.constexpr):
    """Adds all pieces of a token and KV head, and writes. Loads pass the L1 by: other SMs wrote the values."""
    heads = tl.arange(0, GROUP)
    pieces = tl.arange(0, MERGED)
    m = tl.full([GROUP], FLOOR, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, D], tl.float32)
    for first in range(0, splits, MERGED):
        there = first + pieces < splits
        rows = ((base + first + pieces) * KV_HEADS + h)[:, None] * GROUP + heads[None, :]
        places = rows[:, :, None] * D + tl.arange(0, D)[None, None, :]
        m_part = tl.zeros([MERGED, GROUP], tl.float32)
        total_part = tl.zeros([MERGED, GROUP], tl.float32)
        part = tl.zeros([MERGED, GROUP, D], tl.float32)
        missing = 1
        while missing > 0:
            m_part = tl.load(sums + rows * 2, mask=there[:, None], other=FLOOR, volatile=True)
            total_part = tl.load(sums + rows * 2 + 1, mask=there[:, None], other=0.0, volatile=True)
            part = tl.load(accs + places, mask=there[:, None, None], other=0.0, volatile=True)
            missing = 0
            if SPIN:
                missing = _missing(m_part) + _missing(total_part) + _missing(part)
        if SPIN:
            empty = tl.full([MERGED, GROUP], EMPTY, tl.int32).to(tl.float32, bitcast=True)
            tl.store(sums + rows * 2, empty, mask=there[:, None])
            tl.store(sums + rows * 2 + 1, empty, mask=there[:, None])
            empties = tl.full([MERGED, GROUP, D], EMPTY, tl.int32).to(tl.float32, bitcast=True)
            tl.store(accs + places, empties, mask=there[:, None, None])
        m_new = tl.maximum(m, tl.max(m_part, 0))
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(m_part - m_new[None, :])
        total = total * alpha + tl.sum(weight * total_part, 0)
        acc = acc * alpha[:, None] + tl.sum(weight[:, :, None] * part, 0)
        m = m_new
    _write(out, sinks, token, h, m, total, acc, KV_HEADS)


@triton.jit(
    do_not_specialize=["pages_stride"], repr=lambda s: "attention_window" if s.constants["WINDOW"] else "attention_full"
)
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
    WARPS: tl.constexpr,
    KEYS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    MERGED: tl.constexpr,
    SPIN: tl.constexpr,
):
    i = tl.program_id(0)
    h = tl.program_id(1)
    key = tl.arange(0, WARPS)[:, None] * (KEYS // WARPS) + tl.arange(0, KEYS // WARPS)[None, :]
    if WINDOW:
        live = i < tl.load(counts + 1)
        token = i
        row = tl.load(rows + i)  # of padding 0, as is its position
        end = tl.load(positions + i) + 1
        table = pages + row.to(tl.int64) * pages_stride
        limit = end - 1
        number = 0
        splits = 1
        key += tl.maximum(end - WINDOW, 0)
        seen = (key < limit) & live
        page = tl.load(table + key // PAGE, mask=seen, other=0)
        k = _load_window(k_ptr, page, h, key % PAGE, seen, KV_HEADS)
        v = _load_window(v_ptr, page, h, key % PAGE, seen, KV_HEADS)
    else:  # what lies beyond the true items may be anything
        live = i < tl.load(counts + 2)
        item = items + i * FIELDS
        token = tl.load(item)
        first = tl.load(item + 1) * PAGE
        last = tl.load(item + 2) * PAGE
        number = tl.load(item + 3)
        splits = tl.load(item + 4)
        base = tl.load(item + 5)
        row = tl.load(item + 6)
        end = tl.load(item + 7)
        table = pages + row.to(tl.int64) * pages_stride
        limit = tl.minimum(last, end - 1)
        seen = (first + key < limit) & live
        page = tl.load(table + first // PAGE, mask=live, other=0)
        k = _load(k_ptr, page, h, 0, key, seen, KV_HEADS)
        v = _load(v_ptr, page, h, 0, key, seen, KV_HEADS)
    own = number == splits - 1
    own_page = tl.load(table + (end - 1) // PAGE, mask=live & own, other=0)
    if not WINDOW and STAGES == 0:
        next_seen = (first + KEYS + key < limit) & live
        page = tl.load(table + tl.minimum(first + KEYS, end - 1) // PAGE, mask=live, other=0)
        next_k = _load(k_ptr, page, h, KEYS % PAGE, key, next_seen, KV_HEADS)
        next_v = _load(v_ptr, page, h, KEYS % PAGE, key, next_seen, KV_HEADS)
        page = tl.load(table + tl.minimum(first + 2 * KEYS, end - 1) // PAGE, mask=live, other=0)
    gdc_wait()
    gdc_launch_dependents()
    if not live:
        return

    head = tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    at = (token.to(tl.int64) * KV_HEADS + h) * (GROUP * D) + head[:, None] * D + dim[None, :]
    q = tl.load(q_ptr + at, mask=(head < GROUP)[:, None], other=0.0)
    copies = at[None, :, :] + tl.zeros([WARPS, 1, 1], tl.int64)
    q_warps = tl.load(q_ptr + copies, mask=(head < GROUP)[None, :, None], other=0.0)
    own_at = ((own_page.to(tl.int64) * KV_HEADS + h) * PAGE + (end - 1) % PAGE) * D + dim
    own_k = tl.load(k_ptr + own_at, mask=(dim < D) & own, other=0.0)
    own_v = tl.load(v_ptr + own_at, mask=(dim < D) & own, other=0.0)
    m = tl.full([WARPS, ROWS], FLOOR, tl.float32)
    total = tl.zeros([WARPS, ROWS], tl.float32)
    acc = tl.zeros([WARPS, ROWS, D], tl.float32)
    if not WINDOW and STAGES == 0:
        for start in range(first, limit, KEYS):
            m, total, acc = _step(q_warps, k, v, start + key < limit, m, total, acc)
            k = next_k
            v = next_v
            coming = start + 2 * KEYS
            next_k = _load(k_ptr, page, h, coming % PAGE, key, coming + key < limit, KV_HEADS)
            next_v = _load(v_ptr, page, h, coming % PAGE, key, coming + key < limit, KV_HEADS)
            page = tl.load(table + tl.minimum(start + 3 * KEYS, end - 1) // PAGE)
    else:
        m, total, acc = _step(q_warps, k, v, seen, m, total, acc)
    if not WINDOW and STAGES > 0:
        slot = tl.arange(0, WARPS)[:, None] * (STEP // WARPS) + tl.arange(0, STEP // WARPS)[None, :]
        page = tl.load(table + tl.minimum(first + KEYS, end - 1) // PAGE)
        for start in tl.range(first + KEYS, limit, STEP, num_stages=STAGES):
            inside = start + slot < limit
            next_k = _load(k_ptr, page, h, start % PAGE, slot, inside, KV_HEADS)
            next_v = _load(v_ptr, page, h, start % PAGE, slot, inside, KV_HEADS)
            m, total, acc = _step(q_warps, next_k, next_v, inside, m, total, acc)
            page = tl.load(table + tl.minimum(start + STEP, limit - 1) // PAGE)
    m_all, total_all, acc_all = _join(q, own_k, own_v, own, m, total, acc)

    if splits == 1:
        _write(out, sinks, token, h, m_all, total_all, acc_all, KV_HEADS)
    elif not WINDOW:
        place = ((base + number) * KV_HEADS + h) * GROUP + head
        tl.store(sums + place * 2, m_all, mask=head < GROUP)
        tl.store(sums + place * 2 + 1, total_all, mask=head < GROUP)
        tl.store(accs + place[:, None] * D + dim[None, :], acc_all, mask=(head < GROUP)[:, None])
        if SPIN:
            if own:
                _merge(out, sinks, token, h, accs, sums, base, splits, KV_HEADS, MERGED, SPIN)
        else:
            tl.debug_barrier()  # the stores of all threads come before the release
            counter = arrived + base * KV_HEADS + h
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)
                _merge(out, sinks, token, h, accs, sums, base, splits, KV_HEADS, MERGED, SPIN)


@cache
def _workspace(
    device: torch.device, num_slots: int, num_kv: int, spin: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of pieces, with `spin` EMPTY between uses, and the counters, then zero. Kept: graphs hold the addresses."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "run once before the capture: this memory is not the graph's"
    accs = torch.full((num_slots, num_kv, GROUP.value, D.value), EMPTY.value, dtype=torch.int32, device=device)
    sums = torch.full((num_slots, num_kv, GROUP.value, 2), EMPTY.value, dtype=torch.int32, device=device)
    counters = torch.zeros(num_slots, num_kv, dtype=torch.int32, device=device)
    return accs.view(torch.float32), sums.view(torch.float32), counters


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

    Calls share one workspace per number of items: they must follow one another, as on one stream. Two kernels at least lie
    between the writing of work, rows, positions or pages and this.
    """
    work = spans.work
    assert work is not None
    num_kv = kv.shape[2]
    num_items = work.items.shape[0]
    options = FULL if window is None else WINDOW_ONLY
    workspace: tuple[torch.Tensor | None, ...] = (None, None, None)
    if window is None:
        workspace = _workspace(q.device, triton.next_power_of_2(num_items), num_kv, options["SPIN"])
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
        WARPS=options["num_warps"],
        **options,
    )
