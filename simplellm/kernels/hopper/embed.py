"""embed: x = rows of the embedding, the row of the newest drawn token where a token is -1.

tokens [T], newest [rows], spans.rows [T] int32; weight [V, H] bf16; x [T, H]. A program a token; moves 2 T H elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.launch import launch
from simplellm.kernels.spans import Spans


@triton.jit
def embed_kernel(tokens_ptr, newest_ptr, rows_ptr, weight_ptr, x_ptr, H: tl.constexpr, BLOCK: tl.constexpr):
    gdc_wait()
    gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    newest = tl.load(newest_ptr + tl.load(rows_ptr + t))
    token = tl.load(tokens_ptr + t)
    token = tl.where(token < 0, newest, token).to(tl.int64)
    tl.store(x_ptr + t * H + column, tl.load(weight_ptr + token * H + column, mask=inside), mask=inside)


def embed(tokens: torch.Tensor, newest: torch.Tensor, spans: Spans, weight: torch.Tensor) -> torch.Tensor:
    """tokens [T], -1 for the row's newest token (newest [rows]); weight [V, H] -> [T, H]."""
    assert tokens.dtype == newest.dtype == spans.rows.dtype == torch.int32 and weight.is_contiguous()
    size = weight.shape[1]
    x = weight.new_empty(len(tokens), size)
    block = triton.next_power_of_2(size)
    launch(embed_kernel, (len(tokens),), tokens, newest, spans.rows, weight, x, H=size, BLOCK=block, num_warps=4)
    return x
