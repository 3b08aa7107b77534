# mypy: disable-error-code="no-untyped-def, misc"
"""y [T, M] = x [T, K] W [M, K]^T for few tokens: weights by TMA through a ring of stages in shared memory, once.

A stage is ROWS rows of WK blocks of 64 k, 128 bytes a row and block, as two halves of the rows. Warp j multiplies block j: rows
are the M side of mma.sync (m16n8k16), row g of the first half and of the second being its rows g and g + 8; N tokens, the first
`tokens` of use, are the N side, in shared memory for all of K. Lane (g, q) reads 16 bytes at a time, k = 16 q + 8 s + 4 m + 2 c
+ p, and counts them as slots 2 q + 8 c + p of step (s, m): a sum over k does not mind its order.

Work: CTA c takes tiles c, c + G, ..; the ring runs on from tile to tile, DEPTH stages ahead, full before the wait for the
kernel before. Warps' sums meet in shared memory. "linear": y in bf16, with the bias; "logits": y in float32, without one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.constexpr_function
def _bases(size, step):
    """Layout bases that count a dimension's `size` positions: step, 2 step, ..."""
    return [[b * s for s in step] for b in (1 << i for i in range(size.bit_length() - 1))]


@gluon.constexpr_function
def _axis_layout(dim, layout):
    for other in reversed(range(layout.rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _axis(size: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr):
    """0 .. size - 1 along dimension `dim` of the layout, the other dimensions being 1"""
    RANK: gl.constexpr = layout.rank
    x = gl.arange(0, size, layout=_axis_layout(dim, layout))
    for other in gl.static_range(RANK):
        if other != dim:
            x = gl.expand_dims(x, other)
    return x


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
def _copy_stage(w_desc, ring, full, slot, tile, G, step: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr):
    """The stage `step` stages after the first of `tile`, which may lie in a later tile, to a slot of the ring"""
    HALF: gl.constexpr = w_desc.block_shape[0]
    tile += step // STEPS * G
    wanted = tile < TILES
    row = tile * (2 * HALF)
    k = step % STEPS * w_desc.block_shape[1]
    mbarrier.expect(full.index(slot), 2 * w_desc.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(w_desc, [row, k], full.index(slot), ring.index(2 * slot), pred=wanted)
    tma.async_copy_global_to_shared(w_desc, [row + HALF, k], full.index(slot), ring.index(2 * slot + 1), pred=wanted)


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


@gluon.jit(do_not_specialize=["tokens"], repr=lambda s: f"dense_{s.constants['KIND']}")
def ring_kernel(
    w_desc, bias_ptr, x_ptr, y_ptr, tokens,
    M: gl.constexpr, K: gl.constexpr, N: gl.constexpr, KIND: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = w_desc.block_shape[0]
    ROWS: gl.constexpr = 2 * HALF
    WK: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (K + 64 * WK - 1) // (64 * WK)
    TILES: gl.constexpr = M // ROWS
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
        _copy_stage(w_desc, ring, full, i, first, G, i, TILES, STEPS)
    n, p = _axis(N, 1, L), _axis(HALF, 0, L)
    gdc_wait()
    gdc_launch_dependents()
    xs = gl.allocate_shared_memory(gl.bfloat16, [STEPS, WK, N, 64], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    _copy_tokens(xs, x_ptr, tokens, K, N, WK, STEPS)
    sums = gl.allocate_shared_memory(gl.float32, [2 * WK, HALF, N], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    gl.thread_barrier()
    i = 0
    for tile in range(first, TILES, G):
        row = tile * ROWS + p
        if KIND == "linear":  # read now what the end will need
            b0, b1 = gl.load(bias_ptr + row), gl.load(bias_ptr + row + HALF)
        acc = gl.zeros([WK, ROWS, N], gl.float32, layout=LM)
        for step in gl.static_range(STEPS):
            at = i % DEPTH
            mbarrier.wait(full.index(at), i // DEPTH & 1)
            stage = ring.index(2 * at)._reinterpret(gl.bfloat16, [2, WK, HALF, 64], SW)
            w = stage.load(_weight_layout(HALF, WK))
            gl.thread_barrier()
            _copy_stage(w_desc, ring, full, at, tile, G, step + DEPTH, TILES, STEPS)
            acc = _multiply(w, xs.index(step).load(_token_layout(WK, N)), acc)
            i += 1
        sums.store(acc.reshape([WK, HALF // 8, 2, 8, N]).permute([2, 0, 1, 3, 4]).reshape([2 * WK, HALF, N]))
        gl.thread_barrier()
        y0, y1 = gl.sum(sums.slice(0, WK).load(L3), 0), gl.sum(sums.slice(WK, WK).load(L3), 0)
        out = y_ptr + (n * M + row)
        if KIND == "linear":
            y0 = (y0 + b0.to(gl.float32)).to(gl.bfloat16)
            y1 = (y1 + b1.to(gl.float32)).to(gl.bfloat16)
        gl.store(out, y0, mask=n < tokens)
        gl.store(out + HALF, y1, mask=n < tokens)
