"""Changed logits, in place, for the rows that ask: penalties, then bias and forbidden stop ids, then the grammar's mask.

Penalties: z / r where z > 0, else z r, for tokens in the prompt or generated; then minus frequency * count and minus presence
for generated ones. An entry of the row adds its bias to its token's logit, and forbids the token where it would stand at a
position below the entry's limit. Rows with penalties or a mask are read and written once (8 V bytes; counts 5 V more, a
mask V / 8), rows with entries only at their entries; programs of other rows exit at once.

`raw_logit` takes a token's change back: exact but for float32 rounding, where anything had changed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from simplellm.kernels.hopper.launch import launch
from simplellm.kernels.hopper.sampling_common import (
    FREQUENCY,
    MAX_ENTRIES,
    NUM_ENTRIES,
    PRESENCE,
    REPETITION,
    SLOT,
    TILE,
    begin,
    num_tiles,
    quads,
    real_setting,
    setting,
)
from simplellm.kernels.hopper.sampling_tables import Tables

SCAN = tl.constexpr(256)  # entries looked at together


def change(logits: torch.Tensor, draws: torch.Tensor, tables: Tables) -> None:
    """Change logits [n, V] as the rows of draws [n, 2] ask for."""
    num_rows, vocab_size = logits.shape
    tiles = num_tiles(num_rows)
    launch(
        _change,
        (triton.cdiv(vocab_size, TILE * tiles), num_rows),
        logits,
        logits.stride(0),
        draws,
        tables.settings,
        tables.entries,
        tables.masked,
        tables.masks,
        tables.counts,
        tables.seen,
        vocab_size,
        TILES=tiles,
        TILE=TILE,
    )


@triton.jit
def _change(
    logits,
    stride,
    draws,
    settings,
    entries,
    masked,
    masks,
    counts,
    seen,
    vocab_size,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    begin()
    chunk, i = tl.program_id(0), tl.program_id(1)
    row = tl.load(draws + 2 * i)
    if row < 0:
        return
    position = tl.load(draws + 2 * i + 1)
    slot, is_masked = setting(settings, row, SLOT), tl.load(masked + row) != 0
    logits += i.to(tl.int64) * stride
    first = chunk * TILE * TILES
    if (slot >= 0) | is_masked:
        for tile in range(TILES):
            tokens = quads(first + tile * TILE, TILE)
            inside = tokens < vocab_size
            z = tl.load(logits + tokens, mask=inside, other=0.0)
            if slot >= 0:
                at = slot.to(tl.int64) * vocab_size + tokens
                z = _penalised(
                    z, tl.load(counts + at, mask=inside, other=0), tl.load(seen + at, mask=inside, other=0), settings, row
                )
            if is_masked:
                words = tl.load(masks + row.to(tl.int64) * (vocab_size // 32) + tokens // 32, mask=inside, other=0)
                z = tl.where((words >> (tokens % 32)) & 1 != 0, z, -float("inf"))
            tl.store(logits + tokens, z, mask=inside)
        tl.debug_barrier()  # the entries' logits may have been written by other threads
    num_entries = setting(settings, row, NUM_ENTRIES)
    for start in range(0, num_entries, SCAN):
        tokens, bias, limit, valid = _entries(entries, row, start, num_entries)
        ours = valid & (tokens >= first) & (tokens < first + TILE * TILES)
        z = tl.load(logits + tokens, mask=ours, other=0.0) + bias
        tl.store(logits + tokens, tl.where(position < limit, -float("inf"), z), mask=ours)


@triton.jit
def raw_logit(z, token, row, settings, entries, counts, seen, vocab_size):
    """The logit of `token` before `_change` made it z; counts as they were then. z is finite."""
    num_entries = setting(settings, row, NUM_ENTRIES)
    for start in range(0, num_entries, SCAN):
        tokens, bias, _, valid = _entries(entries, row, start, num_entries)
        z -= tl.sum(tl.where(valid & (tokens == token), bias, 0.0))
    slot = setting(settings, row, SLOT)
    if slot >= 0:
        at = slot.to(tl.int64) * vocab_size + token
        count, in_prompt = tl.load(counts + at), tl.load(seen + at)
        z += real_setting(settings, row, FREQUENCY) * count + tl.where(count > 0, real_setting(settings, row, PRESENCE), 0.0)
        factor = tl.where((count > 0) | (in_prompt != 0), real_setting(settings, row, REPETITION), 1.0)
        z = tl.where(z > 0, z * factor, tl.math.div_rn(z, factor))
    return z


@triton.jit
def _penalised(z, count, in_prompt, settings, row):
    factor = tl.where((count > 0) | (in_prompt != 0), real_setting(settings, row, REPETITION), 1.0)
    z = tl.where(z > 0, tl.math.div_rn(z, factor), z * factor)
    return z - real_setting(settings, row, FREQUENCY) * count - tl.where(count > 0, real_setting(settings, row, PRESENCE), 0.0)


@triton.jit
def _entries(entries, row, start, num_entries):
    """Tokens, biases, limits [SCAN] from number `start` on, and which of them count."""
    number = start + tl.arange(0, SCAN)
    valid = number < num_entries
    at = entries + row.to(tl.int64) * (3 * MAX_ENTRIES) + number
    tokens = tl.load(at, mask=valid, other=0)
    bias = tl.load(at + MAX_ENTRIES, mask=valid, other=0).to(tl.float32, bitcast=True)
    return tokens, bias, tl.load(at + 2 * MAX_ENTRIES, mask=valid, other=0), valid
