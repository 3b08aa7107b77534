"""norm_router compiles for sm_90: one launch, without spills, for few tokens; MMA for many."""

import pytest
import torch

from simplellm.kernels.hopper.launch import Compiled, compiling
from simplellm.kernels.hopper.router import norm_router
from simplellm.kernels.spans import COUNTS, Spans, Work


def build(num_tokens: int, num_experts: int) -> list[Compiled]:
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    whole = meta(num_tokens, dtype=torch.int32)
    spans = Spans(whole, whole, None, Work(meta(COUNTS, dtype=torch.int32), whole, whole))
    x, parts, gain = meta(num_tokens, 2880), meta(num_tokens, 4, 2880), meta(2880)
    with compiling() as built:
        norm_router(x, parts, gain, 1e-5, meta(num_experts, 2880), meta(num_experts), 4, spans)
    return built


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(8, 32), (8, 128), (64, 128)])
def test_few_tokens(num_tokens, num_experts) -> None:
    (kernel,) = build(num_tokens, num_experts)
    assert kernel.registers * 32 * kernel.num_warps <= 65536 and kernel.shared <= 65536
    assert kernel.count("LDL|STL") <= 4  # of a tile of four tokens ptxas spills two registers, once
    assert kernel.count("ATOM") == 1 and kernel.count("ACQBULK") == 1


def test_many_tokens() -> None:
    _, logits, lists = build(1000, 128)
    assert logits.count("HGMMA|HMMA") >= 4 and logits.count("ACQBULK") == 1
    assert logits.stack == 0 and lists.stack == 0
