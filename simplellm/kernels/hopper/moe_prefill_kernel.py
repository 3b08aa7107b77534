# mypy: disable-error-code="no-untyped-def, misc, assignment"
"""Grouped matrix product of MXFP4 experts with many tokens, in Gluon: what moe_prefill launches twice.

A tile is an expert e, up to BN consecutive sorted pairs p and 64 GROUPS rows m of the expert's matrix W [64 stripes, K]:
    z[m, p] = sum_k W[m, k] x[p, k] + b[m]                 exact bf16 weights, bf16 x, float32 sums
    gate_up: out[p, i] = swiglu(z) in bf16, out [P, 32 stripes]; units i of a stripe: rows 16 w + g gate, 16 w + 8 + g up
    down: out[pair[p], m] = gate[p] z[m, p] in bf16, out [P, 64 stripes]
x [P, K] bf16 holds the pairs' rows in sorted order; words, biases: a Stream of pack.py; K = 64 units UNIT.
tiles int32 [n + 1, 4]: the number n of column tiles, then expert, first p and count of each.

Weights are the A side of wgmma and go from memory to registers, where each is unpacked once for up to 256 pairs, without
shuffles (moe_unpack.py). Tokens are the B side, in a ring of STAGES blocks of 64 columns in shared memory, filled by TMA.
One CTA a SM, persistent: a producer warp, and GROUPS warpgroups with a stripe of 64 rows each and the same tokens. A
warpgroup unpacks a block, multiplies and waits, since its A registers may not be written before; meanwhile the others
multiply. Unpacking takes some 100 clocks, the product 2 BN: two or three warpgroups out of step keep the tensor cores busy.
With LAG they also start their tiles a unit of blocks one after another, so as not to store their results all at once.

Tiles that run at the same time have the same tokens, or else the same expert, so that both come from the L2. A tile half
or a quarter full takes half or a quarter of the products. Bytes from memory: the weights of every column tile, 4.25 bit
each (but once an expert as long as they stay in the L2), x and out once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.moe_unpack import WORDS, fragment, offsets, swiglu

BOX = gl.constexpr(64)  # pairs of one TMA copy


@gluon.jit
def _load(stream, places, UNIT: gl.constexpr, POLICY: gl.constexpr):
    """a thread's words of UNIT blocks that follow each other: codes and scales"""
    codes = ()
    scales = ()
    for j in gl.static_range(UNIT):
        codes = codes + (gl.load(stream + j * WORDS + places[0], eviction_policy=POLICY),)
        scales = scales + (gl.load(stream + j * WORDS + places[1], eviction_policy=POLICY),)
    return codes, scales


