# mypy: disable-error-code="no-untyped-def, misc"
"""experts for many tokens: parts[t, c] = round(w_tc (W2[e] round(swiglu(W1[e] y_t + b1[e])) + b2[e])), e = choice c of token t.

y [T, H] bf16 -> parts [T, 4, H] bf16; W1 [2 I, H] and W2 [H, I] of E experts as MXFP4 streams (pack.py), rows sorted by expert
(router.py). Three launches, nothing else: `gather` copies the tokens' rows into sorted order and lists the column tiles, for
only the device knows how many rows an expert has; `grouped` (moe_prefill_kernel.py) is gate_up with its activation, then down.
The sorted rows lie in what becomes `parts`, which down writes when they are no longer needed, so they cost no memory.

Bytes moved, P = 4 T: read P H and write P H (gather), read P H and write P I (gate_up), read P I and write P H (down), 2 each;
4.25 bit for each weight of the experts chosen. Multiplications: 6 P H I. From about 100 rows an expert on they take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper import moe_prefill_kernel as kernel
from simplellm.kernels.hopper.launch import launch, num_sms
from simplellm.kernels.hopper.pack import Stream
from simplellm.kernels.hopper.router import Route

CHOICES = 4  # experts of a token
GATHER_ROWS = 8  # sorted pairs of one program of `gather`


@dataclass(frozen=True, slots=True)
class Variant:
    """How `grouped` is cut. Registers: GROUPS of these, 24 for the producer and what is left for the first warpgroup."""

    columns: int  # sorted pairs of a tile, at most: N of the MMA
    groups: int  # warpgroups of 64 rows
    unit: int  # blocks of weights a thread asks for at a time, at most
    stages: int  # blocks of 64 columns of tokens in the ring
    registers: int  # a thread
    lag: bool  # warpgroups start their tiles one after another, so that one's results are written while another multiplies
    policy: str = ""  # of weights in the L2


# By mean rows an expert, up to: narrow tiles keep more loads of weights in flight, wide ones unpack a weight less often. H200:
# 216 us at 32 rows with 64 columns (244 with units of 9), 451 at 128 with 128 (612 with 64), 20b; 120b at 512: 5.6 ms with 128,
# 5.9 with 256; 20b at 2,048: 4.6 ms with 256 (4.9 without lag, 5.1 with 128).
VARIANTS = (
    (48, Variant(64, 3, 5, 12, 160, False, "evict_first")),
    (768, Variant(128, 3, 3, 10, 160, False)),
)
WIDEST = Variant(256, 2, 3, 6, 240, True)


def variant(mean: float) -> Variant:
    """The one for so many rows an expert."""
    return next((v for most, v in VARIANTS if mean <= most), WIDEST)


@triton.jit
def gather(
    y_ptr,
    token_ptr,
    offsets_ptr,
    sorted_ptr,
    tiles_ptr,
    H: tl.constexpr,
    E: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """sorted[p] = y[token[p]], ROWS rows a program; program e < E lists expert e's tiles of COLUMNS rows (first: how many)."""
    gdc_wait()
    gdc_launch_dependents()
    pid = tl.program_id(0)
    if pid < E:
        e = tl.arange(0, LANES)
        first = tl.load(offsets_ptr + e, mask=e < E, other=0)
        num = (tl.load(offsets_ptr + e + 1, mask=e < E, other=0) - first + COLUMNS - 1) // COLUMNS
        before = tl.sum(tl.where(e < pid, num, 0), 0)
        if pid == 0:
            tl.store(tiles_ptr, tl.sum(num, 0))
        begin = tl.load(offsets_ptr + pid)
        end = tl.load(offsets_ptr + pid + 1)
        for at in range(begin, end, COLUMNS * LANES):
            row = at + e * COLUMNS
            entry = tiles_ptr + 4 + (before + (row - begin) // COLUMNS) * 4
            tl.store(entry, pid, mask=row < end)
            tl.store(entry + 1, row, mask=row < end)
            tl.store(entry + 2, tl.minimum(end - row, COLUMNS), mask=row < end)
    p = pid * ROWS + tl.arange(0, ROWS)
    real = (p < tl.load(offsets_ptr + E))[:, None]
    token = tl.load(token_ptr + p, mask=p < tl.load(offsets_ptr + E), other=0)
    for c in tl.static_range(0, H, 512):
        h = c + tl.arange(0, 512)[None, :]
        row = tl.load(y_ptr + token[:, None] * H + h, mask=real & (h < H))
        tl.store(sorted_ptr + p[:, None] * H + h, row, mask=real & (h < H))


def experts_large(y: torch.Tensor, route: Route, gate_up: Stream, down: Stream, limit: float) -> torch.Tensor:
    """y [T, H] bf16 -> each choice's weighted row [T, 4, H]; rows of padded tokens hold anything."""
    pairs, experts = CHOICES * len(y), len(gate_up.words)
    return run(y, route, gate_up, down, limit, variant(pairs / experts))


def run(y: torch.Tensor, route: Route, gate_up: Stream, down: Stream, limit: float, v: Variant) -> torch.Tensor:
    """experts_large cut in a given way."""
    (num_tokens, hidden), experts = y.shape, len(gate_up.words)
    pairs = CHOICES * num_tokens
    assert y.is_contiguous() and y.dtype == torch.bfloat16 and len(route.pair) == pairs
    assert gate_up.cols == hidden == down.rows and gate_up.rows == 2 * down.cols
    assert pairs * max(hidden, down.cols) < 2**31, "places in the buffers are 32-bit numbers"
    rows, inner = y.new_empty(pairs, hidden), y.new_empty(pairs, down.cols)
    tiles = torch.empty(4 * (1 + pairs // v.columns + experts), dtype=torch.int32, device=y.device)
    launch(
        gather,
        (max(experts, triton.cdiv(pairs, GATHER_ROWS)),),
        y,
        route.token,
        route.offsets,
        rows,
        tiles,
        H=hidden,
        E=experts,
        LANES=triton.next_power_of_2(experts),
        ROWS=GATHER_ROWS,
        COLUMNS=v.columns,
    )
    _grouped(rows, gate_up, inner, tiles, route, limit, v)
    _grouped(inner, down, rows, tiles, route, limit, v)
    return rows.view(num_tokens, CHOICES, hidden)


def _grouped(
    x: torch.Tensor, w: Stream, out: torch.Tensor, tiles: torch.Tensor, route: Route, limit: float, v: Variant
) -> None:
    blocks = w.cols // 64
    unit = v.unit if blocks % v.unit == 0 else 1  # gpt-oss has 45 blocks; what else there is has few
    box = [min(v.columns, kernel.BOX.value), 64]
    launch(
        kernel.grouped,
        (num_sms(),),
        TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)),
        w.words,
        w.bias,
        out,
        tiles,
        route.pair,
        route.gate,
        w.rows // 64,
        blocks // unit,
        DOWN=w.kind == "down",
        BIG=w.big,
        LIMIT=limit,
        BN=v.columns,
        UNIT=unit,
        GROUPS=v.groups,
        STAGES=v.stages,
        REGISTERS=v.registers,
        LAG=v.lag
        and blocks > v.stages,  # else a warpgroup could be two tiles ahead, which its barrier could not tell from none
        POLICY=v.policy,
    )
