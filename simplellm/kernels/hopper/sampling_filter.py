"""top-k, top-p and min-p without sorting: the `floor` of each filtered row; tokens whose logit is above it may be drawn.

min-p gives a first floor. Then top-k, then top-p: a token stays if less than the target lies above it, where "lies above" is
the number of tokens with a larger logit (target k), or their mass exp((z - best) / T) (target p times the mass of all that
is left). Equal logits stay or go together. The floor is searched between `lo`, above which the target is reached, and `hi`,
above which it is not: a pass sums what lies above sixteen points from lo to hi, and the next program takes the sixteenth
that holds the cut. After PASSES passes lo and hi are 2^-28 of the row's range apart, one float or less; a row whose cut
holds a single token before that is done. Every pass reads the logits of rows that are still searching (4 V bytes each).

State of a search, float32: lo, hi, what lies above hi, target (-1: not known before the first pass), best logit.
Sums are added in a fixed order: the same logits give the same floor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from simplellm.kernels.hopper.launch import launch
from simplellm.kernels.hopper.sampling_common import (
    FILTERED,
    INVERSE_TEMPERATURE,
    MIN_GAP,
    TILE,
    TOP_K,
    TOP_P,
    begin,
    num_tiles,
    quads,
    real_setting,
    setting,
)
from simplellm.kernels.hopper.sampling_tables import Tables

PASSES = tl.constexpr(7)  # of each of the two searches
POINTS = tl.constexpr(16)
STATE = tl.constexpr(8)  # floats of a state, padded
MAX_CHUNKS = tl.constexpr(128)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the searches of n rows stand; two buffers, for what even and odd passes leave."""

    extremes: torch.Tensor  # [n, chunks, 2]: largest and smallest finite logit
    sums: torch.Tensor  # [2, n, chunks, POINTS]
    states: torch.Tensor  # [2, n, STATE]


def search(logits: torch.Tensor, draws: torch.Tensor, tables: Tables) -> Cut:
    """Find the floors of filtered rows; programs of other rows exit at once."""
    num_rows, vocab_size = logits.shape
    tiles = num_tiles(num_rows)
    chunks = triton.cdiv(vocab_size, TILE * tiles)
    assert chunks <= MAX_CHUNKS.value

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    cut = Cut(floats(num_rows, chunks, 2), floats(2, num_rows, chunks, POINTS.value), floats(2, num_rows, STATE.value))
    grid, source = (chunks, num_rows), (logits, logits.stride(0), draws, tables.settings)
    launch(_measure, grid, *source, cut.extremes, vocab_size, TILES=tiles, TILE=TILE)
    for number in range(2 * PASSES.value):
        launch(_narrow, grid, *source, cut.extremes, cut.sums, cut.states, vocab_size, number, TILES=tiles, TILE=TILE)
    return cut


