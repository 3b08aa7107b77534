"""A consumer warpgroup of chunk attention: 64 query rows of an item over its pages, from the diagonal leftwards.

Per page it starts S = Q K(c)^T and O += P V(c - 1) together, waits for S, and does the softmax while the second product still
runs. The order of waits, and what crosses the loops, is what lets ptxas keep the products asynchronous: after a change look for
its C75xx messages (Triton swallows them) and for spills.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from simplellm.kernels.spans import TILE, TILE_FIELDS

# The frozen maximum. exp2(s - m) may take any reference m that does not overflow. The pages on the diagonal, which need a mask,
# set m by an ordinary online softmax, with SHIFT of head room; all pages left of them use that m as it is: no row maximum, no
# rescaling of O, no shuffles. What is flushed to 0 lies below 2^-94 of the row's largest weight on the diagonal. A row whose
# sum exceeds OVER (a score some 131 above the diagonal's maximum, in base 2) raises its warpgroup's flag in `redo`, and a
# second launch computes that item again with the online softmax.

D = gl.constexpr(64)
PAGE = gl.constexpr(128)  # tokens a page, and keys a step
ROWS = gl.constexpr(64)  # query rows of a consumer warpgroup
NWG = gl.constexpr(TILE // 64)  # consumer warpgroups
FIELDS = gl.constexpr(TILE_FIELDS)
LOG2E = gl.constexpr(1.4426950408889634)
SCALE = gl.constexpr(0.125 * 1.4426950408889634)  # of q.k, in base 2
SHIFT = gl.constexpr(32.0)  # head room above the maximum, in base 2
OVER = gl.constexpr(1e30)
NEG = gl.constexpr(-1e30)  # a masked score
FLOOR = gl.constexpr(-1e20)  # the first maximum: far above NEG, so that a row with every key masked gets weights 0

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2))


@gluon.jit
def exp2(x):
    """The bare instruction; volatile, so that LLVM does not sink it out of the place chosen below."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def item_of(k):
    """k-th work item of this program: rounds over all programs, every second round backwards."""
    P = gl.num_programs(0)
    pid = gl.program_id(0)
    return k * P + gl.where(k % 2 == 1, P - 1 - pid, pid)


@gluon.jit
def item_count(n_items):
    P = gl.num_programs(0)
    rounds = n_items // P
    pid = gl.program_id(0)
    last = gl.where(rounds % 2 == 1, P - 1 - pid, pid)
    return rounds + (last < n_items % P).to(gl.int32)


@gluon.jit
def flagged(redo, item):
    """Whether a warpgroup of the first launch met an overflow in this item."""
    flags = gl.load(redo + item * NWG)
    for g in gl.static_range(1, NWG):
        flags |= gl.load(redo + item * NWG + g)
    return flags != 0


@gluon.jit
def page_range(pos0, n_rows, WINDOW: gl.constexpr):
    hi = (pos0 + n_rows - 1) // PAGE + 1
    lo = 0
    if WINDOW > 0:
        lo = gl.maximum(pos0 - WINDOW + 1, 0) // PAGE
    return lo, hi


@gluon.jit
def skip_page(k_full, v_full, empty, c, ST: gl.constexpr):
    """Release a page that this warpgroup does not need. It must have arrived first, or the barriers lose count."""
    mbarrier.wait(k_full.index(c % ST), (c // ST) & 1)
    mbarrier.wait(v_full.index(c % ST), (c // ST) & 1)
    mbarrier.arrive(empty.index(c % ST), count=1)


@gluon.jit
def part_sum(p):
    """Row sums over the columns that one thread holds: (64, 128) -> (64, 8), no shuffles."""
    return gl.sum(p.reshape([ROWS, p.shape[1] // 8, 8]), axis=1)


@gluon.jit
def mask(s, diag, WINDOW: gl.constexpr):
    """Keep column c of row r where c <= r + diag (and c > r + diag - WINDOW).

    Done in the shape (rows, 16, 8), in which a thread holds one pair of columns of each eight: the bound of each eight is
    then one addition of a constant, instead of one register for each column number.
    """
    E: gl.constexpr = s.shape[1] // 8
    s3 = s.reshape([ROWS, E, 8])
    L3: gl.constexpr = s3.type.layout
    r = diag + gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L3)))
    e = 8 * gl.arange(0, E, layout=gl.SliceLayout(1, gl.SliceLayout(0, L3)))
    c = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, L3)))
    d = r[:, None][:, :, None] - c[None, :][None, :, :]
    s3 = gl.where(d >= e[:, None][None, :, :], s3, NEG)
    if WINDOW > 0:
        s3 = gl.where(d < e[:, None][None, :, :] + WINDOW, s3, NEG)
    return gl.convert_layout(s3.reshape([ROWS, s.shape[1]]), S_LAYOUT)


@gluon.jit
def softmax(s, m, total, FROZEN: gl.constexpr):
    """p = exp2(s * SCALE - m'), the new maximum m', partial row sums, and alpha = exp2(m - m') (unused when frozen)."""
    if FROZEN:
        p = exp2(s * SCALE - m[:, None])
        return p, m, total + part_sum(p), m
    else:
        m_new = gl.maximum(m, gl.max(s, axis=1) * SCALE + SHIFT)
        alpha = exp2(m - m_new)
        p = exp2(s * SCALE - m_new[:, None])
        total = total * gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout))[:, None] + part_sum(p)
        return p, m_new, total, alpha


