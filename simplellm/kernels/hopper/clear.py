"""clear_tails: zeros in the KV slots behind each chunk, so that attention may multiply whole pages: 0 times NaN is NaN.

pool [layers, 2, pages, Hkv, 128, 64] bf16, each [layer, k or v] contiguous; page table [rows, P]; tiles [J, 4] and counts as in
spans.Work. For every tile the slots from its end to the end of that page. Runs before the step's K and V are appended: what
a following tile of the same row will fill is cleared too, and filled afterwards. Moves at most 32 KB per tile, layer and head.
A step has room for many more tiles than it has: PROGRAMS programs a layer and head share the true ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.config import PAGE
from simplellm.kernels.hopper.launch import launch

PROGRAMS = 8  # with 8 heads and 24 or 36 layers of k or v: about a wave, and 16,384 tokens of one prompt are 11 tiles a program


@triton.jit(do_not_specialize=["pages_stride"])
def clear_kernel(
    pool_ptr, layer_stride, kind_stride, pages_ptr, pages_stride, tiles_ptr, counts_ptr,
    HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Program (every num_programs-th tile, head, layer and kind)."""
    gdc_wait()
    gdc_launch_dependents()
    layer, kind = tl.program_id(2) // 2, tl.program_id(2) % 2
    base = pool_ptr + layer.to(tl.int64) * layer_stride + kind.to(tl.int64) * kind_stride
    slot = tl.arange(0, PAGE)[:, None]
    for tile in range(tl.program_id(0), tl.load(counts_ptr + 3), tl.num_programs(0)):
        end = tl.load(tiles_ptr + tile * 4 + 2) + tl.load(tiles_ptr + tile * 4 + 1)
        row = tl.load(tiles_ptr + tile * 4 + 3)
        if end % PAGE > 0:
            page = tl.load(pages_ptr + row * pages_stride + end // PAGE).to(tl.int64)
            offsets = (page * HEADS + tl.program_id(1)) * (PAGE * D) + slot * D + tl.arange(0, D)[None, :]
            tl.store(base + offsets, tl.zeros([PAGE, D], pool_ptr.dtype.element_ty), mask=(slot >= end % PAGE))


def clear_tails(pool: torch.Tensor, pages: torch.Tensor, tiles: torch.Tensor, counts: torch.Tensor) -> None:
    """Zero K and V behind each of the counts[3] tiles [J, 4] (first token, number, position, row), in all layers."""
    layers, _, _, heads, page, size = pool.shape
    assert pool[0, 0].is_contiguous() and page == PAGE and pages.stride(1) == 1 and tiles.is_contiguous()
    assert pages.dtype == tiles.dtype == counts.dtype == torch.int32
    grid = min(len(tiles), PROGRAMS), heads, 2 * layers
    launch(
        clear_kernel, grid, pool, pool.stride(0), pool.stride(1), pages, pages.stride(0), tiles, counts,
        HEADS=heads, PAGE=PAGE, D=size, num_warps=4,
    )  # fmt: skip
