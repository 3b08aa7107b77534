# mypy: disable-error-code="no-untyped-def, misc, assignment, var-annotated"
"""norm_router (see router.py) for up to 256 tokens: producers make logits, a consumer for each 64 tokens makes the lists.

x' = round(x + round(sum of parts)); y = rmsnorm(x'); logits = round(y W^T + b) of the rounded y, as the twin.

Producers hand a logit over as a word that says all by itself: a key, in order of the logits and of equal ones in falling order
of the experts, and never 0. The consumer, the program of the highest id, reads the words until none is 0 and sets them back to
0. So nobody fences or counts, and a token's best expert is one maximum of integers. Which tokens chose an expert is a mask of
64 bits: a pair's place in its expert's list is a popcount. Consumers of several blocks of tokens tell one another their counts
in the same way; they are the last programs, at most 4 of them, so that all of them run at some time whatever the GPU.

Up to FUSED tokens (FUSED_FEW of few experts) one launch: producer (i, j) adds and norms the tokens of tile i (each j; j = 0
keeps it), and dots them with the experts of slice j on the CUDA cores. Above, add_norm, then producers of TOKENS x 16 logits on
the tensor cores, a part of the sum over k a warp. Either way a producer's weights are on their way before it waits for the
kernel before. Moves W once a tile of tokens, x and parts once a slice (once at all above), 8 E bytes a token of keys.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.launch import launch, num_sms
from simplellm.kernels.hopper.norm import add_norm

if TYPE_CHECKING:
    from simplellm.kernels.hopper.router import Route

FUSED, FUSED_FEW = 16, 64  # tokens; the latter of up to FEW_EXPERTS
FEW_EXPERTS = 32
BLOCK = tl.constexpr(64)  # tokens of a consumer: bits of a mask
BLOCKS = tl.constexpr(4)  # consumers at most
MOST_TOKENS = BLOCK.value * BLOCKS.value
MOST_EXPERTS = 128
ROWS = 16  # experts of a producer of logits_kernel, the M of an MMA


@triton.jit
def _make_keys(logits, expert):
    """logits f32 that are bf16 values, -> int32 1 .. 2^24 - 1: 256 * rank + 255 - expert."""
    bits = (logits.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    bits = tl.where(logits == 0, 0, bits)  # -0 is no less than 0
    rank = tl.where(bits < 0x8000, bits + 0x8000, 0xFFFF - bits)
    return rank * 256 + (255 - expert)


@triton.jit
def _read_logits(keys):
    rank = keys >> 8
    bits = tl.where(rank >= 0x8000, rank - 0x8000, 0xFFFF - rank)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _count_bits(bits):
    """Bits that are 1 in an int64."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _send(at, words, here):
    """Words that are not 0, to one program that waits for them; where they go 0 lies."""
    tl.atomic_xchg(at, words, mask=here, sem="relaxed", scope="gpu")


@triton.jit
def _receive(at, here):
    """The words sent, once all are there, 0 where nobody sends any; what is read is 0 again."""
    words = tl.load(at, mask=here, other=1, volatile=True)
    while tl.min(words) == 0:
        words = tl.load(at, mask=here, other=1, volatile=True)
    tl.store(at, tl.zeros_like(words), mask=here)
    return tl.where(here, words, 0)


@triton.jit
def _flatten(values):
    """Four of [B] -> [4 B], a token's one after another."""
    return tl.reshape(tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3])), [4 * values[0].shape[0]])


@triton.jit
def _exchange(counts, boxes_ptr, me, consumers, EXPERTS: tl.constexpr):
    """Counts [EXPERTS] of each consumer's tokens -> those of all tokens, and of the tokens before its own."""
    other = tl.arange(0, BLOCKS)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    here = (other < consumers) & (expert < EXPERTS)
    words = counts[None, :] + 1 + tl.zeros([BLOCKS, EXPERTS], tl.int32)
    _send(boxes_ptr + (other * BLOCKS + me) * EXPERTS + expert, words, here)  # to each its own copy
    found = _receive(boxes_ptr + (me * BLOCKS + other) * EXPERTS + expert, here)
    found = tl.where(here, found - 1, 0)
    return tl.sum(found, 0), tl.sum(tl.where(other < me, found, 0), 0)


