# mypy: disable-error-code="no-untyped-def, misc, assignment, var-annotated"
"""norm_router: x' = round(x + round(sum of parts)); y = rmsnorm(x'); logits = round(y W^T + b); top 4, softmax; lists.

x, y [T, H] bf16; W [E, H], b [E] bf16; of equal logits the lower index wins. The experts' kernels read the lists of Route.

Up to ONE_LAUNCH tokens one launch does it all: program (i, j) adds and norms the tokens of tile i (each j redoes this; j = 0
keeps it) and makes their logits for the experts of slice j; the last program to end chooses and writes the lists. Above that
three: the norm; logits and each block's counts by expert; the lists. A token chooses an expert at most once, so a pair's place
in its expert's list is the number of earlier tokens that chose it: counts and prefix sums, no sorting.
Moves W once a tile, (1 + n) T H elements a slice.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper import router_few
from simplellm.kernels.hopper.launch import launch, num_sms
from simplellm.kernels.hopper.norm import add_norm
from simplellm.kernels.spans import Spans

CHOICES = tl.constexpr(4)
FEW = 0  # tokens up to which router_few.py does it
ONE_LAUNCH = 64  # tokens
SMALL = 256  # tokens up to which there are slots
SLICE = 8  # experts of a program
BLOCK = 64  # tokens of a program above ONE_LAUNCH


@dataclass(frozen=True, slots=True)
class Route:
    """T tokens' choices sorted by expert, then by pair 4 t + c (c: the choice, best first). Device tensors.

    Only the first 4 num_tokens sorted pairs exist; what lies beyond them is left over. Padded tokens are in none.
    """

    offsets: torch.Tensor  # int32 [E + 1]: first sorted pair of each expert; offsets[E] = 4 num_tokens
    token: torch.Tensor  # int32 [4 T]: token of a sorted pair
    pair: torch.Tensor  # int32 [4 T]: 4 * token + choice of a sorted pair
    gate: torch.Tensor  # float32 [4 T]: routing weight of a sorted pair, a bfloat16 value
    num_tokens: torch.Tensor  # int32 [1]
    slots: torch.Tensor | None  # int32 [2 n + 4]: n, 0, e_0, p_0, e_1, p_1, .., 0, p_n; None for T above SMALL
    width: int  # a slot has at most so many sorted pairs, all of one expert


def pick_width(num_tokens: int, num_experts: int) -> int:
    """Pairs of a slot: 8, unless the mean expert would then often need two. An expert read twice comes from the L2."""
    return 8 if num_tokens <= num_experts else 16 if num_tokens <= 2 * num_experts else 32


@triton.jit
def _choose(logits, EXPERTS: tl.constexpr):
    """logits [B, EXPERTS] f32, -inf for what cannot be chosen -> which choice of its token each is or -1, and its weight."""
    column = tl.arange(0, EXPERTS)[None, :]
    best = tl.max(logits, 1)
    total = tl.zeros_like(best)
    choice = tl.full(logits.shape, -1, tl.int32)
    left = logits
    for c in tl.static_range(CHOICES):
        top, index = tl.max(left, 1, return_indices=True)  # the lower index of equals
        mine = (column == index[:, None]) & (top > float("-inf"))[:, None]
        total += tl.exp(top - best)
        choice = tl.where(mine, c, choice)
        left = tl.where(mine, float("-inf"), left)
    weight = tl.exp(logits - best[:, None]) / total[:, None]
    return choice, weight.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _write_offsets(
    counts, offsets_ptr, slots_ptr, E: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr
):
    """From counts [EXPERTS]: offsets, and the slots if an expert may have any (MOST); -> first pair of each expert."""
    expert = tl.arange(0, EXPERTS)
    total = tl.sum(counts, 0)
    first = tl.cumsum(counts, 0) - counts
    tl.store(offsets_ptr + expert, first, mask=expert < E)
    tl.store(offsets_ptr + E, total)
    if MOST > 0:
        slots = (counts + WIDTH - 1) // WIDTH
        n = tl.sum(slots, 0)
        j = tl.arange(0, MOST)[None, :]
        entry = slots_ptr + 2 + 2 * ((tl.cumsum(slots, 0) - slots)[:, None] + j)
        tl.store(entry, expert[:, None] + 0 * j, mask=j < slots[:, None])
        tl.store(entry + 1, first[:, None] + WIDTH * j, mask=j < slots[:, None])
        tl.store(slots_ptr, n)
        tl.store(slots_ptr + 1, 0)
        tl.store(slots_ptr + 2 + 2 * n, 0)
        tl.store(slots_ptr + 3 + 2 * n, total)
    return first


@triton.jit
def _write_pairs(choice, weight, tokens, first, token_ptr, pair_ptr, gate_ptr):
    """Pairs of tokens [B]: first [EXPERTS] is where the first of these that chose an expert goes."""
    mine = choice >= 0
    place = first[None, :] + tl.cumsum(mine.to(tl.int32), 0) - 1
    token = tokens[:, None] + tl.zeros_like(choice)
    tl.store(token_ptr + place, token, mask=mine)
    tl.store(pair_ptr + place, CHOICES * token + choice, mask=mine)
    tl.store(gate_ptr + place, weight, mask=mine)


@triton.jit
def _load_logits(logits_ptr, tokens, num_tokens, E: tl.constexpr, EXPERTS: tl.constexpr):
    column = tl.arange(0, EXPERTS)
    inside = (tokens < num_tokens)[:, None] & (column < E)[None, :]
    at = logits_ptr + tokens[:, None] * E + column[None, :]
    return tl.load(at, mask=inside, other=float("-inf"), cache_modifier=".cg").to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def router_kernel(
    x_ptr,
    parts_ptr,
    gain_ptr,
    w_ptr,
    b_ptr,
    counts_ptr,
    new_ptr,
    y_ptr,
    logits_ptr,
    arrived_ptr,
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
    """T <= TOKENS: norm, logits, and in the last program the lists. COLUMNS, EXPERTS: powers of two from H, E."""
    column = tl.arange(0, COLUMNS)
    inside = column < H
    expert = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    w = tl.load(w_ptr + expert[:, None] * H + column[None, :], mask=(expert < E)[:, None] & inside[None, :], other=0.0)
    bias = tl.load(b_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    gdc_wait()
    gdc_launch_dependents()
    xs = ()
    for i in tl.static_range(TILE):  # all tokens' loads in flight before the first sum
        token = tl.program_id(0) * TILE + i
        here = inside & (token < T)
        x = tl.load(x_ptr + token * H + column, mask=here, other=0.0)
        if PARTS > 0:
            added = tl.zeros([COLUMNS], tl.float32)
            for part in tl.static_range(PARTS):
                added += tl.load(parts_ptr + (token * PARTS + part) * H + column, mask=here, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) + added.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
        xs = xs + (x,)
    for i in tl.static_range(TILE):
        token = tl.program_id(0) * TILE + i
        here = inside & (token < T)
        x = xs[i]
        wide = x.to(tl.float32)
        y = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps) * gain).to(tl.bfloat16)
        if tl.program_id(1) == 0:
            if PARTS > 0:
                tl.store(new_ptr + token * H + column, x, mask=here)
            tl.store(y_ptr + token * H + column, y, mask=here)
        logits = (tl.sum(w.to(tl.float32) * y.to(tl.float32)[None, :], 1) + bias).to(tl.bfloat16)
        tl.store(logits_ptr + token * E + expert, logits, mask=(expert < E) & (token < T))
    tl.debug_barrier()  # all of the program's logits are on their way before it counts as arrived
    programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(arrived_ptr, 0)
        tokens = tl.arange(0, TOKENS)
        choice, weight = _choose(_load_logits(logits_ptr, tokens, tl.load(counts_ptr), E, EXPERTS), EXPERTS)
        counts = tl.sum((choice >= 0).to(tl.int32), 0)
        first = _write_offsets(counts, offsets_ptr, slots_ptr, E, EXPERTS, WIDTH, MOST)
        _write_pairs(choice, weight, tokens, first, token_ptr, pair_ptr, gate_ptr)


@triton.jit(do_not_specialize=["T"])
def logits_kernel(
    y_ptr,
    w_ptr,
    b_ptr,
    counts_ptr,
    logits_ptr,
    chosen_ptr,
    T,
    H: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits of BLOCK tokens, and how many of them chose each expert: chosen [blocks, EXPERTS]."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    k = tl.arange(0, 64)
    gdc_wait()
    gdc_launch_dependents()
    acc = tl.zeros([BLOCK, EXPERTS], tl.float32)
    for start in tl.range(0, H, 64, num_stages=4):
        y = tl.load(y_ptr + tokens[:, None] * H + start + k[None, :], mask=(tokens < T)[:, None], other=0.0)
        w = tl.load(w_ptr + expert[None, :] * H + start + k[:, None], mask=(expert < E)[None, :], other=0.0)
        acc = tl.dot(y, w, acc)
    bias = tl.load(b_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)
    logits = (acc + bias[None, :]).to(tl.bfloat16)
    inside = (tokens < tl.load(counts_ptr))[:, None] & (expert < E)[None, :]
    tl.store(logits_ptr + tokens[:, None] * E + expert[None, :], logits, mask=inside)
    choice, _ = _choose(tl.where(inside, logits.to(tl.float32), float("-inf")), EXPERTS)
    tl.store(chosen_ptr + tl.program_id(0) * EXPERTS + expert, tl.sum((choice >= 0).to(tl.int32), 0))


@triton.jit(do_not_specialize=["blocks"])
def lists_kernel(
    counts_ptr,
    logits_ptr,
    chosen_ptr,
    offsets_ptr,
    token_ptr,
    pair_ptr,
    gate_ptr,
    slots_ptr,
    blocks,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
):
    """Each program adds up all blocks' counts, and writes the pairs of its block; all write the same offsets and slots."""
    me = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    gdc_wait()
    gdc_launch_dependents()
    counts = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, blocks, 32):
        block = start + tl.arange(0, 32)
        chosen = tl.load(chosen_ptr + block[:, None] * EXPERTS + expert[None, :], mask=(block < blocks)[:, None], other=0)
        counts += tl.sum(chosen, 0)
        before += tl.sum(tl.where((block < me)[:, None], chosen, 0), 0)
    first = _write_offsets(counts, offsets_ptr, slots_ptr, E, EXPERTS, WIDTH, MOST)
    tokens = me * BLOCK + tl.arange(0, BLOCK)
    choice, weight = _choose(_load_logits(logits_ptr, tokens, tl.load(counts_ptr), E, EXPERTS), EXPERTS)
    _write_pairs(choice, weight, tokens, first + before, token_ptr, pair_ptr, gate_ptr)


