"""The draw: token = argmax over v of z_v / T + g_v, g_v standard Gumbel noise; greedy rows: argmax of z_v, the lowest id.

g_v = -log(-log(1 - w)), w = (word + 1/2) / 2^32, word = word v % 4 of Philox 4x32-10 at counter (v // 4, position, 0, 0), key
the seed. So a token's score is a function of its logit, the row's settings and the position alone, and the largest score,
of equal ones the lowest id, does not depend on how the row was cut. Scores are float32: off by about 3e-6 for the noise and
by 1e-7 of z / T. The row's `floor` (sampling_filter) leaves out all tokens whose logit is not above it.

`race` reads the logits once (4 n V bytes) and leaves one candidate a chunk; `finish` picks among at most 99 of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from simplellm.kernels.hopper.launch import launch
from simplellm.kernels.hopper.sampling_common import (
    FILTERED,
    INVERSE_TEMPERATURE,
    SEED_HIGH,
    SEED_LOW,
    TILE,
    begin,
    num_tiles,
    quads,
    real_setting,
    setting,
)
from simplellm.kernels.hopper.sampling_filter import PASSES, Cut, state_before
from simplellm.kernels.hopper.sampling_tables import Tables

LN2 = tl.constexpr(0.6931471805599453)


def race(logits: torch.Tensor, draws: torch.Tensor, tables: Tables, cut: Cut | None) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V] -> each chunk's best score [n, chunks] float32 and its token [n, chunks] int32."""
    num_rows, vocab_size = logits.shape
    tiles = num_tiles(num_rows)
    chunks = triton.cdiv(vocab_size, TILE * tiles)
    scores = torch.empty(num_rows, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, chunks, dtype=torch.int32, device=logits.device)
    filtered = (None, None, None, 0) if cut is None else (cut.extremes, cut.sums, cut.states, cut.sums.shape[2])
    launch(
        _race,
        (chunks, num_rows),
        logits,
        logits.stride(0),
        draws,
        tables.settings,
        *filtered,
        scores,
        ids,
        vocab_size,
        FULL=cut is not None,
        TILES=tiles,
        TILE=TILE,
    )
    return scores, ids


def finish(scores: torch.Tensor, ids: torch.Tensor, draws: torch.Tensor, tokens: torch.Tensor, newest: torch.Tensor) -> None:
    """tokens [n] and, for rows that draw, newest[row]: the best candidate's token; 0 in `tokens` for the others.

    A row in which no logit is above -inf (NaN is not) has no candidate: -1, and newest 0.
    """
    num_rows, chunks = scores.shape
    block = triton.next_power_of_2(chunks)
    launch(_finish, (num_rows,), scores, ids, chunks, draws, tokens, newest, BLOCK=block, num_warps=1)


@triton.jit
def _race(
    logits,
    stride,
    draws,
    settings,
    extremes,
    sums,
    states,
    filter_chunks,
    scores,
    ids,
    vocab_size,
    FULL: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    begin()
    chunk, i = tl.program_id(0), tl.program_id(1)
    row = tl.load(draws + 2 * i)
    if row < 0:
        return
    position = tl.load(draws + 2 * i + 1)
    inverse_temperature = real_setting(settings, row, INVERSE_TEMPERATURE)
    low, high = setting(settings, row, SEED_LOW), setting(settings, row, SEED_HIGH)
    floor = -float("inf")
    if FULL:  # noqa: SIM102 - known when compiling, so not one condition with the next
        if setting(settings, row, FILTERED) != 0:
            num_rows = tl.num_programs(1)
            floor = state_before(2 * PASSES, i, row, num_rows, settings, extremes, sums, states, filter_chunks)[0]
    logits += i.to(tl.int64) * stride
    first = chunk * TILE * TILES
    best = tl.full((TILE // 4, 4), -float("inf"), tl.float32)
    best_ids = quads(first, TILE)
    for tile in range(TILES):
        tokens = quads(first + tile * TILE, TILE)
        z = tl.load(logits + tokens, mask=tokens < vocab_size, other=-float("inf"))
        if FULL:
            z = tl.where(z > floor, z, -float("inf"))
        score = z
        if inverse_temperature != 0:
            blocks = first // 4 + tile * (TILE // 4) + tl.arange(0, TILE // 4)
            score = z * inverse_temperature + _gumbel(blocks, position, low, high)
        better = score > best
        best = tl.where(better, score, best)
        best_ids = tl.where(better, tokens, best_ids)
    top = tl.max(best)
    at = i * tl.num_programs(0) + chunk
    tl.store(scores + at, top)
    tl.store(ids + at, tl.min(tl.where(best == top, best_ids, 0x7FFFFFFF)))


@triton.jit
def _finish(scores, ids, chunks, draws, tokens, newest, BLOCK: tl.constexpr):
    begin()
    i = tl.program_id(0)
    row = tl.load(draws + 2 * i)
    if row < 0:
        tl.store(tokens + i, 0)
        return
    at = tl.arange(0, BLOCK)
    score = tl.load(scores + i * chunks + at, mask=at < chunks, other=-float("inf"))
    token = tl.load(ids + i * chunks + at, mask=at < chunks, other=0x7FFFFFFF)
    best = tl.max(score)
    token = tl.min(tl.where(score == best, token, 0x7FFFFFFF))
    token = tl.where(best == -float("inf"), -1, token)
    tl.store(tokens + i, token)
    tl.store(newest + row, tl.maximum(token, 0))


@triton.jit
def _gumbel(blocks, position, low, high):
    """-log E of the tokens 4 b .. 4 b + 3 for b in blocks [n]: [n, 4]."""
    zero = blocks * 0
    k0, k1 = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    c0, c1 = blocks.to(tl.uint32), (zero + position).to(tl.uint32)
    c2, c3 = zero.to(tl.uint32), zero.to(tl.uint32)
    for _ in tl.static_range(10):
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32)
        c2, c3 = (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape(blocks.shape[0], 4)
    return -LN2 * libdevice.fast_log2f(_exponential(words))


@triton.jit
def _exponential(words):
    """E = -log(1 - w): its series where w < 1/8, else by 1 - w, which the word's complement holds to the last bit."""
    small = words < 0x20000000
    x = (tl.where(small, words, words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    tail = 1 / 3 + x * (1 / 4 + x * (1 / 5 + x * (1 / 6 + x * (1 / 7))))
    return tl.where(small, x + x * x * (0.5 + x * tail), -LN2 * libdevice.fast_log2f(x))
