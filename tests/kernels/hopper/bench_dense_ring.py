# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""A candidate for dense_ring.py, which does QKV too: a stage is one TMA box; next to the product's plans and cuBLAS.

    python -m tests.kernels.hopper.bench_dense_ring

Weights are seen as [K / 64, groups, 2, GROUP, 64], groups of 2 GROUP rows of which i and i + GROUP are a pair: of "qkv" a
head's as RoPE turns them, else a tile's. A stage is [WK, 1, 2, ROWS / 2, 64] of that, in shared memory as in dense_ring.py but
for the order of the first axes. `early`: the norm before lets the ring start (and load weights) before its own wait.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper import dense, norm
from simplellm.kernels.hopper.dense_ring import _axis, _bases, _copy_tokens, _token_layout
from simplellm.kernels.hopper.launch import compiling, launch, num_sms
from tests.kernels.hopper import bench_dense
from tests.kernels.hopper.bench_dense import Data, make, microseconds
from tests.kernels.hopper.check import broken
from tests.kernels.hopper.test_dense import EPS


@gluon.constexpr_function
def _weight_layout(HALF, WK):
    """[WK, 2, HALF, 64]: 16 k a lane as two chunks of 8"""
    return gl.DistributedLinearLayout(
        _bases(16, [0, 0, 0, 1]) + [[0, 1, 0, 0]] + _bases(HALF // 8, [0, 0, 8, 0]),
        _bases(4, [0, 0, 0, 16]) + _bases(8, [0, 0, 1, 0]),
        _bases(WK, [1, 0, 0, 0]),
        [],
        [WK, 2, HALF, 64],
    )


@gluon.jit
def _copy_stage(w_desc, ring, full, slot, tile, G, step: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr,
                GROUP: gl.constexpr):  # fmt: skip
    """The stage `step` stages after the first of `tile`, which may lie in a later tile, to a slot of the ring"""
    tile += step // STEPS * G
    wanted = tile < TILES
    pair = tile * w_desc.block_shape[3]
    k = step % STEPS * w_desc.block_shape[0]
    mbarrier.expect(full.index(slot), w_desc.block_type.nbytes, pred=wanted)
    at = [k, pair // GROUP, 0, pair % GROUP, 0]
    tma.async_copy_global_to_shared(w_desc, at, full.index(slot), ring.index(slot), pred=wanted)


@gluon.jit
def _multiply(w, x, acc):
    """acc [WK, ROWS, N] += w [WK, 2, HALF, 64] x [WK, N, 64]"""
    LA: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    LB: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=acc.type.layout, k_width=2)
    WK: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    N: gl.constexpr = acc.shape[2]
    a = w.reshape([WK, 2, ROWS // 16, 8, 4, 2, 2, 2, 2]).permute([0, 2, 1, 3, 5, 6, 7, 4, 8]).reshape([WK, ROWS, 64])
    b = x.reshape([WK, N, 4, 2, 2, 2, 2]).permute([0, 3, 4, 5, 2, 6, 1]).reshape([WK, 64, N])
    a = gl.convert_layout(a, LA, assert_trivial=True)
    return mma_v2(a, gl.convert_layout(b, LB, assert_trivial=True), acc)


@gluon.jit
def _finish_qkv(y0, y1, cos, sin, q_ptr, kv_ptr, kv_stride, slot, head, i, n, tokens, real,
                Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr):  # fmt: skip
    turn = head < Q_HEADS + KV_HEADS
    z0 = gl.where(turn, y0 * cos - y1 * sin, y0).to(gl.bfloat16)
    z1 = gl.where(turn, y1 * cos + y0 * sin, y1).to(gl.bfloat16)
    to_q = q_ptr + ((n * Q_HEADS + head) * 64 + i)
    gl.store(to_q, z0, mask=(n < tokens) & (head < Q_HEADS))
    gl.store(to_q + 32, z1, mask=(n < tokens) & (head < Q_HEADS))
    kind = (head >= Q_HEADS + KV_HEADS).to(gl.int32)
    to_kv = kv_ptr + (kind * kv_stride + slot + ((head - Q_HEADS - kind * KV_HEADS) * (128 * 64) + i))
    gl.store(to_kv, z0, mask=real & (head >= Q_HEADS))
    gl.store(to_kv + 32, z1, mask=real & (head >= Q_HEADS))


@gluon.jit(do_not_specialize=["tokens", "pages_stride"])
def box_kernel(
    w_desc, bias_ptr, x_ptr, y_ptr, tokens,
    rope_ptr, rows_ptr, positions_ptr, counts_ptr, pages_ptr, pages_stride, kv_ptr, kv_stride,
    M: gl.constexpr, K: gl.constexpr, N: gl.constexpr, KIND: gl.constexpr, KV_HEADS: gl.constexpr, DEPTH: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    WK: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = w_desc.block_shape[3]
    ROWS: gl.constexpr = 2 * HALF
    STEPS: gl.constexpr = (K + 64 * WK - 1) // (64 * WK)
    TILES: gl.constexpr = M // ROWS
    LM: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WK, 1, 1], instr_shape=[1, 16, 8])
    L3: gl.constexpr = gl.BlockedLayout([WK, 1, 1], [1, 8, 4], [1, 1, WK], [0, 1, 2])
    L: gl.constexpr = gl.SliceLayout(0, L3)  # of results: [HALF, N]
    SW: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [3, 2, 1, 0])
    G = gl.num_programs(0)
    first = gl.program_id(0)
    ring = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, WK, 1, 2, HALF, 64], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
    gl.thread_barrier()
    for i in gl.static_range(DEPTH):
        _copy_stage(w_desc, ring, full, i, first, G, i, TILES, STEPS, GROUP)
    n, p = _axis(N, 1, L), _axis(HALF, 0, L)
    gdc_wait()
    gdc_launch_dependents()
    if KIND == "qkv":
        position = gl.load(positions_ptr + n, mask=n < tokens, other=0)
        row = gl.load(rows_ptr + n, mask=n < tokens, other=0)
        real = n < gl.load(counts_ptr)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STEPS, WK, N, 64], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    _copy_tokens(xs, x_ptr, tokens, K, N, WK, STEPS)
    if KIND == "qkv":
        page = gl.load(pages_ptr + row * pages_stride + position // 128)
        slot = (page.to(gl.int64) * (KV_HEADS * 128) + position % 128) * 64
    sums = gl.allocate_shared_memory(gl.float32, [2 * WK, HALF, N], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    gl.thread_barrier()
    i = 0
    for tile in range(first, TILES, G):
        pair = tile * HALF + p
        row0 = pair // GROUP * (2 * GROUP) + pair % GROUP
        if KIND == "qkv":
            angle_ptr = rope_ptr + (position * 64 + pair % 32)
            cos, sin = gl.load(angle_ptr), gl.load(angle_ptr + 32)
        if KIND != "logits":
            b0, b1 = gl.load(bias_ptr + row0), gl.load(bias_ptr + row0 + GROUP)
        acc = gl.zeros([WK, ROWS, N], gl.float32, layout=LM)
        for step in gl.static_range(STEPS):
            at = i % DEPTH
            mbarrier.wait(full.index(at), i // DEPTH & 1)
            w = ring.index(at)._reinterpret(gl.bfloat16, [WK, 2, HALF, 64], SW).load(_weight_layout(HALF, WK))
            gl.thread_barrier()
            _copy_stage(w_desc, ring, full, at, tile, G, step + DEPTH, TILES, STEPS, GROUP)
            acc = _multiply(w, xs.index(step).load(_token_layout(WK, N)), acc)
            i += 1
        sums.store(acc.reshape([WK, HALF // 8, 2, 8, N]).permute([2, 0, 1, 3, 4]).reshape([2 * WK, HALF, N]))
        gl.thread_barrier()
        y0, y1 = gl.sum(sums.slice(0, WK).load(L3), 0), gl.sum(sums.slice(WK, WK).load(L3), 0)
        if KIND != "logits":
            y0 += b0.to(gl.float32)
            y1 += b1.to(gl.float32)
        if KIND == "qkv":
            _finish_qkv(y0, y1, cos, sin, y_ptr, kv_ptr, kv_stride, slot, pair // 32, pair % 32, n, tokens, real,
                        M // 64 - 2 * KV_HEADS, KV_HEADS)  # fmt: skip
        else:
            out = y_ptr + (n * M + row0)
            gl.store(out, y0.to(y_ptr.dtype.element_ty), mask=n < tokens)
            gl.store(out + GROUP, y1.to(y_ptr.dtype.element_ty), mask=n < tokens)


class Box(NamedTuple):
    rows: int
    warps: int
    depth: int
    per_sm: int
    early: bool = False


Plan = Box | bench_dense.Plan
CASES: dict[tuple[str, int], list[Box]] = {
    ("qkv", 3): [Box(32, 4, 8, 1, True)],
    ("qkv", 8): [
        Box(16, 4, 8, 2), Box(32, 4, 8, 1), Box(16, 8, 8, 1), Box(16, 4, 8, 2, True), Box(32, 4, 8, 1, True),
        Box(16, 8, 8, 1, True), Box(16, 4, 16, 1, True), Box(32, 4, 4, 1, True),
    ],
    ("qkv", 16): [Box(32, 4, 7, 1), Box(32, 4, 7, 1, True), Box(16, 8, 7, 1, True), Box(16, 4, 15, 1, True)],
    ("linear", 8): [Box(16, 4, 5, 2), Box(16, 8, 2, 2)],
    ("linear", 16): [Box(16, 4, 10, 1)],
    ("logits", 8): [Box(32, 4, 8, 1)],
    ("logits", 16): [Box(32, 4, 7, 1)],
}  # fmt: skip


@cache
def early_norm() -> Any:
    start, wait = "    gdc_launch_dependents()\n", "    gdc_wait()\n"
    return broken(norm, wait + start, start + wait)


def call(data: Data, plan: Plan, weight: torch.Tensor) -> torch.Tensor:
    """The op's y, or q, by the plan."""
    if not isinstance(plan, Box):
        return bench_dense.call(data, plan, weight)
    x, given, rotation = data.x, data.given, (None, None, None, None, None, 0, None, 0)
    if given is not None:
        _, x = (early_norm() if plan.early else norm).add_norm(given.x, given.parts, given.gain, EPS)
        spans, pages, kv = given.spans, given.pages, given.kv
        assert spans.work is not None
        rotation = given.rope, spans.rows, spans.positions, spans.work.counts, pages, pages.stride(0), kv, kv.stride(0)  # type: ignore[assignment]
    (rows, k), kv_heads = weight.shape, 0 if given is None else 8
    group = plan.rows // 2 if given is None else 32
    y = x.new_empty(len(x), rows - 128 * kv_heads, dtype=torch.float32 if data.kind == "logits" else torch.bfloat16)
    boxes = TensorDescriptor.from_tensor(
        weight.view(rows // (2 * group), 2, group, k // 64, 64).permute(3, 0, 1, 2, 4),
        [plan.warps, 1, 2, plan.rows // 2, 64], gl.NVMMASharedLayout(128, 16, 5),
    )  # fmt: skip
    grid, bias = min(rows // plan.rows, plan.per_sm * num_sms()), None if data.kind == "logits" else data.bias
    launch(
        box_kernel, (grid,), boxes, bias, x, y, len(x), *rotation, M=rows, K=k, N=8 if len(x) <= 8 else 16, KIND=data.kind,
        KV_HEADS=kv_heads, DEPTH=plan.depth, GROUP=group, num_warps=plan.warps, maxnreg=128,
    )  # fmt: skip
    return y if given is None else y.view(len(x), -1, 64)


def build(kind: str, num_tokens: int, plan: Box) -> str:
    with compiling() as built:
        data = make(kind, num_tokens, "meta")
        call(data, plan, data.weight)
    kernel = built[-1]
    boxes = kernel.count("UTMALDG")
    return f"{kernel.registers} registers, {kernel.stack} stack, {kernel.shared >> 10} KB, {boxes} copies"


def main() -> None:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        builds = {(case, plan): pool.submit(build, *case, plan) for case, plans in CASES.items() for plan in plans}
        notes: dict[Any, str] = {case: done.result() for case, done in builds.items()}
    print("op      tokens     us  TB/s  plan")
    for case, plans in CASES.items():
        kind, num_tokens = case
        data, product = make(kind, num_tokens), dense._plan(kind, num_tokens)
        copies = [data.weight.clone() for _ in range(max(1, 300_000_000 // (2 * data.weight.numel())))]
        for plan in dict.fromkeys((None, product, *plans)):
            wrong = bench_dense.check(data, partial(call, data, plan, data.weight))
            us = microseconds([partial(call, data, plan, weight) for weight in copies])
            rate, note = 2e-6 * data.weight.numel() / us, notes.get((case, plan), "")
            print(f"{kind:7} {num_tokens:6} {us:6.1f} {rate:5.2f}  {wrong}{plan or 'cuBLAS'} {note}", flush=True)


if __name__ == "__main__":
    main()
