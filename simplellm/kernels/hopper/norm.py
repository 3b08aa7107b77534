"""add_norm and final_norm: x' = round(x + round(sum of parts)); y = round(x' * (mean(x'^2) + eps)^-1/2 * gain).

x, y [T, H] bf16; parts [T, n, H] bf16 or None; gain [H]. Sums in float32, each row by one program, rounded as the twin
rounds. H need not be a power of two: the block is masked. Moves (3 + n) T H elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.launch import launch


@triton.jit
def norm_kernel(
    x_ptr,
    parts_ptr,
    gain_ptr,
    outputs_ptr,
    new_ptr,
    y_ptr,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    FINAL: tl.constexpr,
):
    """One row a program: row `outputs[pid]` of x when FINAL, else row pid, whose sum is kept too."""
    out = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    gdc_wait()
    gdc_launch_dependents()
    row = tl.load(outputs_ptr + out).to(tl.int64) if FINAL else out
    x = tl.load(x_ptr + row * H + column, mask=inside, other=0.0)
    if PARTS > 0:
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PARTS):
            total += tl.load(parts_ptr + (row * PARTS + i) * H + column, mask=inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + total.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
        if not FINAL:
            tl.store(new_ptr + row * H + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    tl.store(y_ptr + out * H + column, (wide * scale * gain).to(tl.bfloat16), mask=inside)


def add_norm(x: torch.Tensor, parts: torch.Tensor | None, gain: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H], parts [T, n, H] or None, gain [H] -> (x plus the parts, its norm), both [T, H]. Without parts x itself."""
    y = torch.empty_like(x)
    new = x if parts is None else torch.empty_like(x)
    _norm(x, parts, gain, eps, None, new, y)
    return new, y


def final_norm(
    x: torch.Tensor, parts: torch.Tensor | None, gain: torch.Tensor, eps: float, outputs: torch.Tensor
) -> torch.Tensor:
    """The norm of rows `outputs` [N] int32 (each below T) of x [T, H] plus parts [T, n, H] -> [N, H]."""
    assert outputs.dtype == torch.int32
    y = x.new_empty(len(outputs), x.shape[1])
    _norm(x, parts, gain, eps, outputs, None, y)
    return y


def _norm(
    x: torch.Tensor,
    parts: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    outputs: torch.Tensor | None,
    new: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    size = x.shape[1]
    assert size % 64 == 0 and x.dtype == torch.bfloat16 and x.is_contiguous() and gain.is_contiguous()
    assert parts is None or (parts.is_contiguous() and parts.dtype == x.dtype and parts.shape[::2] == x.shape)
    launch(
        norm_kernel, (len(y),), x, parts, gain, outputs, new, y, eps,
        H=size, BLOCK=triton.next_power_of_2(size), PARTS=0 if parts is None else parts.shape[1],
        FINAL=outputs is not None, num_warps=4,
    )  # fmt: skip
