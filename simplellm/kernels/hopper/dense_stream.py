"""A skinny GEMM that streams its weights: y [T, M] = x [T, K] W [M, K]^T for few tokens, M K weights read once.

Weights are the M side of mma.sync and go from device memory to the MMA's registers as they lie, row-major: a sum over k does
not mind its order, so lane (g, q) loads 8 consecutive k of row g (16 bytes), k = 32 b + 8 q + 4 s + 2 c + p, and counts them
as the slots 2 q + 8 c + p of MMA step s (m16n8k16). Tokens are the N side, in shared memory for all of the CTA's K, block by
block of 32 k, and are read in the same order: 16 bytes a lane without bank conflicts.

Work: a CTA takes tiles of ROWS rows, and one of SPLITS pieces of K; its warps share the rows (WM) and the blocks of k (WK).
Warps' sums meet in shared memory; CTAs' in a float32 workspace, where the last piece waits for the others (their ids are
lower) and adds in fixed order. A tile's rows come in pairs (m = 16 r + g, + 8), which PAIRS makes rows i, i + 32 of a head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ACQUIRE = gl.constexpr("ld.global.acquire.gpu.u32 $0, [$1];")


@gluon.constexpr_function
def _bases(size, step):
    """Layout bases that count a dimension's `size` positions: step, 2 step, ..."""
    return [[b * s for s in step] for b in (1 << i for i in range(size.bit_length() - 1))]


@gluon.constexpr_function
def _power_of_two(n):
    return 1 << (n - 1).bit_length()


