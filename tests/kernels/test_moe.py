"""MXFP4 bytes, the router and the experts against the published values and plain loops."""

import math

import pytest
import torch

from simplellm import kernels
from simplellm.kernels.moe import dequantise, swiglu

BF16 = torch.bfloat16


def random(seed=0):
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=g).to(BF16)


def packed(num_experts, rows, columns, seed=0):
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (num_experts, rows, columns // 32, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(118, 126, (num_experts, rows, columns // 32), generator=g, dtype=torch.uint8)
    return blocks, scales


def unpack(blocks, scales):
    """[N, K] by the definition: low nibble first, sign bit, E2M1 code, E8M0 scale."""
    codes, rows = [0, 0.5, 1, 1.5, 2, 3, 4, 6], []
    for row, exponents in zip(blocks.tolist(), scales.tolist(), strict=True):
        nibbles = [[half for byte in group for half in (byte & 15, byte >> 4)] for group in row]
        signed = [[(-1 if n & 8 else 1) * codes[n & 7] for n in group] for group in nibbles]
        rows.append([v * 2.0 ** (e - 127) for group, e in zip(signed, exponents, strict=True) for v in group])
    return torch.tensor(rows, dtype=torch.float64)


def test_nibble_order_and_scale_bias() -> None:
    """Pitfall 12: bytes 0x12, 0xF7 under scale 128 are 2, 1, 12, -12."""
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 0, 1] = 0x12, 0xF7
    values = dequantise(blocks, torch.tensor([[128]], dtype=torch.uint8))
    assert values[0, :4].tolist() == [2, 1, 12, -12] and not values[0, 4:].any()


def test_every_byte_under_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16).repeat(16, 1, 1)[:255]
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    assert torch.equal(dequantise(blocks, scales), unpack(blocks, scales))


def test_scales_are_read_at_their_place_only() -> None:
    """Case n01: what lies around the scale table in memory, 0xff or 0x00, does not show."""
    blocks, scales = packed(1, 64, 96)
    results = []
    for poison in (0xFF, 0x00):
        buffer = torch.full((66, 5), poison, dtype=torch.uint8)
        view = buffer[1:-1, 1:-1]
        view.copy_(scales[0])
        results.append(dequantise(blocks[0], view))
    assert torch.equal(*results) and results[0].isfinite().all()


@pytest.mark.parametrize(
    ("gate", "up", "want"),
    [(1, 1, 1.691591532), (8, -9, -41.99971877), (-3, 0.5, -0.027106965), (0.5, -1, 0), (-10, 7.5, -0.000003246)],
)
def test_swiglu_values(gate, up, want) -> None:
    """Pitfalls 8 and 9: interleaved, clamped above for the gate, on both sides for up."""
    got = swiglu(torch.tensor([[gate, up, 0, 0]], dtype=torch.float64), 7.0)
    assert got[0].tolist() == [pytest.approx(want, rel=1e-6, abs=1e-9), 0]


def test_router_takes_the_best_and_ties_to_the_lower_index() -> None:
    """Pitfall 13: equal bfloat16 logits are frequent; softmax over the chosen ones only."""
    weight = torch.zeros(8, 32, dtype=BF16)
    bias = torch.tensor([1, 3, 3, 0, 3, 2, 3, 3], dtype=BF16)
    experts, weights = kernels.router(random()(5, 32), weight, bias, 4)
    assert experts.tolist() == [[1, 2, 4, 6]] * 5 and weights.tolist() == [[0.25] * 4] * 5
    experts, weights = kernels.router(torch.zeros(1, 32), weight, torch.tensor([0, 5, 1, 4, 2, 3, 0, 0], dtype=BF16), 4)
    total = sum(math.exp(z) for z in (5, 4, 3, 2))
    assert experts.tolist() == [[1, 3, 5, 4]]
    assert weights[0].tolist() == pytest.approx([math.exp(z) / total for z in (5, 4, 3, 2)], rel=1e-6)


def expert_loops(x, experts, weights, gate_up, down, limit):
    rows = torch.zeros(x.shape, dtype=torch.float64)
    first, second = ([unpack(b, s) for b, s in zip(*side[:2], strict=True)] for side in (gate_up, down))
    for t in range(len(x)):
        for e, share in zip(experts[t].tolist(), weights[t].tolist(), strict=True):
            h = first[e] @ x[t].double() + gate_up[2][e].double()
            a = torch.zeros(len(h) // 2, dtype=torch.float64)
            for i in range(len(a)):
                g, u = min(float(h[2 * i]), limit), max(-limit, min(float(h[2 * i + 1]), limit))
                a[i] = g / (1 + math.exp(-1.702 * g)) * (u + 1)
            a = a.to(x.dtype).double()
            y = share * (second[e] @ a + down[2][e].double())
            rows[t] += y.to(x.dtype).double()
    return rows.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_experts(dtype) -> None:
    """Pitfall 10: random biases, each added once, before the routing weight; rounded where the model rounds."""
    rand = random()
    gate_up, down = (*packed(6, 128, 96), rand(6, 128)), (*packed(6, 96, 64, seed=1), rand(6, 96))
    x = rand(5, 96).to(dtype)
    experts, weights = kernels.router(x, rand(6, 96), rand(6), 4)
    got = kernels.experts(x, (experts, weights), gate_up, down, 7.0).double().sum(1).to(dtype)
    want = expert_loops(x, experts, weights, gate_up, down, 7.0)
    assert torch.allclose(got.double(), want.double(), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert (got == want).float().mean() > 0.95


@pytest.mark.parametrize("broken", ["halves", "no bias", "no clamp", "swapped nibbles"])
def test_a_broken_expert_is_noticed(broken, monkeypatch: pytest.MonkeyPatch) -> None:
    rand = random()
    gate_up, down = (*packed(4, 128, 96), rand(4, 128)), (*packed(4, 96, 64, seed=1), rand(4, 96))
    x, experts, weights = 4 * rand(3, 96).float(), torch.arange(4).expand(3, 4), torch.full((3, 4), 0.25)
    want = expert_loops(x, experts, weights, gate_up, down, 7.0)
    if broken == "halves":
        order = torch.arange(128).view(2, 64).T.flatten()
        gate_up = tuple(part[:, order] for part in gate_up)
    elif broken == "no bias":
        gate_up = (*gate_up[:2], torch.zeros_like(gate_up[2]))
    elif broken == "swapped nibbles":
        gate_up = (gate_up[0] >> 4 | gate_up[0] << 4, *gate_up[1:])
    got = kernels.experts(x, (experts, weights), gate_up, down, math.inf if broken == "no clamp" else 7.0).sum(1)
    assert not torch.allclose(got, want, rtol=1e-2)
