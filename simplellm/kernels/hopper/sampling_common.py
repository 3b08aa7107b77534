"""What the sampling kernels share: the start of each, a row's settings, and how a row of logits is cut into chunks.

Programs are (chunk, i): chunk number `chunk` of the i-th row of logits, whose place in the tables is draws[i, 0] (-1: draw
nothing). A thread reads four neighbouring logits at once, which is also what one call of Philox serves.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.sampling_tables import MAX_ENTRIES as _MAX_ENTRIES
from simplellm.kernels.hopper.sampling_tables import WIDTH as _WIDTH
from simplellm.kernels.hopper.sampling_tables import Field

INVERSE_TEMPERATURE = tl.constexpr(int(Field.INVERSE_TEMPERATURE))
SEED_LOW, SEED_HIGH = tl.constexpr(int(Field.SEED_LOW)), tl.constexpr(int(Field.SEED_HIGH))
FILTERED, TOP_K = tl.constexpr(int(Field.FILTERED)), tl.constexpr(int(Field.TOP_K))
TOP_P, MIN_GAP = tl.constexpr(int(Field.TOP_P)), tl.constexpr(int(Field.MIN_GAP))
SLOT, REPETITION = tl.constexpr(int(Field.SLOT)), tl.constexpr(int(Field.REPETITION))
PRESENCE, FREQUENCY = tl.constexpr(int(Field.PRESENCE)), tl.constexpr(int(Field.FREQUENCY))
NUM_ENTRIES, LOGPROBS = tl.constexpr(int(Field.NUM_ENTRIES)), tl.constexpr(int(Field.LOGPROBS))
WIDTH, MAX_ENTRIES = tl.constexpr(_WIDTH), tl.constexpr(_MAX_ENTRIES)

TILE = 2048  # logits that a program of four warps reads at once: 16 a thread
FEW = 8  # rows up to which a program takes one tile, so that all multiprocessors take part


def num_tiles(num_rows: int) -> int:
    """Tiles of one chunk."""
    return 1 if num_rows <= FEW else 4


@triton.jit
def begin():
    """Wait for the kernel before; let the next one come."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def setting(settings, row, field):
    return tl.load(settings + row * WIDTH + field)


@triton.jit
def real_setting(settings, row, field):
    return tl.load(settings + row * WIDTH + field).to(tl.float32, bitcast=True)


@triton.jit
def quads(start, SIZE: tl.constexpr):
    """Token ids [SIZE / 4, 4] from `start` on."""
    return start + tl.arange(0, SIZE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
