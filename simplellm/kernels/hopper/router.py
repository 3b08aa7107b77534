# mypy: disable-error-code="no-untyped-def, misc, assignment, var-annotated"
"""norm_router: x' = round(x + round(sum of parts)); y = rmsnorm(x'); logits = round(y W^T + b); top 4, softmax; lists.

x, y [T, H] bf16; W [E, H], b [E] bf16; of equal logits the lower index wins. The experts' kernels read the lists of Route.

Up to 256 tokens router_few.py does it. Above, three launches: the norm; logits and each block's counts by expert; the lists.
A token chooses an expert at most once, so a pair's place in its expert's list is the number of earlier tokens that chose it:
counts and prefix sums, no sorting. Moves W once a block, (4 + n) T H elements.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper import router_few
from simplellm.kernels.hopper.launch import launch
from simplellm.kernels.hopper.norm import add_norm
from simplellm.kernels.spans import Spans

CHOICES = tl.constexpr(4)
FEW = 24  # mean rows an expert up to which there are slots; up to 256 tokens always
BLOCK = 64  # tokens of a program


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
    slots: torch.Tensor | None  # int32 [2 n + 4]: n, 0, e_0, p_0, e_1, p_1, .., 0, p_n; None for many
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
def _write_slots(counts, first, slots_ptr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr):
    """Of an expert as many as its pairs need, at most MOST."""
    slots = (counts + WIDTH - 1) // WIDTH
    n = tl.sum(slots, 0)
    j = tl.arange(0, MOST)[None, :]
    entry = slots_ptr + 2 + 2 * ((tl.cumsum(slots, 0) - slots)[:, None] + j)
    tl.store(entry, tl.arange(0, EXPERTS)[:, None] + 0 * j, mask=j < slots[:, None])
    tl.store(entry + 1, first[:, None] + WIDTH * j, mask=j < slots[:, None])
    tl.store(slots_ptr, n)
    tl.store(slots_ptr + 1, 0)
    tl.store(slots_ptr + 2 + 2 * n, 0)
    tl.store(slots_ptr + 3 + 2 * n, tl.sum(counts, 0))


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


@triton.jit(do_not_specialize=["T"], repr=lambda _: "router_logits_many")
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
    first = tl.cumsum(counts, 0) - counts
    tl.store(offsets_ptr + expert, first, mask=expert < E)
    tl.store(offsets_ptr + E, tl.sum(counts, 0))
    if MOST > 0:
        _write_slots(counts, first, slots_ptr, EXPERTS, WIDTH, MOST)
    tokens = me * BLOCK + tl.arange(0, BLOCK)
    choice, weight = _choose(_load_logits(logits_ptr, tokens, tl.load(counts_ptr), E, EXPERTS), EXPERTS)
    _write_pairs(choice, weight, tokens, first + before, token_ptr, pair_ptr, gate_ptr)


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
    with_slots = num_tokens <= max(router_few.MOST_TOKENS, FEW * num_experts // CHOICES.value)
    empty = x.new_empty
    route = Route(
        offsets=empty(num_experts + 1, dtype=torch.int32),
        token=empty(4 * num_tokens, dtype=torch.int32),
        pair=empty(4 * num_tokens, dtype=torch.int32),
        gate=empty(4 * num_tokens, dtype=torch.float32),
        num_tokens=spans.work.counts[:1],
        slots=empty(2 * (num_experts + 4 * num_tokens // width) + 4, dtype=torch.int32) if with_slots else None,
        width=width,
    )
    if num_tokens <= router_few.MOST_TOKENS:
        return *router_few.norm_and_route(x, parts, gain, eps, w, b, spans.work.counts, route), route
    return *_many(x, parts, gain, eps, w, b, spans.work.counts, route), route


def _many(
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
    lists = (route.offsets, route.token, route.pair, route.gate, route.slots)
    most = 0 if route.slots is None else triton.next_power_of_2(triton.cdiv(num_tokens, route.width))
    launch(
        lists_kernel, (blocks,), counts, logits, chosen, *lists, blocks, **shape, WIDTH=route.width, MOST=most, num_warps=8
    )  # fmt: skip
    return new, y
