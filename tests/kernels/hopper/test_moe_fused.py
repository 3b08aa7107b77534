"""experts_fused against the twin, by test_moe's checks: batches, shapes, large scales, no tokens; what breaks it is noticed."""

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from simplellm.kernels.hopper import moe_fused
from simplellm.kernels.hopper.moe_fused import PLAN, Plan
from tests.kernels.hopper.bench_moe import watched
from tests.kernels.hopper.check import broken
from tests.kernels.hopper.routes import make_route, poisoned
from tests.kernels.hopper.test_moe import BF16, LIMIT, Layer, check, make_layer

pytestmark = pytest.mark.gpu


def checked(layer: Layer, batch: int, plan: Plan = PLAN, module: ModuleType = moe_fused) -> None:
    """test_moe's check, the first time with an eye on the clock: a wait that does not end must not hold the card."""

    def run(*args: Any) -> torch.Tensor:
        return watched(f"{plan} batch {batch}", partial(module.experts_fused, *args, plan))

    ops = SimpleNamespace(experts_small=run, workspace=lambda device: (None, module.counters(device)))
    check(ops, layer, batch)


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 32])
@pytest.mark.parametrize("num_experts", [32, 128])
def test_the_shapes_of_gpt_oss(num_experts: int, batch: int) -> None:
    checked(make_layer(num_experts, 2880, 2880), batch)


@pytest.mark.parametrize("batch", [1, 3])
def test_units_of_16_rows(batch: int) -> None:
    checked(make_layer(32, 2880, 2880), batch, Plan(1, 16, 6, 1))


@pytest.mark.parametrize(("hidden", "inner", "batch"), [(256, 128, 1), (256, 128, 3), (256, 128, 8), (128, 64, 8)])
def test_small_models(hidden: int, inner: int, batch: int) -> None:
    """Fewer units than CTAs, waits for units of the same round, experts with up to 8 rows."""
    checked(make_layer(8, hidden, inner), batch)


def test_big_scales() -> None:
    checked(make_layer(8, 256, 128, big=True), 3)


def test_no_tokens() -> None:
    layer = make_layer(8, 256, 128)
    route = make_route(torch.zeros(0, 4, dtype=torch.int64, device="cuda"), torch.zeros(0, 4, device="cuda"), 8, 2)
    with poisoned():
        y = torch.zeros(2, 256, dtype=BF16, device="cuda")
        parts = watched("no tokens", partial(moe_fused.experts_fused, y, route, *layer.streams, LIMIT))
    assert parts.isnan().all() and not moe_fused.counters(y.device).any()


BREAKS = {
    "gate and up swapped": ("gates, ups = y", "ups, gates = y"),
    "no bias": ("sums.load(L5), 0) + bias", "sums.load(L5), 0)"),
    "no routing weight": ("(y * gate)", "y"),
    "warps' sums lost": ("gl.sum(sums.load(L5), 0)", "gl.max(sums.load(L5), 0)"),
    "down does not wait": ("_wait_for(count_ptr + slot, UP)", "_wait_for(count_ptr + slot, 0)"),
    "counters not reset": ("count_ptr + s + 0 * thread, 0,", "count_ptr + s + 0 * thread, 9,"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_kernel_is_noticed(what: str) -> None:
    with pytest.raises(AssertionError):
        checked(make_layer(8, 256, 128), 3, PLAN, broken(moe_fused, *BREAKS[what]))
