# mypy: disable-error-code="no-untyped-def, misc, assignment"
"""experts_fused: moe.py's gate_up and down of few tokens in one launch, which reads the weights in one go.

    h = swiglu(W1[e] x_t + b1[e])     h [4 T, I] bf16, a row for each sorted pair
    y = w_te (W2[e] h + b2[e])        parts [T, 4, H] bf16, a row for each pair in its place
Exact products, fp32 sums in a fixed order, each of h and y rounded once. Bytes moved: the weights of the experts in use.

Work split: a unit is 16 rows of a slot's matrix (pack.py), or a few times that, all of K: 25 KB for K = 2880. The units of
gate_up of all slots, then those of down, form one list, and CTA c of G takes c, c + G, ..: the chip reads the experts one after
another, and those of down whose activations are the oldest first. A ring of units in shared memory is filled by TMA across
units, experts and both matrices. Warp j multiplies blocks j, j + W, .. of a unit, with the slot's tokens in its registers; the
warps' sums meet in shared memory, so no tile is cut between CTAs.

Down waits for a count of its slot's finished gate_up units. A CTA does all its gate_up units, which wait for nothing, before
its down units. It waits ahead, while it holds a gate_up unit back, only for units of rounds before this one, which all CTAs
complete without it. All CTAs are resident at once (one or two an SM, by registers and shared memory), so every wait ends. The
last CTA to be through with its waits resets the counters.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.launch import launch, num_sms
from simplellm.kernels.hopper.moe_unpack import activate, halves, unpack_rows
from simplellm.kernels.hopper.pack import BLOCK_WORDS, CODE_WORDS, Stream
from simplellm.kernels.hopper.router import Route


class Plan(NamedTuple):
    groups: int  # of 16 rows, of a unit: 1, 2 or 4
    warps: int  # of a CTA; they share a unit's blocks
    depth: int  # units in the ring
    ctas: int  # an SM


PLAN = Plan(2, 16, 3, 1)
WIDTH = 8  # pairs of a slot
SLOTS = 128  # most slots of a launch
SHARED_BYTES, REGISTERS = 227 << 10, 65536  # of an SM
CODES = gl.constexpr(CODE_WORDS)
ACQUIRE = gl.constexpr("ld.global.acquire.gpu.u32 $0, [$1];")
# thread 0 alone adds 1 and later looks at what was there before; nobody waits for the answer
ARRIVE = gl.constexpr("{ .reg .pred p; setp.eq.s32 p, $2, 0; mov.b32 $0, -1; @p atom.global.acq_rel.gpu.add.u32 $0, [$1], 1; }")


@gluon.constexpr_function
def _bases(size, step):
    return [[b * s for s in step] for b in (1 << i for i in range(size.bit_length() - 1))]


@gluon.constexpr_function
def _code_layout(W, P):
    """[1, W, 128 P]: a warp's block of 16 P rows; lane (g, q) has words 16 g + 4 q .. + 3 of each 128"""
    lanes = _bases(32, [0, 0, 4])
    return gl.DistributedLinearLayout(
        _bases(4, [0, 0, 1]) + _bases(P, [0, 0, 128]), lanes, _bases(W, [0, 1, 0]), [], [1, W, 128 * P]
    )


@gluon.constexpr_function
def _scale_layout(W, P):
    """[1, W, 8 P]: lane (g, q) has word g of each 8"""
    lanes = [[0, 0, 0]] * 2 + _bases(8, [0, 0, 1])
    return gl.DistributedLinearLayout(_bases(P, [0, 0, 8]), lanes, _bases(W, [0, 1, 0]), [], [1, W, 8 * P])


