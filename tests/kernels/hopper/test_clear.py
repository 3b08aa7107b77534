"""clear_tails: zeros from each tile's end to the end of its page, in every layer, and nowhere else."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.kernels.hopper.check import broken

pytest.importorskip("triton")
from simplellm.kernels.hopper import clear  # noqa: E402

pytestmark = pytest.mark.gpu

TILES = [(0, 192, 100, 2), (192, 8, 292, 2), (200, 28, 100, 0), (228, 1, 383, 1), (229, 5, 1, 3)]  # as in spans.Work
TILES += [(234 + 2 * i, 2, 37 * i, row) for i, row in enumerate(range(4, 14))]  # more than programs
LEFTOVER = (0, 3, 300, 3)  # beyond num_tiles: its page stays as it is


def check(module: ModuleType, heads: int) -> None:
    whole = torch.full((3, 2, 60, heads, 128, 64), torch.nan, device="cuda", dtype=torch.bfloat16)
    pool = whole[:, :, 2:]  # a view whose layers do not touch
    pages = torch.arange(1, 57, dtype=torch.int32).flip(0).view(14, 4)
    want = pool.clone()
    for _, number, position, row in TILES:
        end = position + number
        if end % 128:
            want[:, :, pages[row, end // 128], :, end % 128 :] = 0
    counts = torch.tensor([254, 0, 0, len(TILES), 0, 0, 0, 0], device="cuda", dtype=torch.int32)
    tiles = torch.tensor([*TILES, LEFTOVER], device="cuda", dtype=torch.int32)
    module.clear_tails(pool, pages.cuda(), tiles, counts)
    assert torch.equal(pool.isnan(), want.isnan()) and torch.equal(pool.nan_to_num(5.0), want.nan_to_num(5.0))
    assert whole[:, :, :2].isnan().all()


@pytest.mark.parametrize("heads", [8, 1])
def test_clear_tails(heads: int) -> None:
    check(clear, heads)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slot >= end", "slot > end"),
        ("tl.load(counts_ptr + 3)", "tl.load(counts_ptr + 3) + 1"),
        ("tl.load(counts_ptr + 3)", "tl.minimum(tl.load(counts_ptr + 3), tl.num_programs(0))"),
        ("// 2, tl", "// 4, tl"),
    ],
)
def test_the_check_rejects_a_broken_clear(old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check(broken(clear, old, new), 8)
