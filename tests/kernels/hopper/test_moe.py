"""experts_small against the twin: batches, skew, ragged shapes, large scales; repeatable; what breaks it is noticed."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from simplellm.kernels.hopper import moe, moe_unpack
from simplellm.kernels.hopper.pack import Stream, pack
from simplellm.kernels.moe import Packed, experts_ref
from tests.kernels.hopper.check import broken, close
from tests.kernels.hopper.routes import make_route, poisoned

LIMIT = 7.0
BF16 = torch.bfloat16
BATCHES = [1, 3, 8, 17, 64, 256]


@dataclass(frozen=True)
class Layer:
    gate_up: Packed
    down: Packed
    streams: tuple[Stream, Stream]


@cache
def make_layer(num_experts: int, hidden: int, inner: int, big: bool = False) -> Layer:
    """Random codes; activations reach both clamps. Big: some scale bytes are above 128, some 0."""
    g = torch.Generator("cuda").manual_seed(num_experts + hidden)

    def packed(rows, columns):
        shape = (num_experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, device="cuda", generator=g)
        scales = torch.randint(119, 124, shape, dtype=torch.uint8, device="cuda", generator=g)
        if big:
            scales[:, ::7, 0] = torch.randint(129, 131, scales[:, ::7, 0].shape, dtype=torch.uint8, device="cuda", generator=g)
            scales[:, ::5, 1] = 0
        return blocks, scales, torch.randn(num_experts, rows, device="cuda", generator=g).to(BF16)

    gate_up, down = packed(2 * inner, hidden), packed(hidden, inner)
    return Layer(gate_up, down, (pack("gate_up", *gate_up), pack("down", *down)))


def check(module, layer: Layer, batch: int, skewed: bool = False) -> None:
    """All of a skewed batch goes to experts 3, 0, 2 and 1. The last of more than two tokens is padding."""
    num_experts, hidden = len(layer.down[0]), layer.down[0].shape[1]
    num = batch - 1 if batch > 2 else batch
    g = torch.Generator("cuda").manual_seed(batch)
    y = torch.randn(batch, hidden, device="cuda", generator=g).to(BF16)
    experts = torch.rand(num, num_experts, device="cuda", generator=g).topk(4).indices
    if skewed:
        experts = torch.tensor([3, 0, 2, 1], device="cuda").expand(num, 4)
    weights = torch.rand(num, 4, device="cuda", generator=g).softmax(-1).to(BF16)
    route = make_route(experts, weights, num_experts, batch)
    with poisoned():
        parts = module.experts_small(y, route, *layer.streams, LIMIT)
        again = module.experts_small(y, route, *layer.streams, LIMIT)
    assert parts.shape == (batch, 4, hidden) and torch.equal(parts[:num], again[:num])
    assert parts[num:].isnan().all(), "rows of padded tokens were written"
    assert not module.workspace(y.device)[1].any()
    chosen = (experts, weights)
    want, plain = (experts_ref(x, chosen, layer.gate_up, layer.down, LIMIT) for x in (y[:num].float(), y[:num]))
    close(parts[:num], want, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_experts", [8, 32, 128])
def test_the_shapes_of_gpt_oss(num_experts, batch) -> None:
    check(moe, make_layer(num_experts, 2880, 2880), batch)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES[2:])
def test_all_tokens_to_four_experts(batch) -> None:
    check(moe, make_layer(32, 2880, 2880), batch, skewed=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inner", "batch"), [(256, 128, 3), (256, 128, 64), (128, 64, 8), (128, 64, 17)])
def test_small_models(hidden, inner, batch) -> None:
    """Ragged last tiles and units, fewer units than CTAs, and each tile cut in pieces."""
    check(moe, make_layer(8, hidden, inner), batch)


@pytest.mark.gpu
def test_as_many_pairs_as_the_120b_takes_at_512_tokens() -> None:
    check(moe, make_layer(128, 2880, 2880), 512)


@pytest.mark.gpu
def test_a_long_slot_taken_for_a_short_one_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check(broken(moe, "if ne_cur <= 8:", "if ne_cur <= 16:"), make_layer(32, 2880, 2880), 64)


@pytest.mark.gpu
def test_big_scales() -> None:
    layer = make_layer(8, 2880, 2880, big=True)
    assert layer.streams[0].big and layer.streams[1].big
    check(moe, layer, 3)


@pytest.mark.gpu
def test_no_tokens() -> None:
    layer = make_layer(8, 128, 64)
    route = make_route(torch.zeros(0, 4, dtype=torch.int64, device="cuda"), torch.zeros(0, 4, device="cuda"), 8, 2)
    with poisoned():
        parts = moe.experts_small(torch.zeros(2, 128, dtype=BF16, device="cuda"), route, *layer.streams, LIMIT)
    assert parts.isnan().all()


BREAKS = {
    "gate and up swapped": (moe_unpack, "g, u = y.reshape", "u, g = y.reshape"),
    "stale scale": (moe_unpack, "s0, _ = gl.broadcast(s0, w)", "s0, _ = gl.broadcast(s1, w)"),
    "no bias": (moe, "y = acc + bias[:, None]", "y = acc"),
    "no routing weight": (moe, "(y * gate[None, :])", "y"),
    "a block dropped": (moe, "for j in gl.static_range(U):", "for j in gl.static_range(1, U):"),
    "other CTAs' parts lost": (moe, "acc += gl.load(part", "acc = acc + 0 * gl.load(part"),
    "counter not reset": (moe, "gl.store(cnt_ptr + c, 0)", "gl.store(cnt_ptr + c, 1)"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_kernel_is_noticed(what) -> None:
    module, old, new = BREAKS[what]
    copy = broken(module, old, new)
    if module is moe_unpack:
        copy = broken(moe, "simplellm.kernels.hopper.moe_unpack", copy.__name__)
    with pytest.raises(AssertionError):
        check(copy, make_layer(8, 256, 128), 3)
