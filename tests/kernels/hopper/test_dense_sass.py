"""What the dense kernels compile to: whole-row loads, no shuffles to make fragments, no spills, registers as planned."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from simplellm.kernels.hopper import dense  # noqa: E402
from simplellm.kernels.hopper.launch import Compiled, compiling  # noqa: E402
from tests.kernels.hopper.test_dense import make_qkv  # noqa: E402

BF16 = torch.bfloat16
SHAPES = {"linear": (2880, 4096), "logits": (201088, 2880)}


def build(kind: str, num_tokens: int) -> Compiled:
    with compiling() as built:
        if kind == "qkv":
            make_qkv("120b", num_tokens, 4, "meta").call(dense.norm_qkv)
        else:
            weight = torch.empty(SHAPES[kind], device="meta", dtype=BF16)
            x = weight.new_empty(num_tokens, weight.shape[1])
            if kind == "linear":
                dense.linear(x, weight, weight.new_empty(len(weight)))
            else:
                dense.lm_head(x, weight)
    (kernel,) = built
    assert f"dense_{kind}".encode() in kernel._cubin  # the name that profiles show
    assert kernel.stack == 0 and kernel.count("LDL|STL") == 0
    return kernel


def resident(kernel: Compiled) -> int:
    """CTAs that a multiprocessor has registers, shared memory and threads for."""
    registers = -(-kernel.registers // 8) * 8 * kernel.num_warps * 32
    return min(65536 // registers, (228 << 10) // (kernel.shared + 1024), 64 // kernel.num_warps)


@pytest.mark.parametrize(
    ("kind", "num_tokens", "loads", "per_sm"),
    [
        ("qkv", 1, 24, 1),
        ("qkv", 2, 24, 2),
        ("linear", 1, 32, 2),
        ("linear", 2, 32, 2),
        ("logits", 1, 12, 2),
        ("logits", 2, 12, 2),
    ],
)
def test_gemv(kind: str, num_tokens: int, loads: int, per_sm: int) -> None:
    """A piece of a row is a load: 12 of 1440 words, 16 of 2048; those of the next tile again where the CTA loops.

    A word is unpacked (2 instructions), as is each token's (2), and multiplied (2): with all the rest, at most 5 and 5 a token.
    """
    kernel = build(kind, num_tokens)
    words = 4 * (16 if kind == "linear" else 12)
    assert len(kernel.sass) < words * (5 + 5 * num_tokens) + (450 * num_tokens if kind == "qkv" else 0)
    assert kernel.count(r"LDG\.E\.EF\.128") == loads and kernel.count(r"LDG\.E\.EF") == loads
    assert resident(kernel) >= per_sm


@pytest.mark.parametrize(
    ("kind", "num_tokens", "mmas", "per_sm"),
    [("linear", 8, 16 * 4, 2), ("linear", 16, 16 * 8, 1), ("logits", 8, 12 * 8, 1), ("logits", 16, 12 * 16, 1)],
)
def test_ring(kind: str, num_tokens: int, mmas: int, per_sm: int) -> None:
    """A stage of a warp is 64 k: 4 MMAs for 16 rows and 8 tokens, their weights 16 bytes a lane and load."""
    kernel = build(kind, num_tokens)
    assert kernel.count("HMMA.16816.F32.BF16") == mmas
    assert kernel.count("LDS.128") >= mmas // 2
    assert kernel.count("UTMALDG") > 0
    assert kernel.count("SHFL") == 0
    assert resident(kernel) >= per_sm
