# mypy: disable-error-code="no-untyped-def, misc, assignment"
"""Device functions on pack.py's stream: addresses of a thread's words, codes to bf16 MMA fragments, swiglu of a tile.

A rotation and a mask turn four of a word's half into bf16 patterns of value code * 2^-126 (sign at bit 15, the other bits at
8..6), the last from two pieces. One packed multiply by a stored scale byte (file's + 126), as a bf16 exponent, gives the
weight, exactly. Streams with larger scales (BIG) multiply by 2^126 first; then byte 0, 2^-127, is bf16's subnormal 0x40.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from simplellm.config import ALPHA
from simplellm.kernels.hopper.pack import BLOCK_WORDS, CODE_WORDS

SLOPE = gl.constexpr(ALPHA)
WORDS = gl.constexpr(BLOCK_WORDS)
CODES = gl.constexpr(CODE_WORDS)

_HEAD = """{ .reg .b32 a, b, c, d, e;
 and.b32 a, $4, 0x81C081C0;
 shf.r.wrap.b32 b, $4, $4, 4; and.b32 b, b, 0x81C081C0;
 shl.b32 c, $4, 6; and.b32 c, c, 0x81C081C0;
 shf.r.wrap.b32 d, $4, $4, 6; and.b32 d, d, 0x81808180;
 shl.b32 e, $4, 2; lop3.b32 d, e, 0x00400040, d, 0xEA;"""  # d | e & 0x00400040
_RAISE = "mov.b32 e, 0x7E807E80;" + "".join(f" mul.bf16x2 {x}, {x}, e;" for x in "abcd")
_TAIL = " mul.bf16x2 $0, a, $5; mul.bf16x2 $1, b, $6; mul.bf16x2 $2, c, $5; mul.bf16x2 $3, d, $6; }"
UNPACK = gl.constexpr(_HEAD + _TAIL)
UNPACK_BIG = gl.constexpr(_HEAD + _RAISE + _TAIL)

_BYTES = "".join(f" prmt.b32 ${i}, $4, 0, 0x4{i}4{i}; shl.b32 ${i}, ${i}, 7;" for i in range(4))
SCALES = gl.constexpr("{" + _BYTES + " }")
_RAISE_ZERO = "".join(f" max.u16x2 ${i}, ${i}, m;" for i in range(4))
SCALES_BIG = gl.constexpr("{ .reg .b32 m; mov.b32 m, 0x00400040;" + _BYTES + _RAISE_ZERO + " }")


@gluon.jit
def halves(r):
    """int32 that holds a bf16 pair -> [..., 2] bf16."""
    lo = r.to(gl.int16).to(gl.bfloat16, bitcast=True)
    hi = (r >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(lo, hi)


@gluon.jit
def fragment(w, s, R: gl.constexpr, LA: gl.constexpr, BIG: gl.constexpr):
    """Words [R, 8, 4, 4] and scale words [R, 8] -> bf16 [16 R, 64] in the registers of the MMA's A operand."""
    return gl.convert_layout(unpack_rows(w, s, R, BIG).reshape([16 * R, 64]), LA, assert_trivial=True)


@gluon.jit
def unpack_rows(w, s, R: gl.constexpr, BIG: gl.constexpr):
    """Words [R, 8, 4, 4] and scale words [R, 8] -> bf16 [R, 16, 64]."""
    d00, d01, d10, d11 = gl.inline_asm_elementwise(
        SCALES_BIG if BIG else SCALES,
        "=&r,=&r,=&r,=&r,r",
        [s],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    w = w.reshape([R, 8, 4, 2, 2])
    s0 = gl.convert_layout(gl.join(d00, d01).reshape([R, 8, 1, 2, 1]), w.type.layout, assert_trivial=True)
    s1 = gl.convert_layout(gl.join(d10, d11).reshape([R, 8, 1, 2, 1]), w.type.layout, assert_trivial=True)
    s0, _ = gl.broadcast(s0, w)
    s1, _ = gl.broadcast(s1, w)
    r0, r1, r2, r3 = gl.inline_asm_elementwise(
        UNPACK_BIG if BIG else UNPACK,
        "=&r,=&r,=&r,=&r,r,r,r",
        [w, s0, s1],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    a = gl.join(gl.join(halves(r0), halves(r2)), gl.join(halves(r1), halves(r3)))  # r g q j1 j0 p c h
    return a.permute([0, 7, 1, 3, 4, 6, 2, 5]).reshape([R, 16, 64])


@gluon.jit
def offsets(R: gl.constexpr, STRIPE: gl.constexpr):
    """Word offsets in a row tile of codes [R, 8, 4, 4] and scales [R, 8], and the row group (16 rows) each belongs to."""
    LW: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [gl.num_warps(), 1, 1, 1], [3, 2, 1, 0])
    r = gl.arange(0, R, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LW))))
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LW))))
    q = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LW))))
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LW))))
    rows = (r // 4) * STRIPE + (r % 4) * 128
    woff = rows[:, None, None, None] + (g * 16)[None, :, None, None] + (q * 4)[None, None, :, None] + j[None, None, None, :]
    wrow = r[:, None, None, None] + gl.zeros_like(woff)
    soff = gl.expand_dims((r // 4) * STRIPE + CODES + (r % 4) * 8, 1) + gl.expand_dims(g, 0)
    srow = gl.expand_dims(r, 1) + gl.zeros_like(soff)
    # as a linear layout: from a slice, `join` would first try the parent, and print an error when that does not do
    LS: gl.constexpr = gl.to_linear_layout(soff.type.layout, [R, 8])
    soff = gl.convert_layout(soff, LS, assert_trivial=True)
    return woff, soff, wrow, gl.convert_layout(srow, LS, assert_trivial=True)


@gluon.jit
def clip(offset, row, left, R: gl.constexpr, NS: gl.constexpr, STRIPE: gl.constexpr):
    """In a ragged last tile of `left` stripes the row groups past the matrix read its last stripe again (never stored)."""
    if NS % (R // 4):
        offset -= gl.maximum(row // 4 - (left - 1), 0) * STRIPE
    return offset


@gluon.jit
def load_unit(wp, sp, left, U: gl.constexpr, KB: gl.constexpr):
    """U blocks; in a ragged last unit of `left` blocks the last of them again (tokens are zero there)."""
    w = ()
    s = ()
    for j in gl.static_range(U):
        block = j * WORDS
        if KB % U:
            block = gl.minimum(j, left - 1) * WORDS
        w = w + (gl.load(wp + block, eviction_policy="evict_first"),)
        s = s + (gl.load(sp + block, eviction_policy="evict_first"),)
    return w, s


@gluon.jit
def swiglu(y, LIMIT: gl.constexpr, R: gl.constexpr, N: gl.constexpr):
    """[16 R, N] -> [8 R, N]: row 16 r + g is a gate, row 16 r + 8 + g its up."""
    g, u = y.reshape([R, 2, 8, N]).permute([0, 2, 3, 1]).split()
    return activate(g.reshape([8 * R, N]), u.reshape([8 * R, N]), LIMIT)


@gluon.jit
def activate(g, u, LIMIT: gl.constexpr):
    """Gates and ups of any shape -> activations."""
    g = gl.minimum(g, LIMIT)
    u = gl.minimum(gl.maximum(u, -LIMIT), LIMIT)
    return g / (1.0 + gl.exp(-SLOPE * g)) * (u + 1.0)
