"""The experts' kernels compile for sm_90 as meant: resident grids, no spills or shuffles, few instructions a weight."""

import pytest
import torch

from simplellm.kernels.hopper.launch import Compiled, compiling
from simplellm.kernels.hopper.moe import CONFIG, SHARED_BYTES, experts_small
from simplellm.kernels.hopper.pack import BLOCK_WORDS, Kind, Stream
from simplellm.kernels.hopper.router import Route

SLOTS = {8: 2.1, 16: 2.4, 32: 2.2}  # instructions from the loop's first MMA to its last, a weight


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def stream(kind: Kind, rows: int, columns: int, big: bool) -> Stream:
    words = meta(32, rows // 64, columns // 64, BLOCK_WORDS)
    return Stream(words, meta(32, rows, dtype=torch.float32), big, kind, rows, columns)


def build(width: int, hidden: int = 2880, inner: int = 2880, big: bool = False) -> list[Compiled]:
    pairs = meta(32)
    route = Route(meta(33), pairs, pairs, meta(32, dtype=torch.float32), meta(1), meta(100), width)
    y = meta(8, hidden, dtype=torch.bfloat16)
    with compiling() as built:
        experts_small(y, route, stream("gate_up", 2 * inner, hidden, big), stream("down", hidden, inner, big), 7.0)
    return built


def check_grid_is_resident(kernel: Compiled, width: int) -> None:
    _, _, warps, ctas, _, _ = CONFIG[width]
    assert kernel.num_warps == warps and kernel.registers * 32 * warps * ctas <= 65536
    assert (kernel.shared + 1024) * ctas <= SHARED_BYTES + 1024  # the system keeps 1 KB a CTA
    assert kernel.stack == 0 and kernel.count("LDL|STL|SHFL") == 0


@pytest.mark.parametrize("width", CONFIG)
def test_the_shapes_of_gpt_oss(width) -> None:
    unit, rows, warps, *_, sync, _ = CONFIG[width]
    loops = 2 if width == 16 else 1  # short slots have one of 8 columns
    for kernel in build(width):
        check_grid_is_resident(kernel, width)
        mma = [i for i, text in enumerate(kernel.sass) if "HMMA." in text or "HGMMA." in text]
        wide = "HMMA.16816.F32.BF16" if sync else f"HGMMA.64x{width}x16.F32.BF16"
        assert len(mma) == kernel.count(wide) == 4 * unit * (rows // 16 // warps) * (width // 8 + loops - 1 if sync else 1)
        assert (mma[-1] - mma[0]) / loops / (unit * rows * 64 / (32 * warps)) < SLOTS[width]
        assert kernel.count("WARPGROUP.DEPBAR") <= unit and kernel.count("ACQBULK") == 1


@pytest.mark.parametrize(
    ("width", "hidden", "inner", "big"), [(8, 256, 128, False), (32, 128, 64, False), (8, 2880, 2880, True)]
)
def test_other_shapes_and_big_scales(width, hidden, inner, big) -> None:
    for kernel in build(width, hidden, inner, big):
        check_grid_is_resident(kernel, width)
