# mypy: disable-error-code="no-untyped-def, misc"
"""y [T, M] = x [T, K] W [M, K]^T for few tokens on the CUDA cores: M K weights read once, whole rows, in the order of memory.

A warp takes a row at a time: lane l reads the words (two bf16) 4 l .. 4 l + 3 of each piece of 128 words, so that a load of a
warp is 512 contiguous bytes. Exact products, sums in float32: along the pieces in a lane, then over the lanes. Tokens lie in
shared memory, as bf16. All of a warp's first rows is in flight before the wait for the kernel before.

Work: a CTA takes a tile of ROWS rows, or (LOOP) every G-th of G CTAs, U pieces of the next tile being loaded as soon as U of
this one's are done with.

"qkv": first the T rows of x and PARTS parts of each are added and normed, in every CTA; CTA 0 keeps the sum. A tile is ROWS / 2
pairs of rows i, i + 32 of a head, as RoPE turns them; q goes to y [T, heads, 64], k and v of real tokens to their pages.
"linear": y in bf16, with the bias. "logits": y in float32, without one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PIECE = gl.constexpr(128)  # words a warp loads at once


@gluon.constexpr_function
def _power_of_two(n):
    return 1 << (n - 1).bit_length()


@gluon.jit
def _point(w_ptr, tile, K: gl.constexpr, ROWS: gl.constexpr, QKV: gl.constexpr):
    """Where each thread reads a tile's rows from: [ROWS, PIECE] words, to the first piece"""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    p = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    if QKV:
        pair = tile * (ROWS // 2) + p % (ROWS // 2)
        row = pair // 32 * 64 + pair % 32 + p // (ROWS // 2) * 32
    else:
        row = tile * ROWS + p
    column = gl.arange(0, PIECE, layout=gl.SliceLayout(0, L))
    words = w_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    return words + (gl.expand_dims(row * (K // 2), 1) + gl.expand_dims(column, 0))


@gluon.jit
def _load_piece(words, inside, j: gl.constexpr, K: gl.constexpr, LOOP: gl.constexpr):
    L: gl.constexpr = words.type.layout
    at = words + j * PIECE
    RAGGED: gl.constexpr = (j + 1) * PIECE > K // 2
    if RAGGED:
        column = gl.expand_dims(gl.arange(0, PIECE, layout=gl.SliceLayout(0, L)), 0)
        w = gl.load(at, mask=inside & (column < K // 2 - j * PIECE), other=0, eviction_policy="evict_first")
    elif LOOP:
        w = gl.load(at, mask=inside, other=0, eviction_policy="evict_first")
    else:
        w = gl.load(at, eviction_policy="evict_first")
    return w


@gluon.jit
def _low(words):
    return (words << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _high(words):
    return (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _sum_tile(pending, words, ahead, xs, T: gl.constexpr, K: gl.constexpr, U: gl.constexpr, LOOP: gl.constexpr):
    """Sums [ROWS] of the pending tile for each token; then the pieces of the tile at `words`, which there is if `ahead`"""
    L: gl.constexpr = words.type.layout
    PIECES: gl.constexpr = (K // 2 + PIECE - 1) // PIECE
    acc = ()
    for _ in gl.static_range(T):
        acc = acc + (gl.zeros(words.shape, gl.float32, layout=L),)  # type: ignore[assignment]
    for j in gl.static_range(PIECES):
        low, high = _low(pending[j]), _high(pending[j])
        total = ()
        for t in gl.static_range(T):
            x = gl.expand_dims(xs.index(t).slice(j * PIECE, PIECE).load(gl.SliceLayout(0, L)), 0)
            total = total + (acc[t] + low * _low(x) + high * _high(x),)  # type: ignore[assignment]
        acc = total
        if LOOP and ((j + 1) % U == 0 or j + 1 == PIECES):
            for i in gl.static_range(j // U * U, j + 1):
                pending = pending + (_load_piece(words, ahead, i, K, True),)
    y = ()
    for t in gl.static_range(T):
        y = y + (gl.sum(acc[t], 1),)  # type: ignore[assignment]
    return y, pending[PIECES:]


@gluon.jit
def _copy_tokens(xs, x_ptr, T: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    column = gl.arange(0, WIDE, layout=L)
    words = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    for t in gl.static_range(T):
        xs.index(t).store(gl.load(words + (t * (K // 2) + column), mask=column < K // 2, other=0))


@gluon.jit
def _norm_tokens(xs, gain, x_ptr, parts_ptr, new_ptr, eps, T: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr,
                 PARTS: gl.constexpr):  # fmt: skip
    """The norm (norm.py's, rounding by rounding) of x plus parts to shared memory; the sum to new_ptr"""
    L: gl.constexpr = gain.type.layout
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    column = gl.arange(0, 2 * WIDE, layout=L)
    inside = column < K
    for t in gl.static_range(T):
        x = gl.load(x_ptr + (t * K + column), mask=inside, other=0.0)
        if PARTS > 0:
            total = gl.zeros([2 * WIDE], gl.float32, layout=L)
            for i in gl.static_range(PARTS):
                total += gl.load(parts_ptr + ((t * PARTS + i) * K + column), mask=inside, other=0.0).to(gl.float32)
            x = (x.to(gl.float32) + total.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16)
            gl.store(new_ptr + (t * K + column), x, mask=inside & (gl.program_id(0) == 0))
        wide = x.to(gl.float32)
        scale = gl.rsqrt(gl.sum(wide * wide, 0) / K + eps)
        xs.index(t)._reinterpret(gl.bfloat16, [2 * WIDE], S).store((wide * scale * gain.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _fetch(tile, bias_ptr, rope_ptr, positions, T: gl.constexpr, ROWS: gl.constexpr, KIND: gl.constexpr):
    """What the end will need, asked for early: of each row its bias; of each pair both, and cos and sin for each token"""
    LP: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [gl.num_warps(), 1], [1, 0])
    LR: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0]))
    found = ()
    if KIND == "qkv":
        pair = tile * (ROWS // 2) + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, LP))
        row = bias_ptr + (pair // 32 * 64 + pair % 32)
        found = (gl.load(row), gl.load(row + 32))  # type: ignore[assignment]
        for t in gl.static_range(T):
            angle_ptr = rope_ptr + (positions[t] * 64 + pair % 32)
            found = found + (gl.load(angle_ptr), gl.load(angle_ptr + 32))  # type: ignore[assignment]
    elif KIND == "linear":
        found = (gl.load(bias_ptr + tile * ROWS + gl.arange(0, ROWS, layout=LR)),)  # type: ignore[assignment]
    return found


@gluon.jit
def _finish_qkv(y0, y1, cos, sin, q_ptr, kv_ptr, kv_stride, slot, head, i, t, real,
                Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr):  # fmt: skip
    """Rotate in float32, round once; q to q_ptr [T, Q_HEADS, 64], k and v of a real token to its slot"""
    turn = head < Q_HEADS + KV_HEADS
    z0 = gl.where(turn, y0 * cos - y1 * sin, y0).to(gl.bfloat16)
    z1 = gl.where(turn, y1 * cos + y0 * sin, y1).to(gl.bfloat16)
    to_q = q_ptr + ((t * Q_HEADS + head) * 64 + i)
    gl.store(to_q, z0, mask=head < Q_HEADS)
    gl.store(to_q + 32, z1, mask=head < Q_HEADS)
    kind = (head >= Q_HEADS + KV_HEADS).to(gl.int32)
    to_kv = kv_ptr + (kind * kv_stride + slot + ((head - Q_HEADS - kind * KV_HEADS) * (128 * 64) + i))
    gl.store(to_kv, z0, mask=(head >= Q_HEADS) & real)
    gl.store(to_kv + 32, z1, mask=(head >= Q_HEADS) & real)


@gluon.jit
def _finish(y, tile, found, y_ptr, slots, num_tokens, kv_ptr, kv_stride,
            T: gl.constexpr, M: gl.constexpr, ROWS: gl.constexpr, KIND: gl.constexpr, KV_HEADS: gl.constexpr):  # fmt: skip
    """Bias and rounding; of "qkv" RoPE and append too"""
    HALF: gl.constexpr = ROWS // 2
    LP: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [gl.num_warps(), 1], [1, 0])
    if KIND == "qkv":
        pair = tile * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LP))
        head, i = pair // 32, pair % 32
        for t in gl.static_range(T):
            y0, y1 = gl.split(gl.convert_layout(y[t].reshape([2, HALF]).permute([1, 0]), LP))
            y0 += found[0].to(gl.float32)
            y1 += found[1].to(gl.float32)
            _finish_qkv(y0, y1, found[2 + 2 * t], found[3 + 2 * t], y_ptr, kv_ptr, kv_stride, slots[t], head, i, t,
                        t < num_tokens, M // 64 - 2 * KV_HEADS, KV_HEADS)  # fmt: skip
    else:
        row = tile * ROWS + gl.arange(0, ROWS, layout=y[0].type.layout)
        for t in gl.static_range(T):
            if KIND == "logits":
                gl.store(y_ptr + (t * M + row), y[t])
            else:
                gl.store(y_ptr + (t * M + row), (y[t] + found[0].to(gl.float32)).to(gl.bfloat16))


@gluon.jit(do_not_specialize=["pages_stride"], repr=lambda s: f"dense_{s.constants['KIND']}")
def gemv_kernel(
    w_ptr, bias_ptr, x_ptr, y_ptr,
    parts_ptr, gain_ptr, new_ptr, eps,
    rope_ptr, rows_ptr, positions_ptr, counts_ptr, pages_ptr, pages_stride, kv_ptr, kv_stride,
    M: gl.constexpr, K: gl.constexpr, T: gl.constexpr, KIND: gl.constexpr, PARTS: gl.constexpr, KV_HEADS: gl.constexpr,
    ROWS: gl.constexpr, U: gl.constexpr, LOOP: gl.constexpr,
):  # fmt: skip
    PIECES: gl.constexpr = (K // 2 + PIECE - 1) // PIECE
    WIDE: gl.constexpr = _power_of_two(PIECES * PIECE)
    TILES: gl.constexpr = M // ROWS
    tile = gl.program_id(0)
    words = _point(w_ptr, tile, K, ROWS, KIND == "qkv")
    pending = ()
    for j in gl.static_range(PIECES):
        pending = pending + (_load_piece(words, tile < TILES, j, K, False),)  # type: ignore[assignment]
    if KIND == "qkv":
        LN: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
        column = gl.arange(0, 2 * WIDE, layout=LN)
        gain = gl.load(gain_ptr + column, mask=column < K, other=0.0)
    gdc_wait()
    gdc_launch_dependents()
    positions = ()
    slots = ()
    num_tokens = 0
    if KIND == "qkv":
        num_tokens = gl.load(counts_ptr)
        for t in gl.static_range(T):
            position = gl.load(positions_ptr + t)
            page = gl.load(pages_ptr + gl.load(rows_ptr + t) * pages_stride + position // 128)
            positions = positions + (position,)  # type: ignore[assignment]
            slots = slots + ((page.to(gl.int64) * (KV_HEADS * 128) + position % 128) * 64,)  # type: ignore[assignment]
    if not LOOP:
        found = _fetch(tile, bias_ptr, rope_ptr, positions, T, ROWS, KIND)
    xs = gl.allocate_shared_memory(gl.int32, [T, WIDE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if KIND == "qkv":
        _norm_tokens(xs, gain, x_ptr, parts_ptr, new_ptr, eps, T, K, WIDE, PARTS)
    else:
        _copy_tokens(xs, x_ptr, T, K, WIDE)
    gl.thread_barrier()
    if LOOP:
        for this in range(tile, TILES, gl.num_programs(0)):
            words = _point(w_ptr, this + gl.num_programs(0), K, ROWS, KIND == "qkv")
            found = _fetch(this, bias_ptr, rope_ptr, positions, T, ROWS, KIND)
            y, pending = _sum_tile(pending, words, this + gl.num_programs(0) < TILES, xs, T, K, U, True)
            _finish(y, this, found, y_ptr, slots, num_tokens, kv_ptr, kv_stride, T, M, ROWS, KIND, KV_HEADS)
    else:
        y, pending = _sum_tile(pending, words, False, xs, T, K, U, False)
        _finish(y, tile, found, y_ptr, slots, num_tokens, kv_ptr, kv_stride, T, M, ROWS, KIND, KV_HEADS)
