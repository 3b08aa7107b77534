"""The experts' kernels for many tokens as the card will run them: no product waits for another, nothing spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from simplellm.kernels.hopper import moe_prefill  # noqa: E402
from simplellm.kernels.hopper.launch import Compiled, compiling  # noqa: E402
from simplellm.kernels.hopper.moe_prefill import VARIANTS, WIDEST, Variant  # noqa: E402
from simplellm.kernels.hopper.pack import BLOCK_WORDS, Kind, Stream  # noqa: E402
from simplellm.kernels.hopper.router import Route  # noqa: E402

WEIGHTS = 32  # of a block of 64 x 64 in a thread


def built(v: Variant) -> list[Compiled]:
    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def stream(kind: Kind, rows: int) -> Stream:
        words = meta(32, rows // 64, 45, BLOCK_WORDS)
        return Stream(words, meta(32, rows, dtype=torch.float32), False, kind, rows, 2880)

    route = Route(meta(33), meta(8192), meta(8192), meta(8192, dtype=torch.float32), meta(1), None, 0)
    y = meta(2048, 2880, dtype=torch.bfloat16)
    with compiling() as kernels:
        parts = moe_prefill.run(y, route, stream("gate_up", 5760), stream("down", 2880), 7.0, v)
    assert parts.shape == (2048, 4, 2880)
    return kernels


def slots(sass: list[str], unit: int) -> list[float]:
    """Instructions for each weight in the loops over units of blocks: from the first product of a unit to its last."""
    starts = [i for i, text in enumerate(sass) if text.startswith("WARPGROUP.ARRIVE")]
    return [(last - first) / (unit - 1) / WEIGHTS for first, last in zip(starts[::unit], starts[unit - 1 :: unit], strict=True)]


@pytest.mark.parametrize("v", [v for _, v in VARIANTS] + [WIDEST], ids=lambda v: f"{v.columns} columns")
def test_products_are_not_serialised_and_nothing_spills(v: Variant) -> None:
    gather, *products = built(v)
    assert gather.name == "gather" and gather.stack == 0
    for kernel in products:
        assert kernel.stack == 0 and kernel.count(r"LDL|STL|SHFL") == 0
        num_mma = kernel.count("HGMMA")
        assert num_mma > 0 and num_mma % (4 * v.groups * v.unit) == 0
        assert kernel.count(r"WARPGROUP\.ARRIVE") == kernel.count(r"WARPGROUP\.DEPBAR") == num_mma // 4  # once a block
        assert max(slots(kernel.sass, v.unit)) < 3.2
        assert kernel.registers * 128 * (v.groups + 1) <= 65536 and kernel.shared <= 227 << 10
