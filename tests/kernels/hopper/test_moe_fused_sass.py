"""experts_fused compiles for sm_90 as meant: a resident grid, no spills, no more MMAs than needed, few TMA requests."""

import pytest

from simplellm.kernels.hopper.launch import Compiled, compiling
from simplellm.kernels.hopper.moe_fused import PLAN, SHARED_BYTES, Plan, experts_fused
from simplellm.kernels.hopper.router import Route
from tests.kernels.hopper.test_moe_sass import meta, stream, torch


def build(plan: Plan, hidden: int = 2880, inner: int = 2880, big: bool = False) -> Compiled:
    pairs = meta(32)
    route = Route(meta(33), pairs, pairs, meta(32, dtype=torch.float32), meta(1), meta(100), 8)
    y = meta(8, hidden, dtype=torch.bfloat16)
    with compiling() as built:
        experts_fused(y, route, stream("gate_up", 2 * inner, hidden, big), stream("down", hidden, inner, big), 7.0, plan)
    return built[0]


def check_grid_is_resident(kernel: Compiled, plan: Plan) -> None:
    assert kernel.num_warps == plan.warps and kernel.registers * 32 * plan.warps * plan.ctas <= 65536
    assert (kernel.shared + 1024) * plan.ctas <= SHARED_BYTES + 1024  # the system keeps 1 KB a CTA
    assert kernel.stack == 0 and kernel.count("LDL|STL") == 0


@pytest.mark.parametrize("plan", [PLAN, Plan(1, 16, 6, 1)])
def test_the_shapes_of_gpt_oss(plan: Plan) -> None:
    kernel = build(plan)
    check_grid_is_resident(kernel, plan)
    mma = [i for i, text in enumerate(kernel.sass) if "HMMA.16816.F32.BF16" in text]
    blocks = -(-45 // plan.warps)
    assert len(mma) == 4 * plan.groups * blocks
    assert (mma[-1] - mma[0]) / (blocks * plan.groups * 32) < 2.7  # instructions a weight
    assert kernel.count("UTMALDG") == 4 + 2 * plan.depth + 2  # what nobody needs; codes and scales of the first units; the loop
    assert kernel.count("ACQBULK") == 1


@pytest.mark.parametrize("big", [False, True])
def test_a_small_model(big: bool) -> None:
    check_grid_is_resident(build(PLAN, 256, 128, big), PLAN)
