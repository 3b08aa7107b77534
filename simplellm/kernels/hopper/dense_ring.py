# mypy: disable-error-code="no-untyped-def, misc"
"""y [T, M] = x [T, K] W [M, K]^T for few tokens: weights by TMA through a ring of stages in shared memory, once.

A stage is ROWS rows of WK blocks of 64 k, 128 bytes a row and block, as two halves of rows (of "qkv" rows i and i + 32 of a
head). Warp j multiplies block j: rows are the M side of mma.sync (m16n8k16), row g of the first half and of the second being
its rows g and g + 8; tokens are the N side, in shared memory for all of K. Lane (g, q) reads 16 bytes at a time, k = 16 q + 8 s
+ 4 m + 2 c + p, and counts them as slots 2 q + 8 c + p of step (s, m): a sum over k does not mind its order.

Work: CTA c takes tiles c, c + G, ..; the ring runs on from tile to tile, DEPTH stages ahead, full before the wait for the
kernel before. Warps' sums meet in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.dense_stream import _axis, _bases, _finish_qkv


@gluon.constexpr_function
def _weight_layout(HALF, WK):
    """[2, WK, HALF, 64]: 16 k a lane as two chunks of 8; see the top"""
    return gl.DistributedLinearLayout(
        _bases(16, [0, 0, 0, 1]) + [[1, 0, 0, 0]] + _bases(HALF // 8, [0, 0, 8, 0]),
        _bases(4, [0, 0, 0, 16]) + _bases(8, [0, 0, 1, 0]),
        _bases(WK, [0, 1, 0, 0]),
        [],
        [2, WK, HALF, 64],
    )


@gluon.constexpr_function
def _token_layout(WK, N):
    return gl.DistributedLinearLayout(
        _bases(16, [0, 0, 1]) + _bases(N // 8, [0, 8, 0]),
        _bases(4, [0, 0, 16]) + _bases(8, [0, 1, 0]),
        _bases(WK, [1, 0, 0]),
        [],
        [WK, N, 64],
    )


@gluon.jit
def _copy_stage(w_desc, ring, full, slot, tile, G, step: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr,
                QKV: gl.constexpr):  # fmt: skip
    """The stage `step` stages after the first of `tile`, which may lie in a later tile, to a slot of the ring"""
    HALF: gl.constexpr = w_desc.block_shape[0]
    tile += step // STEPS * G
    wanted = tile < TILES
    if QKV:
        pair = tile * HALF
        row, apart = pair // 32 * 64 + pair % 32, 32
    else:
        row, apart = tile * (2 * HALF), HALF
    k = step % STEPS * w_desc.block_shape[1]
    mbarrier.expect(full.index(slot), 2 * w_desc.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(w_desc, [row, k], full.index(slot), ring.index(2 * slot), pred=wanted)
    tma.async_copy_global_to_shared(w_desc, [row + apart, k], full.index(slot), ring.index(2 * slot + 1), pred=wanted)


@gluon.jit
def _copy_tokens(xs, x_ptr, tokens, K: gl.constexpr, N: gl.constexpr, WK: gl.constexpr, STEPS: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])
    n = _axis(N, 1, L)
    for step in gl.static_range(STEPS):
        k = (step * WK + _axis(WK, 0, L)) * 64 + _axis(64, 2, L)
        async_copy.async_copy_global_to_shared(xs.index(step), x_ptr + (n * K + k), mask=(n < tokens) & (k < K))
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _multiply(w, x, acc):
    """acc [WK, ROWS, N] += w [2, WK, HALF, 64] x [WK, N, 64]"""
    LA: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    LB: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=acc.type.layout, k_width=2)
    WK: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    N: gl.constexpr = acc.shape[2]
    a = w.reshape([2, WK, ROWS // 16, 8, 4, 2, 2, 2, 2]).permute([1, 2, 0, 3, 5, 6, 7, 4, 8]).reshape([WK, ROWS, 64])
    b = x.reshape([WK, N, 4, 2, 2, 2, 2]).permute([0, 3, 4, 5, 2, 6, 1]).reshape([WK, 64, N])
    a = gl.convert_layout(a, LA, assert_trivial=True)
    return mma_v2(a, gl.convert_layout(b, LB, assert_trivial=True), acc)


@gluon.jit(do_not_specialize=["tokens", "pages_stride"])
def ring_kernel(
    w_desc, bias_ptr, x_ptr, y_ptr, tokens,
    rope_ptr, rows_ptr, positions_ptr, counts_ptr, pages_ptr, pages_stride, kv_ptr, kv_stride,
    M: gl.constexpr, K: gl.constexpr, N: gl.constexpr, KIND: gl.constexpr, KV_HEADS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = w_desc.block_shape[0]
    ROWS: gl.constexpr = 2 * HALF
    WK: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (K + 64 * WK - 1) // (64 * WK)
    TILES: gl.constexpr = M // ROWS
    QKV: gl.constexpr = KIND == "qkv"
    Q_HEADS: gl.constexpr = M // 64 - 2 * KV_HEADS
    LM: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WK, 1, 1], instr_shape=[1, 16, 8])
    L3: gl.constexpr = gl.BlockedLayout([WK, 1, 1], [1, 8, 4], [1, 1, WK], [0, 1, 2])
    L: gl.constexpr = gl.SliceLayout(0, L3)  # of results: [HALF, N]
    SW: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [3, 2, 1, 0])
    G = gl.num_programs(0)
    first = gl.program_id(0)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2 * DEPTH, HALF, 64 * WK], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
    gl.thread_barrier()
    for i in gl.static_range(DEPTH):
        _copy_stage(w_desc, ring, full, i, first, G, i, TILES, STEPS, QKV)
    n, p = _axis(N, 1, L), _axis(HALF, 0, L)
    gdc_wait()
    gdc_launch_dependents()
    if QKV:
        position = gl.load(positions_ptr + n, mask=n < tokens, other=0)
        row = gl.load(rows_ptr + n, mask=n < tokens, other=0)
        real = n < gl.load(counts_ptr)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STEPS, WK, N, 64], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    _copy_tokens(xs, x_ptr, tokens, K, N, WK, STEPS)
    if QKV:
        page = gl.load(pages_ptr + row * pages_stride + position // 128)
        slot = (page.to(gl.int64) * (KV_HEADS * 128) + position % 128) * 64
    sums = gl.allocate_shared_memory(gl.float32, [2 * WK, HALF, N], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    gl.thread_barrier()
    i = 0
    for tile in range(first, TILES, G):
        if QKV:
            pair = tile * HALF + p
            head, j = pair // 32, pair % 32
            row0, apart = head * 64 + j, 32
            cos, sin = gl.load(rope_ptr + (position * 64 + j)), gl.load(rope_ptr + (position * 64 + j + 32))
        else:
            row0, apart = tile * ROWS + p, HALF
        if KIND != "logits":
            b0, b1 = gl.load(bias_ptr + row0), gl.load(bias_ptr + row0 + apart)
        acc = gl.zeros([WK, ROWS, N], gl.float32, layout=LM)
        for step in gl.static_range(STEPS):
            at = i % DEPTH
            mbarrier.wait(full.index(at), i // DEPTH & 1)
            stage = ring.index(2 * at)._reinterpret(gl.bfloat16, [2, WK, HALF, 64], SW)
            w = stage.load(_weight_layout(HALF, WK))
            gl.thread_barrier()
            _copy_stage(w_desc, ring, full, at, tile, G, step + DEPTH, TILES, STEPS, QKV)
            acc = _multiply(w, xs.index(step).load(_token_layout(WK, N)), acc)
            i += 1
        sums.store(acc.reshape([WK, HALF // 8, 2, 8, N]).permute([2, 0, 1, 3, 4]).reshape([2 * WK, HALF, N]))
        gl.thread_barrier()
        y0, y1 = gl.sum(sums.slice(0, WK).load(L3), 0), gl.sum(sums.slice(WK, WK).load(L3), 0)
        if KIND == "logits":
            gl.store(y_ptr + (n * M + row0), y0, mask=n < tokens)
            gl.store(y_ptr + (n * M + row0 + apart), y1, mask=n < tokens)
        else:
            y0 += b0.to(gl.float32)
            y1 += b1.to(gl.float32)
            if QKV:
                _finish_qkv(y0, y1, cos, sin, y_ptr, kv_ptr, kv_stride, slot, head, j, n, n < tokens, real, Q_HEADS, KV_HEADS)
            else:
                gl.store(y_ptr + (n * M + row0), y0.to(gl.bfloat16), mask=n < tokens)
                gl.store(y_ptr + (n * M + row0 + apart), y1.to(gl.bfloat16), mask=n < tokens)