@gluon.constexpr_function
def _token_layout(WK, WM, N):
    """[WK, N, 32] as the B operand wants it: 8 k a lane; every warp of a WK reads the same."""
    return gl.DistributedLinearLayout(
        _bases(8, [0, 0, 1]) + _bases(N // 8, [0, 8, 0]),
        _bases(4, [0, 0, 8]) + _bases(8, [0, 1, 0]),
        [[0, 0, 0]] * (WM.bit_length() - 1) + _bases(WK, [1, 0, 0]),
        [],
        [WK, N, 32],
    )


@gluon.constexpr_function
def _copy_layout(BLOCKS, WARPS):
    """[BLOCKS, tokens, 32] over all threads, 8 k each, 32 k of up to 8 blocks a warp."""
    lanes = min(8, BLOCKS)
    warps = min(WARPS, BLOCKS // lanes)
    return gl.BlockedLayout([1, 1, 8], [lanes, 8 // lanes, 4], [warps, WARPS // warps, 1], [2, 0, 1])


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


@gluon.jit
def _point(w_ptr, tile, first, K: gl.constexpr, ROWS: gl.constexpr, WK: gl.constexpr, PAIRS: gl.constexpr):
    """Where each thread reads a tile's rows from, two weights a word: [WK, ROWS / 16, 2, 8, 4, 4] to the CTA's first k"""
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 1, 1, 4], [1, 1, 1, 8, 4, 1], [WK, gl.num_warps() // WK, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    group = tile * (ROWS // 16) + _axis(ROWS // 16, 1, L)
    if PAIRS:
        row = group // 4 * 64 + group % 4 * 8 + _axis(2, 2, L) * 32 + _axis(8, 3, L)
    else:
        row = group * 16 + _axis(2, 2, L) * 8 + _axis(8, 3, L)
    words = w_ptr.to(gl.pointer_type(gl.int32), bitcast=True)  # whole registers: halves would be kept one in each
    return words + (row * (K // 2) + ((first + _axis(WK, 0, L)) * 16 + _axis(4, 4, L) * 4 + _axis(4, 5, L)))


@gluon.jit
def _load_block(pointers, tile, first, limit, at: gl.constexpr,
                M: gl.constexpr, K: gl.constexpr, SPLITS: gl.constexpr, LAST: gl.constexpr):  # fmt: skip
    """Blocks `at` .. + WK - 1 of the CTA's share of k, one a warp; zeros past it, and past M where a tile may lie there"""
    WK: gl.constexpr = pointers.shape[0]
    GROUPS: gl.constexpr = pointers.shape[1]
    RAGGED: gl.constexpr = M % (16 * GROUPS) > 0 or not LAST
    SHORT: gl.constexpr = SPLITS > 1 or at + WK > K // 32
    if RAGGED or SHORT:
        L: gl.constexpr = pointers.type.layout
        inside = _axis(4, 5, L) < 4
        if RAGGED:
            inside = inside & (tile * GROUPS + _axis(GROUPS, 1, L) < M // 16)
        if SHORT:
            inside = inside & (first + at + _axis(WK, 0, L) < limit)
        w = gl.load(pointers + at * 16, mask=inside, other=0, eviction_policy="evict_first")
    else:
        w = gl.load(pointers + at * 16, eviction_policy="evict_first")
    return w


@gluon.jit
def _load_unit(pointers, tile, first, limit, unit: gl.constexpr,
               M: gl.constexpr, K: gl.constexpr, U: gl.constexpr, SPLITS: gl.constexpr, LAST: gl.constexpr):  # fmt: skip
    """A unit of a tile, U WK blocks, in flight: U tensors"""
    WK: gl.constexpr = pointers.shape[0]
    w = ()
    for j in gl.static_range(U):
        w = w + (_load_block(pointers, tile, first, limit, (unit * U + j) * WK, M, K, SPLITS, LAST),)  # type: ignore[assignment]
    return w


@gluon.jit
def _copy_tokens(xs, x_ptr, tokens, first, limit,
                 K: gl.constexpr, N: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr):  # fmt: skip
    """The CTA's K of rows 0 .. tokens - 1 of x to shared memory; zeros beyond"""
    L: gl.constexpr = _copy_layout(CHUNK, gl.num_warps())
    n = _axis(N, 1, L)
    for c in gl.static_range(CHUNKS):
        block = first + c * CHUNK + _axis(CHUNK, 0, L)
        inside = (n < tokens) & (block < limit) & (_axis(32, 2, L) < 32)
        pointers = x_ptr + (n * K + block * 32 + _axis(32, 2, L))
        async_copy.async_copy_global_to_shared(xs.index(c), pointers, mask=inside)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _norm_tokens(xs, gain, x_ptr, parts_ptr, new_ptr, tokens, eps,
                 K: gl.constexpr, NT: gl.constexpr, PARTS: gl.constexpr, CHUNK: gl.constexpr):  # fmt: skip
    """The norm (norm.py's, rounding by rounding) of up to NT rows of x plus parts to shared memory; the sum to new_ptr"""
    L: gl.constexpr = _copy_layout(CHUNK, gl.num_warps())
    t, k = _axis(NT, 1, L), _axis(CHUNK, 0, L) * 32 + _axis(32, 2, L)
    inside = (t < tokens) & (_axis(CHUNK, 0, L) < K // 32) & (_axis(32, 2, L) < 32)
    x = gl.load(x_ptr + (t * K + k), mask=inside, other=0.0)
    if PARTS > 0:
        total = gl.zeros([CHUNK, NT, 32], gl.float32, layout=L)
        for i in gl.static_range(PARTS):
            total += gl.load(parts_ptr + ((t * PARTS + i) * K + k), mask=inside, other=0.0).to(gl.float32)
        x = (x.to(gl.float32) + total.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16)
        gl.store(new_ptr + (t * K + k), x, mask=inside & (gl.program_id(0) == 0))
    wide = x.to(gl.float32)
    scale = gl.rsqrt(gl.sum(gl.sum(wide * wide, 2), 0) / K + eps)
    scale = gl.expand_dims(gl.expand_dims(gl.convert_layout(scale, _axis_layout(1, L)), 0), 2)
    xs.index(0).slice(0, NT, dim=1).store((wide * scale * gain.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _multiply(w, xs, acc, block: gl.constexpr, CHUNK: gl.constexpr, N: gl.constexpr, WK: gl.constexpr):
    """acc [WK, ROWS, N] += one block of 32 k a warp; w as loaded, tokens from shared memory"""
    WM: gl.constexpr = gl.num_warps() // WK
    LA: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    LB: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=acc.type.layout, k_width=2)
    ROWS: gl.constexpr = acc.shape[1]
    w = w.reshape([WK, ROWS // 16, 2, 8, 4, 2, 2])
    low = w.to(gl.int16).to(gl.bfloat16, bitcast=True)
    a = (
        gl.join(low, (w >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True))
        .permute([0, 1, 2, 3, 5, 6, 4, 7])
        .reshape([WK, ROWS, 32])
    )
    b = xs.index(block // CHUNK).slice(block % CHUNK, WK).load(_token_layout(WK, WM, N))
    b = b.reshape([WK, N, 4, 2, 2, 2]).permute([0, 3, 4, 2, 5, 1]).reshape([WK, 32, N])
    a = gl.convert_layout(a, LA, assert_trivial=True)
    return mma_v2(a, gl.convert_layout(b, LB, assert_trivial=True), acc)


@gluon.jit
def _sum_tile(pending, pointers, w_ptr, xs, sums, tile, step, first, limit, L3: gl.constexpr,
              M: gl.constexpr, K: gl.constexpr, N: gl.constexpr, U: gl.constexpr, AHEAD: gl.constexpr, UNITS: gl.constexpr,
              CHUNK: gl.constexpr, SPLITS: gl.constexpr, PAIRS: gl.constexpr, LAST: gl.constexpr):  # fmt: skip
    """The CTA's share of a tile: sums [ROWS / 2, N] of the rows 16 r + g, and of 16 r + 8 + g; then `pending` of the next"""
    WK: gl.constexpr = pointers.shape[0]
    ROWS: gl.constexpr = 16 * pointers.shape[1]
    LM: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WK, gl.num_warps() // WK, 1], instr_shape=[1, 16, 8]
    )
    acc = gl.zeros([WK, ROWS, N], gl.float32, layout=LM)
    for u in gl.static_range(UNITS):
        for j in gl.static_range(U):
            acc = _multiply(pending[j], xs, acc, (u * U + j) * WK, CHUNK, N, WK)
        pending = pending[U:]
        if u + AHEAD < UNITS:
            pending = pending + _load_unit(pointers, tile, first, limit, u + AHEAD, M, K, U, SPLITS, LAST)
        elif not LAST:
            if u + AHEAD == UNITS:
                pointers = _point(w_ptr, tile + step, first, K, ROWS, WK, PAIRS)
            pending = pending + _load_unit(pointers, tile + step, first, limit, u + AHEAD - UNITS, M, K, U, SPLITS, LAST)
    sums.store(acc.reshape([WK, ROWS // 16, 2, 8, N]).permute([2, 0, 1, 3, 4]).reshape([2 * WK, ROWS // 2, N]))
    gl.thread_barrier()
    y0, y1 = gl.sum(sums.slice(0, WK).load(L3), 0), gl.sum(sums.slice(WK, WK).load(L3), 0)
    if not LAST:
        gl.thread_barrier()
    return y0, y1, pending, pointers


@gluon.jit
def _meet_pieces(y0, y1, ws_ptr, arrived_ptr, tile, piece, at, SIZE: gl.constexpr, SPLITS: gl.constexpr):
    """The sums of all pieces of K, in the last piece's CTA; `at` [P, N] is each value's place in a half tile of SIZE"""
    place = ws_ptr + tile * (SPLITS * 2 * SIZE)
    if piece < SPLITS - 1:
        gl.store(place + piece * (2 * SIZE) + at, y0)
        gl.store(place + piece * (2 * SIZE) + SIZE + at, y1)
        gl.thread_barrier()
        gl.atomic_add(arrived_ptr + tile, 1, sem="release", scope="gpu")
    else:
        arrived = gl.inline_asm_elementwise(ACQUIRE, "=r,l", [arrived_ptr + tile], dtype=gl.int32, is_pure=False, pack=1)
        while arrived < SPLITS - 1:
            arrived = gl.inline_asm_elementwise(ACQUIRE, "=r,l", [arrived_ptr + tile], dtype=gl.int32, is_pure=False, pack=1)
        for i in gl.static_range(SPLITS - 1):
            y0 += gl.load(place + i * (2 * SIZE) + at, cache_modifier=".cg")
            y1 += gl.load(place + i * (2 * SIZE) + SIZE + at, cache_modifier=".cg")
        gl.thread_barrier()
        gl.store(arrived_ptr + tile, 0)
    return y0, y1


@gluon.jit
def _finish_qkv(y0, y1, cos, sin, q_ptr, kv_ptr, kv_stride, slot, head, i, n, use, real,
                Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr):  # fmt: skip
    """Rotate in float32, round once; q to q_ptr [T, Q_HEADS, 64], k and v of real tokens to their slots"""
    turn = head < Q_HEADS + KV_HEADS
    z0 = gl.where(turn, y0 * cos - y1 * sin, y0).to(gl.bfloat16)
    z1 = gl.where(turn, y1 * cos + y0 * sin, y1).to(gl.bfloat16)
    to_q = q_ptr + ((n * Q_HEADS + head) * 64 + i)
    gl.store(to_q, z0, mask=use & (head < Q_HEADS))
    gl.store(to_q + 32, z1, mask=use & (head < Q_HEADS))
    kind = (head >= Q_HEADS + KV_HEADS).to(gl.int32)
    to_kv = kv_ptr + (kind * kv_stride + slot + ((head - Q_HEADS - kind * KV_HEADS) * (128 * 64) + i))
    gl.store(to_kv, z0, mask=use & real & (head >= Q_HEADS))
    gl.store(to_kv + 32, z1, mask=use & real & (head >= Q_HEADS))


@gluon.jit(do_not_specialize=["tokens", "pages_stride"], repr=lambda s: f"dense_{s.constants['KIND']}")
def dense_kernel(
    w_ptr, bias_ptr, x_ptr, y_ptr, tokens,
    parts_ptr, gain_ptr, new_ptr, eps,
    rope_ptr, rows_ptr, positions_ptr, counts_ptr, pages_ptr, pages_stride, kv_ptr, kv_stride,
    ws_ptr, arrived_ptr,
    M: gl.constexpr, K: gl.constexpr, N: gl.constexpr, KIND: gl.constexpr, PARTS: gl.constexpr, NT: gl.constexpr,
    KV_HEADS: gl.constexpr, ROWS: gl.constexpr, WK: gl.constexpr, U: gl.constexpr, AHEAD: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """NT > 0: up to NT rows of x and PARTS parts are added and normed first, in every CTA; CTA 0 keeps the sum.

    N token columns, the first `tokens` of use. LINEAR and QKV: a tile and piece a CTA; LOGITS: every G-th tile of G CTAs.
    """
    BLOCKS: gl.constexpr = U * WK  # of 32 k in a unit, which is what a CTA loads at a time, AHEAD of them in flight
    SHARE: gl.constexpr = (K // 32 + SPLITS - 1) // SPLITS  # of blocks to a piece of K
    UNITS: gl.constexpr = (SHARE + BLOCKS - 1) // BLOCKS
    CHUNK: gl.constexpr = _power_of_two(UNITS * BLOCKS) if NT > 0 else BLOCKS  # of blocks of tokens handled together
    CHUNKS: gl.constexpr = (UNITS * BLOCKS + CHUNK - 1) // CHUNK
    Q_HEADS: gl.constexpr = M // 64 - 2 * KV_HEADS
    LAST: gl.constexpr = KIND != "logits"
    L3: gl.constexpr = gl.BlockedLayout([WK, 1, 1], [1, 8, 4], [1, 1, gl.num_warps()], [0, 1, 2])
    L: gl.constexpr = gl.SliceLayout(0, L3)  # of results: [ROWS / 2, N]
    piece = gl.program_id(0) % SPLITS
    tile = gl.program_id(0) // SPLITS
    first = piece * SHARE
    limit = gl.minimum(first + SHARE, K // 32)
    n = _axis(N, 1, L)
    p = _axis(ROWS // 2, 0, L)
    group = tile * (ROWS // 16) + p // 8
    pointers = _point(w_ptr, tile, first, K, ROWS, WK, KIND == "qkv")
    pending = ()
    for u in gl.static_range(AHEAD):
        pending = pending + _load_unit(pointers, tile, first, limit, u, M, K, U, SPLITS, LAST)
    if KIND == "qkv":
        head, i = group // 4, group % 4 * 8 + p % 8
        row0, apart = head * 64 + i, 32
    else:
        row0, apart = group * 16 + p % 8, 8
    if LAST:
        b0 = gl.load(bias_ptr + row0, mask=group < M // 16, other=0.0)
        b1 = gl.load(bias_ptr + row0 + apart, mask=group < M // 16, other=0.0)
    if NT > 0:
        LC: gl.constexpr = _copy_layout(CHUNK, gl.num_warps())
        inside = (_axis(CHUNK, 0, LC) < K // 32) & (_axis(32, 2, LC) < 32)
        gain = gl.load(gain_ptr + (_axis(CHUNK, 0, LC) * 32 + _axis(32, 2, LC)), mask=inside, other=0.0)
    gdc_wait()
    gdc_launch_dependents()
    if KIND == "qkv":  # read now what the end will need
        position = gl.load(positions_ptr + n, mask=n < tokens, other=0)
        row = gl.load(rows_ptr + n, mask=n < tokens, other=0)
        real = n < gl.load(counts_ptr)
    xs = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, CHUNK, N, 32], gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0]))
    if NT > 0:
        _norm_tokens(xs, gain, x_ptr, parts_ptr, new_ptr, tokens, eps, K, NT, PARTS, CHUNK)
    else:
        _copy_tokens(xs, x_ptr, tokens, first, limit, K, N, CHUNKS, CHUNK)
    if KIND == "qkv":
        page = gl.load(pages_ptr + row * pages_stride + position // 128)
        slot = (page.to(gl.int64) * (KV_HEADS * 128) + position % 128) * 64
        angle_ptr = rope_ptr + (position * 64 + i)
        if N <= 16:  # else they would take too many registers
            cos, sin = gl.load(angle_ptr), gl.load(angle_ptr + 32)
    sums = gl.allocate_shared_memory(gl.float32, [2 * WK, ROWS // 2, N], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    gl.thread_barrier()
    if LAST:
        y0, y1, pending, pointers = _sum_tile(pending, pointers, w_ptr, xs, sums, tile, 0, first, limit, L3,
                                              M, K, N, U, AHEAD, UNITS, CHUNK, SPLITS, KIND == "qkv", True)  # fmt: skip
        if SPLITS > 1:
            y0, y1 = _meet_pieces(y0, y1, ws_ptr, arrived_ptr, tile, piece, p * N + n, N * ROWS // 2, SPLITS)
        y0 += b0.to(gl.float32)
        y1 += b1.to(gl.float32)
        use = (group < M // 16) & (n < tokens) & (piece == SPLITS - 1)
        if KIND == "qkv":
            if N > 16:
                cos, sin = gl.load(angle_ptr), gl.load(angle_ptr + 32)
            _finish_qkv(y0, y1, cos, sin, y_ptr, kv_ptr, kv_stride, slot, head, i, n, use, real, Q_HEADS, KV_HEADS)
        else:
            gl.store(y_ptr + (n * M + row0), y0.to(gl.bfloat16), mask=use)
            gl.store(y_ptr + (n * M + row0 + apart), y1.to(gl.bfloat16), mask=use)
    else:
        for t in range(tile, (M + ROWS - 1) // ROWS, gl.num_programs(0)):
            y0, y1, pending, pointers = _sum_tile(pending, pointers, w_ptr, xs, sums, t, gl.num_programs(0), first, limit, L3,
                                                  M, K, N, U, AHEAD, UNITS, CHUNK, SPLITS, False, False)  # fmt: skip
            group = t * (ROWS // 16) + p // 8
            out = y_ptr + (n * M + group * 16 + p % 8)
            gl.store(out, y0, mask=(group < M // 16) & (n < tokens))
            gl.store(out + 8, y1, mask=(group < M // 16) & (n < tokens))