@cache
def _arrived(device: torch.device) -> torch.Tensor:
    """The counter of router_kernel's programs; it is zero between launches."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capturing"
    return torch.zeros(1, dtype=torch.int32, device=device)


def norm_router(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    w: torch.Tensor,
    b: torch.Tensor,
    k: int,
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor, Route]:
    """x [T, H], parts [T, n, H] or None, gain [H], w [E, H], b [E], all bf16 -> (x plus the parts, its norm [T, H], Route)."""
    assert k == CHOICES.value and x.shape[1] % 64 == 0 and spans.work is not None
    assert x.is_contiguous() and w.is_contiguous() and (parts is None or parts.is_contiguous())
    num_tokens, num_experts = len(x), len(w)
    width = pick_width(num_tokens, num_experts)
    empty = x.new_empty
    route = Route(
        offsets=empty(num_experts + 1, dtype=torch.int32),
        token=empty(4 * num_tokens, dtype=torch.int32),
        pair=empty(4 * num_tokens, dtype=torch.int32),
        gate=empty(4 * num_tokens, dtype=torch.float32),
        num_tokens=spans.work.counts[:1],
        slots=empty(2 * (num_experts + 4 * num_tokens // width) + 4, dtype=torch.int32) if num_tokens <= SMALL else None,
        width=width,
    )
    if num_tokens <= FEW:
        return *router_few.norm_and_route(x, parts, gain, eps, w, b, spans.work.counts, route), route
    do = _one_launch if num_tokens <= ONE_LAUNCH else _many_launches
    return *do(x, parts, gain, eps, w, b, spans.work.counts, route), route


def _lists(route: Route, num_tokens: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """The lists a kernel writes, and its constants about them."""
    slots = route.offsets if route.slots is None else route.slots  # of no slots nothing is written
    most = 0 if route.slots is None else triton.next_power_of_2(triton.cdiv(num_tokens, route.width))
    return (route.offsets, route.token, route.pair, route.gate, slots), {"WIDTH": route.width, "MOST": most}


def _one_launch(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    w: torch.Tensor,
    b: torch.Tensor,
    counts: torch.Tensor,
    route: Route,
) -> tuple[torch.Tensor, torch.Tensor]:
    (num_tokens, hidden), num_experts = x.shape, len(w)
    new, y = x if parts is None else torch.empty_like(x), torch.empty_like(x)
    lists, constants = _lists(route, num_tokens)
    slices = triton.cdiv(num_experts, SLICE)
    tile = 1
    while tile < 4 and triton.cdiv(num_tokens, tile) * slices > num_sms():  # a program fills an SM
        tile *= 2
    launch(
        router_kernel,
        (triton.cdiv(num_tokens, tile), slices),
        *(x, x if parts is None else parts, gain, w, b, counts, new, y, x.new_empty(num_tokens, num_experts)),
        *(_arrived(x.device), *lists, eps, num_tokens),
        H=hidden,
        E=num_experts,
        PARTS=0 if parts is None else parts.shape[1],
        COLUMNS=triton.next_power_of_2(hidden),
        EXPERTS=max(16, triton.next_power_of_2(num_experts)),  # never as few as TOKENS: a pass of Triton 3.6 fails on that
        TOKENS=8 if num_tokens <= 8 else ONE_LAUNCH,
        TILE=tile,
        SLICE=SLICE,
        num_warps=8,
        **constants,
    )
    return new, y


def _many_launches(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    w: torch.Tensor,
    b: torch.Tensor,
    counts: torch.Tensor,
    route: Route,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = len(x), len(w)
    new, y = add_norm(x, parts, gain, eps)
    blocks, experts = triton.cdiv(num_tokens, BLOCK), max(16, triton.next_power_of_2(num_experts))
    logits, chosen = x.new_empty(num_tokens, num_experts), x.new_empty(blocks, experts, dtype=torch.int32)
    shape: dict[str, Any] = {"E": num_experts, "EXPERTS": experts, "BLOCK": BLOCK}
    launch(
        logits_kernel, (blocks,), y, w, b, counts, logits, chosen, num_tokens, H=x.shape[1], **shape, num_warps=8, num_stages=4
    )
    lists, constants = _lists(route, num_tokens)
    launch(lists_kernel, (blocks,), counts, logits, chosen, *lists, blocks, **shape, **constants, num_warps=8)
    return new, y