@triton.jit
def _make_lists(
    me,
    consumers,
    num_tokens,
    keys_ptr,
    boxes_ptr,
    offsets_ptr,
    token_ptr,
    pair_ptr,
    gate_ptr,
    slots_ptr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
):
    """Consumer `me`: the choices of TOKENS tokens and where they go; the first one writes offsets and slots too."""
    i = tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    here = (me * TOKENS + i < num_tokens)[:, None] & (expert < E)[None, :]
    keys = _receive(keys_ptr + (me * TOKENS + i)[:, None] * EXPERTS + expert[None, :], here)
    left = keys
    best = ()
    for _ in tl.static_range(4):
        top = tl.max(left, 1)
        left = tl.where(left == top[:, None], 0, left)  # no two keys of a token are equal
        best = best + (top,)
    bit = tl.full([TOKENS], 1, tl.int64) << i
    masks = tl.sum(tl.where(left != keys, bit[:, None], 0), 0)
    masks = tl.gather(
        masks, expert, 0
    )  # spread over the threads, as is `chosen`: what reductions leave is known to whole warps
    counts = _count_bits(masks)
    before = tl.zeros_like(counts)
    if consumers > 1:
        counts, before = _exchange(counts, boxes_ptr, me, consumers, EXPERTS)
    slots = (counts + WIDTH - 1) // WIDTH
    both = slots * 65536 + counts  # one scan for two sums: there are at most 1024 of either
    starts = tl.cumsum(both, 0) - both
    first = starts & 0xFFFF
    if me == 0:
        total = tl.sum(both, 0)
        n = total >> 16
        tl.store(offsets_ptr + expert, first, mask=expert < E)
        tl.store(offsets_ptr + E, total & 0xFFFF)
        j = tl.arange(0, MOST)[None, :]
        entry = slots_ptr + 2 + 2 * ((starts >> 16)[:, None] + j)
        tl.store(entry, expert[:, None] + 0 * j, mask=j < slots[:, None])
        tl.store(entry + 1, first[:, None] + WIDTH * j, mask=j < slots[:, None])
        tl.store(slots_ptr, n)
        tl.store(slots_ptr + 1, 0)
        tl.store(slots_ptr + 2 + 2 * n, 0)
        tl.store(slots_ptr + 3 + 2 * n, total & 0xFFFF)
    p = tl.arange(0, 4 * TOKENS)
    chosen = tl.gather(_flatten(best), p, 0)  # so spread over the threads: maxima are known to all lanes of a warp
    of = tl.where(chosen > 0, 255 - (chosen & 255), 0)
    earlier = (tl.full([4 * TOKENS], 1, tl.int64) << (p // 4)) - 1
    place = tl.gather(first + before, of, 0) + _count_bits(tl.gather(masks, of, 0) & earlier)
    logits = tl.reshape(_read_logits(chosen), [TOKENS, 4])
    powers = tl.exp(logits - tl.max(logits, 1)[:, None])
    weights = tl.reshape((powers / tl.sum(powers, 1)[:, None]).to(tl.bfloat16).to(tl.float32), [4 * TOKENS])
    pair = me * (4 * TOKENS) + p
    tl.store(token_ptr + place, pair // 4, mask=chosen > 0)
    tl.store(pair_ptr + place, pair, mask=chosen > 0)
    tl.store(gate_ptr + place, weights, mask=chosen > 0)


@triton.jit(do_not_specialize=["T"], repr=lambda _: "router")
def fused_kernel(
    x_ptr,
    parts_ptr,
    gain_ptr,
    w_ptr,
    b_ptr,
    counts_ptr,
    new_ptr,
    y_ptr,
    keys_ptr,
    boxes_ptr,
    offsets_ptr,
    token_ptr,
    pair_ptr,
    gate_ptr,
    slots_ptr,
    eps,
    T,
    H: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
):
    """T <= TOKENS. Program i S + j, S slices: tile i, slice j; the last one the lists. COLUMNS, EXPERTS: powers of two."""
    SLICES: tl.constexpr = (E + SLICE - 1) // SLICE
    me = tl.program_id(0)
    if me < tl.num_programs(0) - 1:
        column = tl.arange(0, COLUMNS)
        inside = column < H
        expert = me % SLICES * SLICE + tl.arange(0, SLICE)
        w = tl.load(w_ptr + expert[:, None] * H + column[None, :], mask=(expert < E)[:, None] & inside[None, :], other=0.0)
        bias = tl.load(b_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)
        gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
        gdc_wait()
        gdc_launch_dependents()
        num_tokens = tl.load(counts_ptr, volatile=True)
        xs = ()
        added = ()
        for i in tl.static_range(TILE):  # all loads in flight: volatile, or ptxas would put some off to save registers
            token = me // SLICES * TILE + i
            here = inside & (token < T)
            xs = xs + (tl.load(x_ptr + token * H + column, mask=here, other=0.0, volatile=True),)
            for part in tl.static_range(PARTS):
                at = parts_ptr + (token * PARTS + part) * H + column
                added = added + (tl.load(at, mask=here, other=0.0, volatile=True),)
        ys = ()
        for i in tl.static_range(TILE):
            if PARTS > 0:
                total = tl.zeros([COLUMNS], tl.float32)
                for part in tl.static_range(PARTS):
                    total += added[i * PARTS + part].to(tl.float32)
                ys = ys + ((xs[i].to(tl.float32) + total.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16),)
        if PARTS > 0:
            xs = ys
        ys = ()
        for i in tl.static_range(TILE):
            wide = xs[i].to(tl.float32)
            ys = ys + ((wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps) * gain).to(tl.bfloat16),)
        for i in tl.static_range(TILE):
            token = me // SLICES * TILE + i
            logits = (tl.sum(w.to(tl.float32) * ys[i].to(tl.float32)[None, :], 1) + bias).to(tl.bfloat16).to(tl.float32)
            _send(keys_ptr + token * EXPERTS + expert, _make_keys(logits, expert), (expert < E) & (token < num_tokens))
        if me % SLICES == 0:  # behind what the consumer waits for
            for i in tl.static_range(TILE):
                token = me // SLICES * TILE + i
                here = inside & (token < T)
                if PARTS > 0:
                    tl.store(new_ptr + token * H + column, xs[i], mask=here)
                tl.store(y_ptr + token * H + column, ys[i], mask=here)
    else:
        gdc_wait()
        gdc_launch_dependents()
        _make_lists(0, 1, tl.load(counts_ptr), keys_ptr, boxes_ptr, offsets_ptr, token_ptr, pair_ptr, gate_ptr, slots_ptr,
                    E, EXPERTS, TOKENS, WIDTH, MOST)  # fmt: skip


@triton.jit(do_not_specialize=["T", "consumers"], repr=lambda _: "router_logits")
def logits_kernel(
    y_ptr,
    w_ptr,
    b_ptr,
    counts_ptr,
    keys_ptr,
    boxes_ptr,
    offsets_ptr,
    token_ptr,
    pair_ptr,
    gate_ptr,
    slots_ptr,
    T,
    consumers,
    H: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
):
    """Program i S + j, S slices: ROWS logits of the TILE tokens of tile i; the last ones the lists, of TOKENS tokens each."""
    SLICES: tl.constexpr = (E + ROWS - 1) // ROWS
    me = tl.program_id(0)
    producers = tl.num_programs(0) - consumers
    if me < producers:
        PARTS: tl.constexpr = 16  # of k: a warp each
        K: tl.constexpr = 64  # of k that a warp does at a time
        STEPS: tl.constexpr = (H + PARTS * K - 1) // (PARTS * K)
        part = tl.arange(0, PARTS)[:, None, None]
        expert = me % SLICES * ROWS + tl.arange(0, ROWS)
        token = me // SLICES * TILE + tl.arange(0, TILE)
        ws = ()
        for step in tl.static_range(STEPS):
            k = (step * PARTS + part) * K + tl.arange(0, K)[None, None, :]
            inside = (expert < E)[None, :, None] & (k < H)
            ws = ws + (tl.load(w_ptr + expert[None, :, None] * H + k, mask=inside, other=0.0),)
        bias = tl.load(b_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)
        gdc_wait()
        gdc_launch_dependents()
        num_tokens = tl.load(counts_ptr)
        ys = ()
        for step in tl.static_range(STEPS):
            k = (step * PARTS + part) * K + tl.arange(0, K)[None, :, None]
            inside = (token < T)[None, None, :] & (k < H)
            ys = ys + (tl.load(y_ptr + token[None, None, :] * H + k, mask=inside, other=0.0),)
        acc = tl.zeros([PARTS, ROWS, TILE], tl.float32)
        for step in tl.static_range(STEPS):
            acc = tl.dot(ws[step], ys[step], acc)
        logits = (tl.sum(acc, 0) + bias[:, None]).to(tl.bfloat16).to(tl.float32)
        here = (expert < E)[:, None] & (token < num_tokens)[None, :]
        keys = _make_keys(logits, expert[:, None])
        _send(keys_ptr + token[None, :] * EXPERTS + expert[:, None], keys, here)
    else:
        gdc_wait()
        gdc_launch_dependents()
        _make_lists(me - producers, consumers, tl.load(counts_ptr), keys_ptr, boxes_ptr, offsets_ptr, token_ptr, pair_ptr,
                    gate_ptr, slots_ptr, E, EXPERTS, TOKENS, WIDTH, MOST)  # fmt: skip


@cache
def mail(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Words for keys and for counts, int32, all 0 between launches."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capturing"
    keys = torch.zeros(MOST_TOKENS * MOST_EXPERTS, dtype=torch.int32, device=device)
    return keys, torch.zeros(BLOCKS.value * BLOCKS.value * MOST_EXPERTS, dtype=torch.int32, device=device)


def norm_and_route(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    w: torch.Tensor,
    b: torch.Tensor,
    counts: torch.Tensor,
    route: Route,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As norm_router, for T <= MOST_TOKENS, into the empty lists of `route`; -> (x plus the parts, its norm), both [T, H]."""
    (num_tokens, hidden), num_experts = x.shape, len(w)
    assert num_tokens <= MOST_TOKENS and num_experts <= MOST_EXPERTS and route.slots is not None
    lists = (*mail(x.device), route.offsets, route.token, route.pair, route.gate, route.slots)
    constants: dict[str, Any] = {
        "H": hidden,
        "E": num_experts,
        "EXPERTS": max(16, triton.next_power_of_2(num_experts)),
        "WIDTH": route.width,
        "MOST": triton.next_power_of_2(triton.cdiv(num_tokens, route.width)),
    }
    most = FUSED_FEW if num_experts <= FEW_EXPERTS else FUSED
    if num_tokens > most:
        new, y = add_norm(x, parts, gain, eps)
        slices, consumers = triton.cdiv(num_experts, ROWS), triton.cdiv(num_tokens, BLOCK.value)
        tile = 8 if triton.cdiv(num_tokens, 8) * slices + consumers <= num_sms() else 16
        grid = (triton.cdiv(num_tokens, tile) * slices + consumers,)
        launch(
            logits_kernel, grid, y, w, b, counts, *lists, num_tokens, consumers,
            TOKENS=BLOCK.value, TILE=tile, ROWS=ROWS, num_warps=16, **constants,
        )  # fmt: skip
        return new, y
    new, y = x if parts is None else torch.empty_like(x), torch.empty_like(x)
    tile, slice_ = 1, 2
    while slice_ < 8 and num_tokens * triton.cdiv(num_experts, slice_) >= num_sms():  # a program an SM, the consumer's too
        slice_ *= 2
    while triton.cdiv(num_tokens, tile) * triton.cdiv(num_experts, slice_) >= num_sms():
        tile *= 2
    launch(
        fused_kernel,
        (triton.cdiv(num_tokens, tile) * triton.cdiv(num_experts, slice_) + 1,),
        *(x, x if parts is None else parts, gain, w, b, counts, new, y, *lists, eps, num_tokens),
        PARTS=0 if parts is None else parts.shape[1],
        COLUMNS=triton.next_power_of_2(hidden),
        TOKENS=FUSED if num_tokens <= FUSED else most,
        TILE=tile,
        SLICE=slice_,
        num_warps=4 if tile * slice_ <= 4 else 8,
        **constants,
    )
    return new, y