@gluon.jit
def scores(q, k):
    """Starts q [ROWS, D] times a page k [PAGE, D] transposed."""
    return warpgroup_mma(q, k.permute((1, 0)), gl.zeros((ROWS, PAGE), gl.float32, S_LAYOUT), use_acc=False, is_async=True)


@gluon.jit
def page_step(
    q, ring, c, first, p, o, m, total, diag, ST: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr, FROZEN: gl.constexpr
):
    """Page c. first = 1: p is zero, and page c - 1 is released already."""
    k_s, v_s, k_full, v_full, empty = ring
    ks = c % ST
    vs = (c - 1 + first) % ST
    phase = (c // ST) & 1
    mbarrier.wait(k_full.index(ks), phase)
    mbarrier.wait(v_full.index(ks), phase)
    s = scores(q, k_s.index(ks))
    product = warpgroup_mma(p, v_s.index(vs), o, is_async=True)
    s = warpgroup_mma_wait(1, (s,))
    if MASK:
        s = mask(s, diag, WINDOW)
    weights, m, total, alpha = softmax(s, m, total, FROZEN)
    mbarrier.wait(v_full.index(ks), phase)  # known to pass; its branch keeps ptxas from raising the next wait
    o, p = warpgroup_mma_wait(0, (product, p))
    mbarrier.arrive(empty.index(vs), count=1, pred=first == 0)
    if not FROZEN:
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return gl.convert_layout(weights.to(gl.bfloat16), P_LAYOUT), o, m, total


@gluon.jit
def last_product(ring, c, p, o, ST: gl.constexpr):
    """O += P V of page c - 1, which is then released."""
    k_s, v_s, k_full, v_full, empty = ring
    vs = (c - 1) % ST
    o = warpgroup_mma(p, v_s.index(vs), o, is_async=True)
    o = warpgroup_mma_wait(0, (o,))
    mbarrier.arrive(empty.index(vs), count=1)
    return o


@gluon.jit
def walk(q, ring, c, row_lo, w_hi, w_full, ST: gl.constexpr, WINDOW: gl.constexpr, FROZEN: gl.constexpr):
    """Pages w_hi down to w_full with a mask, the rest without; c: number of page w_hi in the ring -> c, o, m, total."""
    k_s, v_s, k_full, v_full, empty = ring
    ks = c % ST
    mbarrier.wait(k_full.index(ks), (c // ST) & 1)
    s = scores(q, k_s.index(ks))
    s = warpgroup_mma_wait(0, (s,))
    s = mask(s, row_lo - w_hi * PAGE, WINDOW)
    m = gl.full((ROWS,), FLOOR, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = part_sum(gl.zeros((ROWS, PAGE), gl.float32, S_LAYOUT))
    o = gl.zeros((ROWS, D), gl.float32, O_LAYOUT)
    weights, m, total, alpha = softmax(s, m, total, False)
    p = gl.convert_layout(weights.to(gl.bfloat16), P_LAYOUT)
    mbarrier.wait(v_full.index(ks), (c // ST) & 1)
    c += 1
    for t in range(w_hi - w_full):
        diag = row_lo - (w_hi - 1 - t) * PAGE
        p, o, m, total = page_step(q, ring, c, 0, p, o, m, total, diag, ST, WINDOW, True, False)
        c += 1
    if FROZEN:  # enter the next loop with P = 0: the P of another loop costs 64 PRMT a page
        o = last_product(ring, c, p, o, ST)
        p = gl.zeros((ROWS, PAGE), gl.bfloat16, P_LAYOUT)
        for t in range(w_full):
            first = gl.where(t == 0, 1, 0)
            p, o, m, total = page_step(q, ring, c, first, p, o, m, total, 0, ST, WINDOW, False, True)
            c += 1
        if w_full > 0:
            o = last_product(ring, c, p, o, ST)
    else:
        if WINDOW == 0:
            for _t in range(w_full):
                p, o, m, total = page_step(q, ring, c, 0, p, o, m, total, 0, ST, WINDOW, False, False)
                c += 1
        o = last_product(ring, c, p, o, ST)
    return c, o, m, total


@gluon.jit
def write(out, redo, item, head, row0, n_rows, o, m, total, sink, HQ: gl.constexpr, FROZEN: gl.constexpr, G: gl.constexpr):
    """The sink joins the denominator; the rows that are there go to out; a sum that overflowed raises the flag."""
    total = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, S_LAYOUT))
    if FROZEN:  # the flag is cleared here before a row may raise it, so that nobody need do so earlier
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        flag = redo + item * NWG + G + row * 0
        gl.store(flag, 0, mask=row == 0)
        gl.thread_barrier()
        gl.store(flag, 1, mask=(G * ROWS + row < n_rows) & (total > OVER))
    inverse = 1.0 / (total + exp2(sink - m))
    o = o * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
    r = G * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    places = out + ((row0 + r).to(gl.int64) * (HQ * D))[:, None] + (head * D + d)[None, :]
    gl.store(places, o.to(gl.bfloat16), mask=(r < n_rows)[:, None] & (d < D)[None, :])


@gluon.jit
def consumer(
    data,
    HQ: gl.constexpr,
    HK: gl.constexpr,
    ST: gl.constexpr,
    WINDOW: gl.constexpr,
    FROZEN: gl.constexpr,
    REDO: gl.constexpr,
    G: gl.constexpr,
):
    """Warpgroup G: rows G * ROWS and up of every item of this CTA."""
    (q_desc, k_desc, v_desc, q_s, q_full, q_empty, ring, tiles, pages, pages_stride, sinks, out, redo, n_items) = data
    k_s, v_s, k_full, v_full, empty = ring
    c = 0  # K pages seen, over all items; V runs one behind
    qc = 0
    for n in range(item_count(n_items)):
        item = item_of(n)
        run = True
        if REDO:
            run = flagged(redo, item)
        if run:
            tile = tiles + (item // HQ) * FIELDS
            head = item % HQ
            row0 = gl.load(tile)
            n_rows = gl.load(tile + 1)
            pos0 = gl.load(tile + 2)
            lo, hi = page_range(pos0, n_rows, WINDOW)
            sink = gl.load(sinks + head).to(gl.float32) * LOG2E
            row_lo = pos0 + G * ROWS
            # pages of this warpgroup, right to left: skip, masked, unmasked, skip
            w_hi = gl.minimum((row_lo + ROWS - 1) // PAGE, hi - 1)
            if WINDOW > 0:
                w_full = gl.maximum(row_lo - WINDOW + 1, 0) // PAGE
                w_lo = w_full
            else:
                w_full = gl.minimum(row_lo // PAGE, w_hi)  # not row_lo + 1: a row meets its own key in a masked page
                w_lo = 0
            if n_rows <= G * ROWS:  # no rows at all: touch one page, store nothing
                w_hi = lo
                w_full = lo
                w_lo = lo
            for _j in range(hi - 1 - w_hi):
                skip_page(k_full, v_full, empty, c, ST)
                c += 1
            qs = qc % 2
            mbarrier.wait(q_full.index(qs), (qc // 2) & 1)
            c, o, m, total = walk(q_s.index(qs * NWG + G), ring, c, row_lo, w_hi, w_full, ST, WINDOW, FROZEN)
            mbarrier.arrive(q_empty.index(qs), count=1)
            for _j in range(w_lo - lo):
                skip_page(k_full, v_full, empty, c, ST)
                c += 1
            qc += 1
            write(out, redo, item, head, row0, n_rows, o, m, total, sink, HQ, FROZEN, G)
