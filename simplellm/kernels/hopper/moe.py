# mypy: disable-error-code="no-untyped-def, misc"
"""experts_small: the experts of few tokens (up to some rows an expert), at the speed of reading the weights once.

    a = swiglu(W1[e] x_t + b1[e])     `gate_up`: h [4 T, I] bf16, a row for each sorted pair
    y = w_te (W2[e] a + b2[e])        `down`: parts [T, 4, H] bf16, a row for each pair in its place
Exact products, fp32 sums, each of a and y rounded once. Bytes moved: the weights of the experts in use (pack.py's Stream).
Weights are the M side of the MMA, unpacked in registers (moe_unpack.py); tokens are its N side, in shared memory for all of K.

Work split: a unit is U blocks of one row tile (16 R rows of an expert in use). The units of all slots form one list, and CTA c
of G takes units [c T / G, (c + 1) T / G), the next unit's loads always in flight: no ring, no barrier. The parts of a tile cut
by a boundary meet in an fp32 workspace: the CTA with the tile's head, which does it last, waits for the others, which did their
parts first, adds them in order and runs the epilogue. Bitwise repeatable; counters reset themselves. CTA c is the G - 1 - c th
program, so that waits are for programs that started earlier: the grid need not be resident at once (it is: see CONFIG).
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.launch import launch, num_sms
from simplellm.kernels.hopper.moe_unpack import clip, fragment, load_unit, offsets, swiglu
from simplellm.kernels.hopper.pack import BLOCK_WORDS, Stream
from simplellm.kernels.hopper.router import Route

# pairs of a slot -> blocks of a unit, rows of a tile, warps, CTAs an SM, mma.sync or else wgmma, register limit
CONFIG = {8: (3, 128, 4, 4, True, 128), 16: (9, 128, 8, 2, True, 128), 32: (5, 256, 16, 1, False, 128)}
SHARED_BYTES = 227 << 10  # of an SM
WORDS = gl.constexpr(BLOCK_WORDS)
ACQUIRE = gl.constexpr("ld.global.acquire.gpu.u32 $0, [$1];")


@gluon.jit
def _copy_blocks(
    xs, x_ptr, map_ptr, n0, ne, DOWN: gl.constexpr, N: gl.constexpr, KB: gl.constexpr, F: gl.constexpr, C: gl.constexpr
):
    """Blocks F .. F + C - 1 of a slot's rows of x, C a power of two."""
    LX: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, C * N, layout=gl.SliceLayout(1, LX))  # (block, row)
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, LX))
    n = r % N
    row = n0 + n
    if not DOWN:
        row = gl.load(map_ptr + row, mask=n < ne, other=0)
    src = x_ptr + (row * (KB * 64) + (F + r // N) * 64)[:, None] + c[None, :]
    inside = ((n < ne) & (F + r // N < KB))[:, None] & (c < 64)[None, :]
    dst = xs.index(F)._reinterpret(gl.bfloat16, [C * N, 64], xs.layout)
    async_copy.async_copy_global_to_shared(dst, src, mask=inside)


@gluon.jit
def _copy_rows(xs, x_ptr, map_ptr, n0, ne, DOWN: gl.constexpr, N: gl.constexpr, KB: gl.constexpr, PADDED: gl.constexpr):
    """A slot's rows of x to shared memory [PADDED, N, 64]. Zeros where there is no block or no row: cp.async reads nothing."""
    for bit in gl.static_range(8):
        if (PADDED >> bit) & 1:
            _copy_blocks(xs, x_ptr, map_ptr, n0, ne, DOWN, N, KB, (PADDED >> (bit + 1)) << (bit + 1), 2**bit)
    async_copy.commit_group()


@gluon.jit
def _owner(u, G, T):
    """The CTA whose range [c T / G, (c + 1) T / G) holds unit u."""
    return ((u + 1) * G - 1) // T


@gluon.jit
def _add_parts(acc, part, cnt_ptr, c, last):
    """Wait until CTAs c + 1 .. last have left their parts of CTA c's last tile; add them in this order."""
    arrived = gl.inline_asm_elementwise(ACQUIRE, "=r,l", [cnt_ptr + c], dtype=gl.int32, is_pure=False, pack=1)
    while arrived < last - c:
        arrived = gl.inline_asm_elementwise(ACQUIRE, "=r,l", [cnt_ptr + c], dtype=gl.int32, is_pure=False, pack=1)
    for other in range(c + 1, last + 1):
        acc += gl.load(part + other * (acc.shape[0] * acc.shape[1]), cache_modifier=".cg")
    gl.thread_barrier()  # all have seen the count
    gl.store(cnt_ptr + c, 0)
    return acc


@gluon.jit
def _multiply(w, s, xs, base, nxt, where, k, kend, k_next, LM: gl.constexpr, N: gl.constexpr, BIG: gl.constexpr,
              NS: gl.constexpr, KB: gl.constexpr, U: gl.constexpr, R: gl.constexpr, SYNC: gl.constexpr):  # fmt: skip
    """Units k .. kend - 1 of a tile, of which w, s are the first, times the first N rows of x

    -> sums, and the address and words of the unit at nxt, unit k_next of its tile. where: offsets of words and scales, their
    row groups, and the stripes left at this tile and the next.
    """
    STRIPE: gl.constexpr = KB * WORDS
    LA: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LM, k_width=2)
    LB: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=LM, k_width=2)
    acc = gl.zeros([16 * R, N], gl.float32, layout=LM)
    wo = clip(where[0], where[2], where[4], R, NS, STRIPE)
    so = clip(where[1], where[3], where[4], R, NS, STRIPE)
    for kk in range(k, kend):
        base += U * WORDS
        ahead = kk + 1
        if kk + 1 == kend:
            base = nxt
            ahead = k_next
            wo = clip(where[0], where[2], where[5], R, NS, STRIPE)
            so = clip(where[1], where[3], where[5], R, NS, STRIPE)
        w_next, s_next = load_unit(base + wo, base + so, KB - ahead * U, U, KB)
        for j in gl.static_range(U):
            a = fragment(w[j], s[j], R, LA, BIG)
            b = xs.index(kk * U + j)
            if xs.shape[1] > N:
                b = b.slice(0, N)
            b = b.permute((1, 0))
            if SYNC:
                acc = mma_v2(a, b.load(LB), acc)
            else:
                acc = warpgroup_mma(a, b, acc, is_async=True)
                acc = warpgroup_mma_wait(1 if j < U - 1 else 0, (acc,))
        w = w_next
        s = s_next
    return acc, base, w, s


@gluon.jit(repr=lambda s: "experts_down" if s.constants["DOWN"] else "experts_gate_up")
def moe_kernel(
    w_ptr,
    x_ptr,
    bias_ptr,
    out_ptr,
    slots_ptr,
    map_ptr,
    gate_ptr,
    ws_ptr,
    cnt_ptr,
    DOWN: gl.constexpr,
    BIG: gl.constexpr,
    NS: gl.constexpr,
    KB: gl.constexpr,
    LIMIT: gl.constexpr,
    N: gl.constexpr,
    U: gl.constexpr,
    R: gl.constexpr,
    SYNC: gl.constexpr,
):
    """gate_up, or down (DOWN), of matrices of NS stripes of KB blocks. Of 16 columns a slot of up to 8 pairs takes 8.

    x_ptr rows of 64 KB; map_ptr[sorted pair]: gate_up, the token (row of x to read; its output stays in sorted order); down,
    the pair (row to write); gate_ptr[sorted pair] weights (down). ws_ptr [CTAs, 16 R, N] float32, cnt_ptr [CTAs] zeros.
    """
    UPT: gl.constexpr = (KB + U - 1) // U  # units of a row tile; in a ragged last one the tokens' blocks past KB are zero
    WG: gl.constexpr = R // 4  # stripes of a row tile
    TILES: gl.constexpr = (NS + WG - 1) // WG
    STRIPE: gl.constexpr = KB * WORDS
    LM: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2 if SYNC else 3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8] if SYNC else [16, N, 16]
    )
    if not DOWN:  # the kernel before is the router
        gdc_wait()
        gdc_launch_dependents()
    # down reads the slots before its wait: gate_up lets it start only after its own wait, when the router is done
    nact = gl.load(slots_ptr)
    T = nact * (TILES * UPT)
    G = gl.maximum(gl.minimum(gl.num_programs(0), T), 1)
    pid = gl.num_programs(0) - 1 - gl.program_id(0)
    u0 = gl.minimum(pid * T // G, gl.maximum(T - 1, 0))
    u1 = gl.minimum((pid + 1) * T // G, T)
    if pid >= G:  # more CTAs than units
        u1 = u0
    u = u0
    woff, soff, wrow, srow = offsets(R, STRIPE)
    xs = gl.allocate_shared_memory(gl.bfloat16, [UPT * U, N, 64], gl.NVMMASharedLayout(128, 16, 2))
    rm = gl.arange(0, 16 * R, layout=gl.SliceLayout(1, LM))
    rn = gl.arange(0, N, layout=gl.SliceLayout(0, LM))
    part = ws_ptr + rm[:, None] * N + rn[None, :]

    last_slot = gl.maximum(nact - 1, 0)
    ei = gl.minimum(u // (TILES * UPT), last_slot)
    e = gl.load(slots_ptr + 2 + ei * 2)
    n0 = gl.load(slots_ptr + 3 + ei * 2)
    ne = gl.load(slots_ptr + 5 + ei * 2) - n0
    e_next = gl.load(slots_ptr + 2 + gl.minimum(ei + 1, last_slot) * 2)
    t = u // UPT - ei * TILES  # row tile of the slot
    k = u % UPT  # unit of the tile
    base = w_ptr + (e.to(gl.int64) * NS + t * WG) * STRIPE + k * (U * WORDS)
    wo = clip(woff, wrow, NS - t * WG, R, NS, STRIPE)
    so = clip(soff, srow, NS - t * WG, R, NS, STRIPE)
    w, s = load_unit(base + wo, base + so, KB - k * U, U, KB)
    if DOWN:
        gdc_wait()
        gdc_launch_dependents()
    fresh = u0 >= 0
    while u < u1:
        # 1. one row tile, or the part of it in this CTA's share: units k .. kend - 1
        kend = gl.minimum(UPT, k + u1 - u)
        if fresh:
            gl.thread_barrier()
            _copy_rows(xs, x_ptr, map_ptr, n0, ne, DOWN, N, KB, UPT * U)
        rb = t * (16 * R) + rm
        bias = gl.load(bias_ptr + e * (NS * 64) + rb, mask=rb < NS * 64, other=0.0)
        # 2. where the following tile starts; at the end of the share the last unit is read again (from the L2)
        first = fresh
        tile = t
        t += 1
        fresh = t == TILES
        n0_cur = n0
        ne_cur = ne
        nxt = base + WG * STRIPE - k * (U * WORDS)
        if fresh:
            t = 0
            ei = gl.minimum(ei + 1, last_slot)
            e = e_next
            e_next = gl.load(slots_ptr + 2 + gl.minimum(ei + 1, last_slot) * 2)
            n0 = gl.load(slots_ptr + 3 + ei * 2)
            ne = gl.load(slots_ptr + 5 + ei * 2) - n0
            nxt = w_ptr + e.to(gl.int64) * (NS * STRIPE)
        t_next = t
        k_next = 0
        if u + kend - k == u1:
            nxt = base + (kend - 1 - k) * (U * WORDS)
            t_next = tile
            k_next = kend - 1
        if first:
            async_copy.wait_group(0)
            fence_async_shared()
        gl.thread_barrier()
        # 3. unpack and multiply, the next unit's loads in flight
        where = (woff, soff, wrow, srow, NS - tile * WG, NS - t_next * WG)
        if SYNC and N > 8:
            if ne_cur <= 8:
                half, base, w, s = _multiply(w, s, xs, base, nxt, where, k, kend, k_next, LM, 8, BIG, NS, KB, U, R, SYNC)
                acc = gl.join(half, gl.zeros_like(half)).permute([0, 2, 1]).reshape([16 * R, N])
                acc = gl.convert_layout(acc, LM, assert_trivial=True)
            else:
                acc, base, w, s = _multiply(w, s, xs, base, nxt, where, k, kend, k_next, LM, N, BIG, NS, KB, U, R, SYNC)
        else:
            acc, base, w, s = _multiply(w, s, xs, base, nxt, where, k, kend, k_next, LM, N, BIG, NS, KB, U, R, SYNC)
        # 4. the tile's end: hand the part on, or collect the others' and finish
        head = u - k  # first unit of the tile in the list
        if head < u0:
            gl.store(part + pid * (16 * R * N), acc)
            gl.thread_barrier()
            gl.atomic_add(cnt_ptr + _owner(head, G, T), 1, sem="release", scope="gpu")
        else:
            if kend < UPT:
                acc = _add_parts(acc, part, cnt_ptr, pid, _owner(head + UPT - 1, G, T))
            y = acc + bias[:, None]
            if DOWN:
                row = gl.load(map_ptr + n0_cur + rn, mask=rn < ne_cur, other=0)
                gate = gl.load(gate_ptr + n0_cur + rn, mask=rn < ne_cur, other=0.0)
                inside = (rn < ne_cur)[None, :] & (rb < NS * 64)[:, None]
                gl.store(out_ptr + row[None, :] * (NS * 64) + rb[:, None], (y * gate[None, :]).to(gl.bfloat16), mask=inside)
            else:
                act = swiglu(y, LIMIT, R, N)
                LS: gl.constexpr = act.type.layout
                an = gl.arange(0, N, layout=gl.SliceLayout(0, LS))
                am = tile * (8 * R) + gl.arange(0, 8 * R, layout=gl.SliceLayout(1, LS))
                inside = (an < ne_cur)[None, :] & (am < NS * 32)[:, None]
                gl.store(out_ptr + (n0_cur + an)[None, :] * (NS * 32) + am[:, None], act.to(gl.bfloat16), mask=inside)
        u += kend - k
        k = 0


@cache
def workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A partial tile and a counter for each CTA of any CONFIG; launches on one stream at a time share it."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capturing"
    tile = max(rows * columns * ctas for columns, (_, rows, _, ctas, _, _) in CONFIG.items())
    partials = torch.empty(num_sms() * tile, dtype=torch.float32, device=device)
    return partials, torch.zeros(num_sms() * max(c[3] for c in CONFIG.values()), dtype=torch.int32, device=device)


def experts_small(y: torch.Tensor, route: Route, gate_up: Stream, down: Stream, limit: float) -> torch.Tensor:
    """y [T, H] bf16 -> parts [T, 4, H]; rows of tokens that are in no slot are left as they are."""
    num_tokens, hidden = y.shape
    assert (gate_up.kind, down.kind) == ("gate_up", "down") and y.is_contiguous() and route.slots is not None
    assert gate_up.cols == down.rows == hidden and gate_up.rows == 2 * down.cols
    inner = y.new_empty(4 * num_tokens, down.cols)
    parts = y.new_empty(num_tokens, 4, hidden)
    _run(gate_up, y, inner, route, route.token, limit)
    _run(down, inner, parts, route, route.pair, limit)
    return parts


def _run(stream: Stream, x: torch.Tensor, out: torch.Tensor, route: Route, rows: torch.Tensor, limit: float) -> None:
    blocks, tile, warps, ctas, sync, registers = CONFIG[route.width]
    stripes, kb = stream.rows // 64, stream.cols // 64
    unit = min(blocks, kb)
    shared = -(-kb // unit) * unit * route.width * 128
    assert shared <= SHARED_BYTES, f"{shared} bytes of shared memory for {route.width} columns of {stream.cols}"
    launch(
        moe_kernel,
        (num_sms() * ctas,),
        *(stream.words, x, stream.bias, out, route.slots, rows, route.gate, *workspace(x.device)),
        DOWN=stream.kind == "down",
        BIG=stream.big,
        NS=stripes,
        KB=kb,
        LIMIT=limit,
        N=route.width,
        U=unit,
        R=tile // 16,
        SYNC=sync,
        num_warps=warps,
        maxnreg=registers,
    )
