"""What the dense kernels compile to: 16-byte weight loads, no shuffles to make fragments, no spills, registers as planned."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from simplellm.kernels.hopper import dense  # noqa: E402
from simplellm.kernels.hopper.launch import Compiled, compiling  # noqa: E402
from tests.kernels.hopper.test_dense import make_qkv  # noqa: E402

BF16 = torch.bfloat16


def stream(built: list[Compiled]) -> Compiled:
    return next(kernel for kernel in built if kernel.name == "dense_kernel")


def check(kernel: Compiled, loads: int, mmas: int, per_sm: int) -> None:
    assert kernel.stack == 0 and kernel.count("LDL|STL") == 0
    assert kernel.count(r"LDG\.E\.EF\.128") == loads and kernel.count(r"LDG\.E\.EF") == loads
    assert kernel.count("HMMA.16816.F32.BF16") == mmas
    assert kernel.count("LDS.128") >= mmas // 4  # a B fragment of two steps
    assert kernel.registers * kernel.num_warps * 32 * per_sm <= 65536
    assert (kernel.shared + 1024) * per_sm <= 228 << 10


def test_qkv_of_one_token() -> None:
    """90 blocks of k over 8 warps are 12 a warp; 32 rows are 4 loads and 4 MMAs a block."""
    with compiling() as built:
        make_qkv("120b", 1, 4, "meta").call(dense.norm_qkv)
    check(stream(built), 48, 48, 2)


def test_o_of_eight_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 blocks of k over 8 warps; 16 rows: 2 loads, 2 MMAs, 16 weights of a lane a block."""
    monkeypatch.setattr(dense, "MAX_STREAMED", 8)
    with compiling() as built:
        weight = torch.empty(2880, 4096, device="meta", dtype=BF16)
        dense.linear(weight.new_empty(8, 4096), weight, weight.new_empty(2880))
    check(stream(built), 32, 32, 3)
    assert stream(built).count("SHFL") == 0
    assert len(stream(built).sass) < 2 * (16 * 16)  # instructions per weight, prologue and epilogue included


def test_lm_head_of_eight_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first unit's loads, then the loop's."""
    monkeypatch.setattr(dense, "MAX_STREAMED_LOGITS", 8)
    with compiling() as built:
        weight = torch.empty(201088, 2880, device="meta", dtype=BF16)
        dense.lm_head(weight.new_empty(8, 2880), weight)
    check(stream(built), 16 + 48, 48, 2)
    assert stream(built).count("SHFL") == 0
