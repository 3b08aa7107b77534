"""Log-probabilities under the raw logits: of the drawn token and of the TOP best, best first, of equal ones the lower id.

`scan` runs before the logits are changed and leaves, for each tile, max and sum of exp, and its TOP best tokens, each as one
int64: the logit's bits in the order of the numbers, above the complement of the id. `report` runs after the draw: it merges
them, takes the drawn token's change back, and then counts the token for its penalties. Rows that did not ask cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from simplellm.kernels.hopper.launch import launch
from simplellm.kernels.hopper.sampling_change import raw_logit
from simplellm.kernels.hopper.sampling_common import LOGPROBS, SLOT, TILE, begin, setting
from simplellm.kernels.hopper.sampling_tables import TOP as _TOP
from simplellm.kernels.hopper.sampling_tables import Tables

TOP = tl.constexpr(_TOP)
NONE = tl.constexpr(-(2**63))  # below every key


@dataclass(frozen=True, slots=True)
class Scan:
    """What `scan` leaves of n rows of `tiles` tiles."""

    keys: torch.Tensor  # [n, tiles, TOP] int64
    masses: torch.Tensor  # [n, tiles, 2] float32: max, sum of exp(z - max)


def scan(logits: torch.Tensor, draws: torch.Tensor, tables: Tables) -> Scan:
    """Before anything changes logits [n, V]."""
    num_rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, TILE)
    keys = torch.empty(num_rows, tiles, _TOP, dtype=torch.int64, device=logits.device)
    masses = torch.empty(num_rows, tiles, 2, dtype=torch.float32, device=logits.device)
    launch(_scan, (tiles, num_rows), logits, logits.stride(0), draws, tables.settings, keys, masses, vocab_size, TILE=TILE)
    return Scan(keys, masses)


def report(
    logits: torch.Tensor,
    draws: torch.Tensor,
    tables: Tables,
    tokens: torch.Tensor,
    scanned: Scan,
    values: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """values [n, 1 + TOP] float32: the drawn token's, then the best ones'; ids [n, TOP] int32. For rows that asked."""
    num_rows, tiles = scanned.masses.shape[:2]
    launch(
        _report,
        (num_rows,),
        logits,
        logits.stride(0),
        draws,
        tables.settings,
        tables.entries,
        tables.counts,
        tables.seen,
        tokens,
        scanned.keys,
        scanned.masses,
        values,
        ids,
        logits.shape[1],
        tiles,
        TILES=triton.next_power_of_2(tiles),
        KEYS=triton.next_power_of_2(tiles * _TOP),
    )


@triton.jit
def _scan(logits, stride, draws, settings, keys, masses, vocab_size, TILE: tl.constexpr):
    begin()
    tile, i = tl.program_id(0), tl.program_id(1)
    row = tl.load(draws + 2 * i)
    if row < 0:
        return
    if setting(settings, row, LOGPROBS) == 0:
        return
    tokens = tile * TILE + tl.arange(0, TILE)
    z = tl.load(logits + i.to(tl.int64) * stride + tokens, mask=tokens < vocab_size, other=-float("inf"))
    largest = tl.max(z)
    at = i * tl.num_programs(0) + tile
    tl.store(masses + 2 * at, largest)
    tl.store(masses + 2 * at + 1, tl.sum(tl.exp(z - largest)))
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, its equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)
    key = tl.where(tokens < vocab_size, key, NONE)
    for k in range(TOP):
        best = tl.max(key)
        tl.store(keys + at * TOP + k, best)
        key = tl.where(key == best, NONE, key)


@triton.jit
def _report(
    logits,
    stride,
    draws,
    settings,
    entries,
    counts,
    seen,
    tokens,
    keys,
    masses,
    values,
    ids,
    vocab_size,
    tiles,
    TILES: tl.constexpr,
    KEYS: tl.constexpr,
):
    begin()
    i = tl.program_id(0)
    row = tl.load(draws + 2 * i)
    if row < 0:
        return
    token = tl.load(tokens + i)
    if token < 0:  # nothing was drawn, since no logit is a number
        return
    if setting(settings, row, LOGPROBS) != 0:
        at = tl.arange(0, TILES)
        pairs = masses + 2 * (i * tiles + at)
        largest = tl.load(pairs, mask=at < tiles, other=-float("inf"))
        sums = tl.load(pairs + 1, mask=at < tiles, other=0.0)
        best = tl.max(largest)
        total = best + tl.log(tl.sum(sums * tl.exp(largest - best)))
        z = tl.load(logits + i.to(tl.int64) * stride + token)
        own = raw_logit(z, token, row, settings, entries, counts, seen, vocab_size)
        tl.store(values + i * (1 + TOP), own - total)
        number = tl.arange(0, KEYS)
        key = tl.load(keys + i * tiles * TOP + number, mask=number < tiles * TOP, other=NONE)
        for k in range(TOP):
            top = tl.max(key)
            ordered = (top >> 32).to(tl.int32)
            value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            tl.store(values + i * (1 + TOP) + 1 + k, value - total)
            tl.store(ids + i * TOP + k, 0x7FFFFFFF - (top & 0x7FFFFFFF).to(tl.int32))
            key = tl.where(key == top, NONE, key)
    slot = setting(settings, row, SLOT)
    if slot >= 0:
        tl.debug_barrier()  # `raw_logit` has read the count
        tl.atomic_add(counts + slot.to(tl.int64) * vocab_size + token, 1)