@triton.jit
def _measure(logits, stride, draws, settings, extremes, vocab_size, TILES: tl.constexpr, TILE: tl.constexpr):
    begin()
    chunk, i = tl.program_id(0), tl.program_id(1)
    row = tl.load(draws + 2 * i)
    if row < 0:
        return
    if setting(settings, row, FILTERED) == 0:
        return
    logits += i.to(tl.int64) * stride
    largest = tl.full((TILE // 4, 4), -float("inf"), tl.float32)
    smallest = tl.full((TILE // 4, 4), float("inf"), tl.float32)
    for tile in range(TILES):
        tokens = quads((chunk * TILES + tile) * TILE, TILE)
        z = tl.load(logits + tokens, mask=tokens < vocab_size, other=-float("inf"))
        largest = tl.maximum(largest, z)
        smallest = tl.minimum(smallest, tl.where(z == -float("inf"), float("inf"), z))
    at = extremes + 2 * (i * tl.num_programs(0) + chunk)
    tl.store(at, tl.max(largest))
    tl.store(at + 1, tl.min(smallest))


@triton.jit(do_not_specialize=["number"])
def _narrow(
    logits, stride, draws, settings, extremes, sums, states, vocab_size, number, TILES: tl.constexpr, TILE: tl.constexpr
):
    """Pass `number`: the first PASSES search for top-k's cut, the others for top-p's."""
    begin()
    chunk, i = tl.program_id(0), tl.program_id(1)
    chunks, num_rows = tl.num_programs(0), tl.num_programs(1)
    row = tl.load(draws + 2 * i)
    if row < 0:
        return
    if setting(settings, row, FILTERED) == 0:
        return
    lo, hi, above, target, best = state_before(number, i, row, num_rows, settings, extremes, sums, states, chunks)
    if chunk == 0:
        at = states + ((number % 2) * num_rows + i) * STATE
        tl.store(at, lo)
        tl.store(at + 1, hi)
        tl.store(at + 2, above)
        tl.store(at + 3, target)
        tl.store(at + 4, best)
    if lo >= hi:
        return
    counting = number < PASSES
    inverse_temperature = real_setting(settings, row, INVERSE_TEMPERATURE)
    logits += i.to(tl.int64) * stride
    found = ()
    for _ in tl.static_range(POINTS):
        found = found + (tl.zeros((TILE // 16,), tl.float32),)  # type: ignore[assignment]
    for quarter in range(TILES * 4):
        tokens = quads((chunk * TILES * 4 + quarter) * (TILE // 4), TILE // 4)
        z = tl.load(logits + tokens, mask=tokens < vocab_size, other=-float("inf"))
        weight = tl.where(counting, 1.0, tl.exp((z - best) * inverse_temperature))
        more = ()
        for j in tl.static_range(POINTS):
            more = more + (found[j] + tl.sum(tl.where(z > _point(lo, hi, j), weight, 0.0), 1),)  # type: ignore[assignment]
        found = more
    at = sums + (((number % 2) * num_rows + i) * chunks + chunk) * POINTS
    for j in tl.static_range(POINTS):
        tl.store(at + j, tl.sum(found[j]))


@triton.jit
def state_before(number, i, row, num_rows, settings, extremes, sums, states, chunks):
    """lo, hi, above, target, best when pass `number` begins, from what the pass before it left."""
    if number == 0:
        lo, hi, above, target, best = _first_state(i, row, settings, extremes, chunks)
    else:
        buffer = (number - 1) % 2 * num_rows + i
        at = states + buffer * STATE
        lo, hi, above, target, best = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
        if lo < hi:
            counting = number <= PASSES  # in the pass before
            lo, hi, above, target = _tighten(
                lo, hi, above, target, best, counting, row, settings, sums + buffer * chunks * POINTS, chunks
            )
    if number == PASSES:  # top-p's search begins where top-k's has ended
        hi = tl.where(real_setting(settings, row, TOP_P) < 1, best, lo)
        above, target = 0.0, -1.0
    return lo, hi, above, target, best


@triton.jit
def _first_state(i, row, settings, extremes, chunks):
    at = tl.arange(0, MAX_CHUNKS)
    pairs = extremes + 2 * (i * chunks + at)
    best = tl.max(tl.load(pairs, mask=at < chunks, other=-float("inf")))
    worst = tl.min(tl.load(pairs + 1, mask=at < chunks, other=float("inf")))
    lo = _below(tl.minimum(tl.maximum(worst, best - real_setting(settings, row, MIN_GAP)), best))
    top_k = setting(settings, row, TOP_K)
    hi = tl.where(top_k > 0, best, lo)
    return lo, hi, 0.0, top_k.to(tl.float32), best


@triton.jit
def _tighten(lo, hi, above, target, best, counting, row, settings, sums, chunks):
    """The sixteenth of (lo, hi] that holds the cut; an empty one if nothing is left to search."""
    part, point = tl.arange(0, MAX_CHUNKS)[:, None], tl.arange(0, POINTS)
    found = tl.sum(tl.load(sums + part * POINTS + point[None, :], mask=part < chunks, other=0.0), 0)
    if target < 0:
        target = real_setting(settings, row, TOP_P) * tl.max(found)
    reached = tl.sum((found >= target).to(tl.int32))  # these points, the lowest ones, lie below the cut
    last = tl.maximum(reached - 1, 0)
    above_lo = tl.sum(tl.where(point == last, found, 0.0))
    above = tl.where(reached < POINTS, tl.sum(tl.where(point == reached, found, 0.0)), above)
    new_lo = _point(lo, hi, last)
    new_hi = tl.where(reached < POINTS, _point(lo, hi, reached), hi)
    least = tl.where(counting, 1.0, tl.exp((new_lo - best) * real_setting(settings, row, INVERSE_TEMPERATURE)))
    is_alone = above_lo - above < 1.5 * least  # one token is left: each weighs more than `least`
    is_exact = counting | (least > 1e-4 * above_lo)  # the difference of two masses is, but for rounding
    new_hi = tl.where((reached == 0) | (is_alone & is_exact), new_lo, new_hi)
    return new_lo, new_hi, above, target


@triton.jit
def _point(lo, hi, j):
    """Point j of POINTS from lo on: one rounding, so that every program finds the same."""
    return tl.fma(hi - lo, j * (1.0 / POINTS), lo)


@triton.jit
def _below(x):
    """The next float below x: tokens above it are those at least x."""
    bits = x.to(tl.int32, bitcast=True)
    lower = tl.where(bits > 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
    lower = tl.where(x == 0, -1.1754944e-38, lower)
    return tl.where(x == -float("inf"), x, lower)