@gluon.constexpr_function
def _token_layout(W, N):
    """[W, 32, N], pairs of k: what the MMA's B operand [W, 64, N] has in a lane"""
    lanes = _bases(4, [0, 1, 0]) + _bases(8, [0, 0, 1])
    return gl.DistributedLinearLayout(
        _bases(8, [0, 4, 0]) + _bases(N // 8, [0, 0, 8]), lanes, _bases(W, [1, 0, 0]), [], [W, 32, N]
    )


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
def _locate(u, num_slots, UP: gl.constexpr, DOWN: gl.constexpr):
    """Unit u -> whether it is down's, its slot, and which of the slot's UP or DOWN units it is"""
    first_down = num_slots * UP
    down = u >= first_down
    slot, place = u // UP, u % UP
    if down:
        slot, place = (u - first_down) // DOWN, (u - first_down) % DOWN
    return down, slot, place


@gluon.jit
def _copy_unit(up_codes, up_scales, down_codes, down_scales, codes, scales, full, at, down, e, place, wanted,
               UP: gl.constexpr, DOWN: gl.constexpr, P: gl.constexpr):  # fmt: skip
    """A unit's blocks to place `at` of the ring, zeros past the matrix"""
    barrier, c, s = full.index(at), codes.index(at), scales.index(at)
    mbarrier.expect(barrier, up_codes.block_type.nbytes + up_scales.block_type.nbytes, pred=wanted)
    part = place % (4 // P)
    if down:
        row = e * (DOWN * P // 4) + place // (4 // P)
        tma.async_copy_global_to_shared(down_codes, [row, 0, part * (128 * P)], barrier, c, pred=wanted)
        tma.async_copy_global_to_shared(down_scales, [row, 0, CODES + part * (8 * P)], barrier, s, pred=wanted)
    else:
        row = e * (UP * P // 4) + place // (4 // P)
        tma.async_copy_global_to_shared(up_codes, [row, 0, part * (128 * P)], barrier, c, pred=wanted)
        tma.async_copy_global_to_shared(up_scales, [row, 0, CODES + part * (8 * P)], barrier, s, pred=wanted)


@gluon.jit
def _wait_for(count_ptr, wanted):
    arrived = gl.inline_asm_elementwise(ACQUIRE, "=r,l", [count_ptr], dtype=gl.int32, is_pure=False, pack=1)
    while arrived < wanted:
        arrived = gl.inline_asm_elementwise(ACQUIRE, "=r,l", [count_ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_tokens(x_ptr, h_ptr, slots_ptr, token_ptr, count_ptr, num_slots, down, slot, N: gl.constexpr,
                 UP: gl.constexpr, UP_K: gl.constexpr, DOWN_K: gl.constexpr, U: gl.constexpr):  # fmt: skip
    """A slot's first pair and number of pairs, and their rows of x, or of h once gate_up of the slot is done

    as U of [W, 32, N], each element a pair of k. x and h are passed as int32.
    """
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = _token_layout(W, N)
    n0 = gl.load(slots_ptr + 3 + slot * 2)
    ne = gl.load(slots_ptr + 5 + slot * 2, mask=slot < num_slots, other=0) - n0
    n = _axis(N, 2, L)
    k = _axis(W, 0, L) * 32 + _axis(32, 1, L)
    if down:
        _wait_for(count_ptr + slot, UP)
        base, row, size = h_ptr, n0 + n, DOWN_K // 2
    else:
        base, row, size = x_ptr, gl.load(token_ptr + n0 + n, mask=n < ne, other=0), UP_K // 2
    b = ()
    for j in gl.static_range(U):
        inside = (n < ne) & (k + j * (32 * W) < size)
        b = b + (gl.load(base + (row * size + k + j * (32 * W)), mask=inside, other=0, cache_modifier=".cg"),)
    return n0, ne, b


@gluon.jit
def _multiply(codes, scales, at, b, LM: gl.constexpr, P: gl.constexpr, U: gl.constexpr, BIG: gl.constexpr):
    """The warps' sums [W, 16 P, N] of the unit at `at` of the ring with tokens b"""
    W: gl.constexpr = gl.num_warps()
    N: gl.constexpr = b[0].shape[2]
    LA: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LM, k_width=2)
    LB: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=LM, k_width=2)
    acc = gl.zeros([W, 16 * P, N], gl.float32, layout=LM)
    for j in gl.static_range(U):
        w = codes.index(at).slice(j * W, W, dim=1).load(_code_layout(W, P)).reshape([W * P, 8, 4, 4])
        s = scales.index(at).slice(j * W, W, dim=1).load(_scale_layout(W, P)).reshape([W * P, 8])
        a = unpack_rows(w, s, W * P, BIG).reshape([W, 16 * P, 64])
        x = halves(b[j]).permute([0, 1, 3, 2]).reshape([W, 64, N])
        acc = mma_v2(gl.convert_layout(a, LA, assert_trivial=True), gl.convert_layout(x, LB, assert_trivial=True), acc)
    return acc


@gluon.jit(repr=lambda s: "experts_fused", do_not_specialize=["last_slot"])
def fused_kernel(
    up_codes, up_scales, down_codes, down_scales, up_bias_ptr, down_bias_ptr, x_ptr, h_ptr, h_pairs_ptr, out_ptr,
    slots_ptr, token_ptr, pair_ptr, gate_ptr, count_ptr, last_slot,
    UP: gl.constexpr, DOWN: gl.constexpr, UP_K: gl.constexpr, DOWN_K: gl.constexpr, BIG: gl.constexpr, LIMIT: gl.constexpr,
    N: gl.constexpr, P: gl.constexpr, U: gl.constexpr, DEPTH: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """UP, DOWN units of a slot's matrices of UP_K, DOWN_K columns; U blocks of a unit a warp; slots_ptr ends with last_slot.

    x and h_pairs: x and h as int32. count_ptr int32 [SLOTS + 1] zeros: finished gate_up units of each slot, and CTAs through
    with their waits.
    """
    W: gl.constexpr = gl.num_warps()
    LM: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    # of the warps' sums [W, P, 2, 8, N]: lanes along rows, then along the sums to add
    L5: gl.constexpr = gl.BlockedLayout([W // 4, 1, 2, 1, 1], [4, 1, 1, 8, 1], [1, P, 1, 1, W // P], [3, 0, 2, 4, 1])
    L4: gl.constexpr = gl.SliceLayout(0, L5)
    BLOCKS: gl.constexpr = up_codes.block_shape[1]
    codes = gl.allocate_shared_memory(gl.int32, [DEPTH, 1, BLOCKS, 128 * P], up_codes.layout)
    scales = gl.allocate_shared_memory(gl.int32, [DEPTH, 1, BLOCKS, 8 * P], up_scales.layout)
    sums = gl.allocate_shared_memory(gl.float32, [W, P, 2, 8, N], gl.SwizzledSharedLayout(1, 1, 1, [3, 0, 4, 2, 1]))
    full = gl.allocate_shared_memory(gl.int64, [DEPTH + 1, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(DEPTH + 1):
        mbarrier.init(full.index(j), count=1)
    G = gl.num_programs(0)
    c = gl.program_id(0)
    gl.thread_barrier()
    # a block that nobody needs, for the descriptors to be at hand when the experts are known
    mbarrier.expect(full.index(DEPTH), 2 * (up_codes.block_type.nbytes + up_scales.block_type.nbytes))
    tma.async_copy_global_to_shared(up_codes, [0, 0, 0], full.index(DEPTH), codes.index(DEPTH - 1))
    tma.async_copy_global_to_shared(up_scales, [0, 0, CODES], full.index(DEPTH), scales.index(DEPTH - 1))
    tma.async_copy_global_to_shared(down_codes, [0, 0, 0], full.index(DEPTH), codes.index(DEPTH - 1))
    tma.async_copy_global_to_shared(down_scales, [0, 0, CODES], full.index(DEPTH), scales.index(DEPTH - 1))
    gdc_wait()
    gdc_launch_dependents()
    num_slots = gl.load(slots_ptr)
    T = num_slots * (UP + DOWN)
    es = ()
    for j in gl.static_range(DEPTH):  # all on their way before the first is needed
        _, slot, _ = _locate(c + j * G, num_slots, UP, DOWN)
        es = es + (gl.load(slots_ptr + 2 + gl.minimum(slot, last_slot) * 2),)
    for j in gl.static_range(DEPTH):
        if j == DEPTH - 1:
            mbarrier.wait(full.index(DEPTH), 0)
        down, _, place = _locate(c + j * G, num_slots, UP, DOWN)
        _copy_unit(up_codes, up_scales, down_codes, down_scales, codes, scales, full, j, down, es[j], place, c + j * G < T,
                   UP, DOWN, P)  # fmt: skip
    u = c
    i = 0
    down, slot, place = _locate(u, num_slots, UP, DOWN)
    slot = gl.minimum(slot, last_slot)  # of a CTA without a unit it is none
    down = down & (u < T)
    e = gl.load(slots_ptr + 2 + slot * 2)
    n0, ne, b = _load_tokens(x_ptr, h_pairs_ptr, slots_ptr, token_ptr, count_ptr, num_slots, down, slot, N, UP, UP_K, DOWN_K, U)
    r = _axis(P, 0, L4) * 16 + _axis(2, 1, L4) * 8 + _axis(8, 2, L4)  # of a unit's rows
    n = _axis(N, 3, L4)
    LT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    thread = gl.arange(0, 32 * W, layout=LT)
    through_ptr = count_ptr + SLOTS + 0 * thread
    before = gl.full([32 * W], -1, gl.int32, layout=LT)
    sure = u < 0  # all threads are through with the wait for this unit
    told = u < 0
    while u < T:
        # 1. what the end of this unit needs, and where the next one and the one to copy are
        at = i % DEPTH
        row = place * (16 * P) + r
        if down:
            bias = gl.load(down_bias_ptr + (e * (16 * P * DOWN) + row))
        else:
            bias = gl.load(up_bias_ptr + (e * (16 * P * UP) + row))
        gate = gl.load(gate_ptr + n0 + n, mask=(n < ne) & down, other=0.0)
        pair = gl.load(pair_ptr + n0 + n, mask=(n < ne) & down, other=0)
        down_far, slot_far, place_far = _locate(u + DEPTH * G, num_slots, UP, DOWN)
        e_far = gl.load(slots_ptr + 2 + gl.minimum(slot_far, last_slot) * 2)
        down_next, slot_next, place_next = _locate(u + G, num_slots, UP, DOWN)
        changed = (u + G < T) & ((slot_next != slot) | (down_next != down))
        # every CTA has completed its rounds before this one by itself
        soon = changed & ((down_next == 0) | ((slot_next + 1) * UP <= i * G))
        e_next, n0_next, ne_next, b_next = e, n0, ne, b
        if changed:
            e_next = gl.load(slots_ptr + 2 + slot_next * 2)
        if soon:
            n0_next, ne_next, b_next = _load_tokens(
                x_ptr, h_pairs_ptr, slots_ptr, token_ptr, count_ptr, num_slots, down_next, slot_next, N, UP, UP_K, DOWN_K, U
            )
        if sure & down & (u + G >= T):
            before = gl.inline_asm_elementwise(ARRIVE, "=&r,l,r", [through_ptr, thread], gl.int32, is_pure=False, pack=1)
            told = u >= 0
        # 2. multiply; when all warps are done, their place in the ring is free
        mbarrier.wait(full.index(at), i // DEPTH & 1)
        acc = _multiply(codes, scales, at, b, LM, P, U, BIG)
        sums.store(acc.reshape([W, P, 2, 8, N]))
        gl.thread_barrier()
        _copy_unit(up_codes, up_scales, down_codes, down_scales, codes, scales, full, at, down_far, e_far, place_far,
                   u + DEPTH * G < T, UP, DOWN, P)  # fmt: skip
        # 3. add the warps' sums and finish
        y = gl.sum(sums.load(L5), 0) + bias
        if down:
            gl.store(out_ptr + (pair * (16 * P * DOWN) + row), (y * gate).to(gl.bfloat16), mask=n < ne)
        else:
            gates, ups = y.permute([0, 2, 3, 1]).split()
            act = activate(gates, ups, LIMIT).to(gl.bfloat16)
            LS: gl.constexpr = act.type.layout
            ns, column = _axis(N, 2, LS), place * (8 * P) + _axis(P, 0, LS) * 8 + _axis(8, 1, LS)
            gl.store(h_ptr + ((n0 + ns) * DOWN_K + column), act, mask=ns < ne)
        gl.thread_barrier()  # all of the unit is stored, and its sums are read
        if down == 0:
            gl.atomic_add(count_ptr + slot, 1, sem="release", scope="gpu")
        if changed & (soon == 0):
            n0_next, ne_next, b_next = _load_tokens(
                x_ptr, h_pairs_ptr, slots_ptr, token_ptr, count_ptr, num_slots, down_next, slot_next, N, UP, UP_K, DOWN_K, U
            )
        down, slot, place, e, n0, ne, b = down_next, slot_next, place_next, e_next, n0_next, ne_next, b_next
        sure = soon | (changed == 0)
        u += G
        i += 1
    # 4. the last CTA to be through with its waits, and its gate_up units, resets the counters
    if told == 0:
        gl.thread_barrier()
        before = gl.inline_asm_elementwise(ARRIVE, "=&r,l,r", [through_ptr, thread], gl.int32, is_pure=False, pack=1)
    last = before == G - 1
    for s in range(num_slots):
        gl.store(count_ptr + s + 0 * thread, 0, mask=last)
    gl.store(through_ptr, 0, mask=last)


@cache
def counters(device: torch.device) -> torch.Tensor:
    """Zeros; launches on one stream at a time share them."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capturing"
    return torch.zeros(SLOTS + 1, dtype=torch.int32, device=device)


def experts_fused(
    y: torch.Tensor, route: Route, gate_up: Stream, down: Stream, limit: float, plan: Plan = PLAN
) -> torch.Tensor:
    """y [T, H] bf16 -> parts [T, 4, H]; rows of tokens that are in no slot are left as they are. T <= 32, slots of WIDTH."""
    num_tokens, hidden = y.shape
    assert (gate_up.kind, down.kind) == ("gate_up", "down") and y.is_contiguous() and route.slots is not None
    assert gate_up.cols == down.rows == hidden and gate_up.rows == 2 * down.cols and gate_up.big == down.big
    assert route.width == WIDTH and 4 * num_tokens <= SLOTS
    rows = 16 * plan.groups
    blocks = -(-max(gate_up.cols, down.cols) // (64 * plan.warps))  # of a unit, a warp
    stripe = plan.warps * triton.next_power_of_2(blocks)  # blocks of a unit's place in the ring
    unit = 4 * stripe * BLOCK_WORDS // 4
    shared = plan.groups * (plan.depth * unit + plan.warps * 16 * WIDTH * 4) + 2048  # barriers, and 1 KB for the system
    assert shared * plan.ctas <= SHARED_BYTES + 1024, "some CTAs would start only after others' end, which may wait for them"
    h, parts = y.new_empty(4 * num_tokens, down.cols), y.new_empty(num_tokens, 4, hidden)
    descriptors = [d for stream in (gate_up, down) for d in describe(stream, stripe, plan.groups)]
    launch(
        fused_kernel, (num_sms() * plan.ctas,), *descriptors, gate_up.bias, down.bias,
        y.view(torch.int32), h, h.view(torch.int32), parts,
        route.slots, route.token, route.pair, route.gate, counters(y.device), len(route.slots) // 2 - 3,
        UP=gate_up.rows // rows, DOWN=down.rows // rows, UP_K=gate_up.cols, DOWN_K=down.cols, BIG=gate_up.big, LIMIT=limit,
        N=WIDTH, P=plan.groups, U=blocks, DEPTH=plan.depth, SLOTS=SLOTS,
        num_warps=plan.warps, maxnreg=min(255, REGISTERS // (32 * plan.warps * plan.ctas)),
    )  # fmt: skip
    return parts


def describe(stream: Stream, blocks: int, groups: int) -> list[TensorDescriptor]:
    """Of 16 `groups` rows' codes and scales, in `blocks` blocks of a stripe."""
    words = stream.words.flatten(0, 1)
    return [
        TensorDescriptor.from_tensor(words, [1, blocks, columns], gl.NVMMASharedLayout(min(128, 4 * columns), 32, 3))
        for columns in (groups * CODE_WORDS // 4, groups * (BLOCK_WORDS - CODE_WORDS) // 4)
    ]
