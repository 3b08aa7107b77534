"""norm_router compiles for sm_90 without spills: one launch for few tokens, dots by MMA up to 256 and above."""

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


def test_many_tokens() -> None:
    _, logits, lists = build(1000, 128)
    assert logits.count("HGMMA|HMMA") >= 4 and logits.count("ACQBULK") == 1
    assert logits.stack == 0 and lists.stack == 0


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 128), (8, 128), (16, 32), (64, 32)])
def test_few_tokens_in_one_launch(num_tokens, num_experts) -> None:
    """All loads of x and parts are issued before any is used, where a thread has registers for them."""
    (kernel,) = build(num_tokens, num_experts)
    assert kernel.stack == 0 and kernel.registers * 32 * kernel.num_warps <= 65536 and kernel.shared <= 32768
    assert kernel.count("ACQBULK") == 2 and kernel.count("MEMBAR") == 0
    producer = kernel.sass[: [i for i, line in enumerate(kernel.sass) if "ACQBULK" in line][1]]
    assert len(producer) < (1200 if num_tokens <= 16 else 1800)
    if kernel.num_warps == 4:
        loads = [i for i, line in enumerate(producer) if "LDG.E.128.STRONG" in line]
        assert len(loads) == 15 and loads[-1] - loads[0] < 80


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(100, 32), (64, 128), (256, 128)])
def test_up_to_256_tokens_by_mma(num_tokens, num_experts) -> None:
    """The weights lie in shared memory before the wait; a token's best expert is one instruction of a warp."""
    _, kernel = build(num_tokens, num_experts)
    assert kernel.stack == 0 and kernel.registers * 32 * kernel.num_warps <= 65536 and kernel.count("MEMBAR") == 0
    wait, second = (i for i, line in enumerate(kernel.sass) if "ACQBULK" in line)
    assert sum("STS.128" in line for line in kernel.sass[:wait]) == 12
    assert 12 <= sum("HMMA" in line for line in kernel.sass[wait:second]) <= 24 and second < 500
    assert kernel.count("REDUX") >= 16 or num_experts < 128