@gluon.jit
def _pieces(z, N: gl.constexpr, C: gl.constexpr):
    """[64, N] -> N / C tensors [64, C], without moving anything"""
    if N == C:
        return (z,)
    else:
        lo, hi = z.reshape([64, 2, N // 2]).permute([0, 2, 1]).split()
        return _pieces(lo, N // 2, C) + _pieces(hi, N // 2, C)


@gluon.jit
def _store(
    z, stripe, first, count, out, pair, gate, stripes,
    DOWN: gl.constexpr, LIMIT: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """the tile's results by way of shared memory: a pair's units of a stripe are 64 consecutive bytes, its outputs 128"""
    C: gl.constexpr = min(N, 32 if DOWN else 64)
    M: gl.constexpr = 64 if DOWN else 32
    L: gl.constexpr = gl.BlockedLayout([8, 1], [M // 8, 256 // M], [1, 4], [0, 1])
    m = gl.arange(0, M, layout=gl.SliceLayout(1, L))[:, None]
    p = gl.arange(0, C, layout=gl.SliceLayout(0, L))
    zs = _pieces(z, N, C)
    for c in gl.static_range(N // C):
        if c * C < count:
            real = c * C + p < count
            at = first + c * C + p
            if DOWN:
                at = gl.load(pair + at, mask=real, other=0)
                share = gl.load(gate + first + c * C + p, mask=real, other=0.0)
                piece = (gl.convert_layout(zs[c], L) * share[None, :]).to(gl.bfloat16)
            else:
                piece = gl.convert_layout(swiglu(zs[c], LIMIT, 4, C).to(gl.bfloat16), L)
            gl.store(out + at[None, :] * (stripes * M) + (stripe * M + m), piece, mask=real[None, :] & (m < M))


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _tile(
    held, stream, after, bias, stripe, first, count, stage, phase, turn, places, data,
    G: gl.constexpr, DOWN: gl.constexpr, BIG: gl.constexpr, LIMIT: gl.constexpr,
    UNIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr, POLICY: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """N columns of a tile. `held`: the first unit's words, on their way; returns those of the tile `after`, stage, phase"""
    x, xs, full, empty, ahead, tiles, words, biases, out, pair, gate, stripes, units = data
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    shift = gl.load(bias + rows)
    acc = gl.zeros([64, N], gl.float32, layout=ACC)
    if LAG and G > 0:
        mbarrier.wait(ahead.index(G - 1), turn)
    gl.assume(units > 0)  # else ptxas, for the sake of a loop that is not entered, waits for every wgmma
    for u in range(units):
        stream += UNIT * WORDS
        if u == units - 1:
            stream = after
        coming = _load(stream, places, UNIT, POLICY)
        for j in gl.static_range(UNIT):
            a = fragment(held[0][j], held[1][j], 4, A, BIG)
            mbarrier.wait(full.index(stage), phase)
            b = xs.index(stage).slice(0, N, dim=0).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(0, (acc,))
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = _next(stage, phase, STAGES)
        held = coming
        if LAG and G < GROUPS - 1:
            mbarrier.arrive(ahead.index(G), count=1, pred=u == 0)
    if stripe < stripes:
        _store(acc + shift[:, None], stripe, first, count, out, pair, gate, stripes, DOWN, LIMIT, N)
    return held, stage, phase


@gluon.jit
def _consumer(
    data, G: gl.constexpr,
    DOWN: gl.constexpr, BIG: gl.constexpr, LIMIT: gl.constexpr, BN: gl.constexpr, UNIT: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr, POLICY: gl.constexpr,
):  # fmt: skip
    """warpgroup G: stripe GROUPS r + G of row tile r; beyond the matrix it repeats the last stripe and stores nothing"""
    x, xs, full, empty, ahead, tiles, words, biases, out, pair, gate, stripes, units = data
    row_tiles = (stripes + GROUPS - 1) // GROUPS
    total = gl.load(tiles) * row_tiles
    i = gl.program_id(0)
    if i < total:
        codes, scales, _, _ = offsets(4, 0)
        places = (codes, scales)
        stage = 0
        phase = 0
        turn = 0
        expert = gl.load(tiles + 4 + i // row_tiles * 4)
        first = gl.load(tiles + 5 + i // row_tiles * 4)
        count = gl.load(tiles + 6 + i // row_tiles * 4)
        stripe = i % row_tiles * GROUPS + G
        place = expert * stripes + gl.minimum(stripe, stripes - 1)
        stream = words + place.to(gl.int64) * (units * UNIT * WORDS)
        held = _load(stream, places, UNIT, POLICY)
        while i < total:
            i += gl.num_programs(0)
            bias = biases + place * 64
            this = stripe
            t = gl.minimum(i, total - 1)  # past the end: words nobody needs
            expert = gl.load(tiles + 4 + t // row_tiles * 4)
            first_next = gl.load(tiles + 5 + t // row_tiles * 4)
            count_next = gl.load(tiles + 6 + t // row_tiles * 4)
            stripe = t % row_tiles * GROUPS + G
            place = expert * stripes + gl.minimum(stripe, stripes - 1)
            after = words + place.to(gl.int64) * (units * UNIT * WORDS)
            if BN >= 256 and count <= BN // 4:
                held, stage, phase = _tile(
                    held, stream, after, bias, this, first, count, stage, phase, turn, places, data,
                    G, DOWN, BIG, LIMIT, UNIT, GROUPS, STAGES, LAG, POLICY, BN // 4,
                )  # fmt: skip
            elif BN >= 128 and count <= BN // 2:
                held, stage, phase = _tile(
                    held, stream, after, bias, this, first, count, stage, phase, turn, places, data,
                    G, DOWN, BIG, LIMIT, UNIT, GROUPS, STAGES, LAG, POLICY, BN // 2,
                )  # fmt: skip
            else:
                held, stage, phase = _tile(
                    held, stream, after, bias, this, first, count, stage, phase, turn, places, data,
                    G, DOWN, BIG, LIMIT, UNIT, GROUPS, STAGES, LAG, POLICY, BN,
                )  # fmt: skip
            turn ^= 1
            stream = after
            first = first_next
            count = count_next


@gluon.jit
def _producer(data, BN: gl.constexpr, UNIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """one warp: the tokens of every tile, block by block, into the ring; boxes without a pair of the tile are left out"""
    x, xs, full, empty, ahead, tiles, words, biases, out, pair, gate, stripes, units = data
    row_tiles = (stripes + GROUPS - 1) // GROUPS
    total = gl.load(tiles) * row_tiles
    ROWS: gl.constexpr = min(BN, BOX)
    stage = 0
    phase = 1
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        first = gl.load(tiles + 5 + i // row_tiles * 4)
        count = gl.load(tiles + 6 + i // row_tiles * 4)
        boxes = (count + ROWS - 1) // ROWS
        for k in range(units * UNIT):
            mbarrier.wait(empty.index(stage), phase)
            for n in gl.static_range(1, BN // ROWS + 1):
                mbarrier.expect(full.index(stage), n * ROWS * 128, pred=boxes == n)
            for box in gl.static_range(BN // ROWS):
                tma.async_copy_global_to_shared(
                    x,
                    [first + box * ROWS, k * 64],
                    full.index(stage),
                    xs.index(stage).slice(box * ROWS, ROWS, dim=0),
                    pred=box < boxes,
                )
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit(
    do_not_specialize=["stripes", "units"],
    repr=lambda s: "experts_many_down" if s.constants["DOWN"] else "experts_many_gate_up",
)
def grouped(
    x, words, biases, out, tiles, pair, gate, stripes, units,
    DOWN: gl.constexpr, BIG: gl.constexpr, LIMIT: gl.constexpr, BN: gl.constexpr, UNIT: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, LAG: gl.constexpr, POLICY: gl.constexpr,
):  # fmt: skip
    """x: descriptor of [P, K] with boxes of [min(BN, BOX), 64]; the rest as above. GROUPS: 2 or 3."""
    gdc_wait()
    gdc_launch_dependents()
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 64], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ahead = gl.allocate_shared_memory(gl.int64, [GROUPS - 1, 1], mbarrier.MBarrierLayout())
    for g in gl.static_range(GROUPS - 1):
        mbarrier.init(ahead.index(g), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    data = (x, xs, full, empty, ahead, tiles, words, biases, out, pair, gate, stripes, units)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consumer, (data, 0, DOWN, BIG, LIMIT, BN, UNIT, GROUPS, STAGES, LAG, POLICY)),
                (_consumer, (data, 1, DOWN, BIG, LIMIT, BN, UNIT, GROUPS, STAGES, LAG, POLICY)),
                (_producer, (data, BN, UNIT, GROUPS, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (data, 0, DOWN, BIG, LIMIT, BN, UNIT, GROUPS, STAGES, LAG, POLICY)),
                (_consumer, (data, 1, DOWN, BIG, LIMIT, BN, UNIT, GROUPS, STAGES, LAG, POLICY)),
                (_consumer, (data, 2, DOWN, BIG, LIMIT, BN, UNIT, GROUPS, STAGES, LAG, POLICY)),
                (_producer, (data, BN, UNIT, GROUPS, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
