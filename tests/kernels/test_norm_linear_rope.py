"""Norm, projections and rope against their formulas, element by element, and where they round."""

import math
from importlib import import_module

import pytest
import torch

from simplellm import kernels
from simplellm.config import PAGE
from simplellm.kernels import Spans
from simplellm.kernels.rope import inverse_frequencies, rope_append_ref, rotate
from simplellm.model.checkpoint import load_config
from tests.checkpoints import make

BF16, F32 = torch.bfloat16, torch.float32


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


def test_rmsnorm_rounds_once_after_the_gain() -> None:
    """Pitfall 14: float32 then one rounding. Rounding before the gain changes many elements; this changes almost none."""
    x, gain = draw(64, 2880), 1 + draw(2880, seed=1, std=0.1)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    want, early = (scaled * gain.float()).to(BF16), scaled.to(BF16) * gain
    got = kernels.rmsnorm(x, gain, 1e-5)
    assert (got != want).float().mean() < 1e-4
    assert (got != early).float().mean() > 0.05


def test_rmsnorm_uses_eps_inside_the_root() -> None:
    x = torch.full((1, 4), 1e-3)
    assert kernels.rmsnorm(x, torch.ones(4), 1e-5)[0, 0] == pytest.approx(1e-3 / math.sqrt(1e-6 + 1e-5), rel=1e-6)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_linear_adds_the_bias_before_the_one_rounding(dtype: torch.dtype) -> None:
    x, weight, bias = draw(5, 96, dtype=dtype), draw(7, 96, seed=1), draw(7, seed=2)
    want = torch.tensor(
        [[sum(a * b for a, b in zip(row, w, strict=True)) + c for w, c in zip(weight.tolist(), bias.tolist(), strict=True)]
         for row in x.tolist()], dtype=torch.float64,
    )  # fmt: skip
    got = kernels.linear(x, weight, bias)
    assert got.dtype == dtype and torch.equal(got, want.to(dtype))


def test_linear_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(3, 64), draw(100, 64, seed=1)
    whole = kernels.lm_head(x, weight)
    monkeypatch.setattr(import_module("simplellm.kernels.linear"), "WIDE_BYTES", 64 * 8 * 7)
    assert torch.equal(kernels.lm_head(x, weight), whole) and whole.dtype == F32


# Pitfall 1: the values of the published formula in float64, 0 and 9..17 being where a rounded bound shows.
INVERSE = {0: 1, 1: 0.6890443059, 8: 0.05081327482, 9: 0.03170569618, 12: 0.00679495949, 15: 0.001052602101}
INVERSE |= {16: 0.0004564839192, 17: 0.0001293187012, 18: 3.830881237e-05, 24: 4.099978482e-06, 31: 3.023511428e-07}


def test_yarn_frequencies(tmp_path) -> None:
    got = inverse_frequencies(load_config(make(tmp_path, layers=2)))
    for i, want in INVERSE.items():
        assert got[i].item() == pytest.approx(want, rel=2e-6), i


def test_concentration_is_on_q_and_k_both(tmp_path) -> None:
    """Pitfall 3: a logit grows by c^2 with c = 0.1 ln 32 + 1, at equal positions exactly."""
    config = load_config(make(tmp_path, layers=2))
    table = kernels.rope_table(config, 300, torch.device("cpu"))
    q, k = draw(1, 1, 64, dtype=F32), draw(1, 1, 64, dtype=F32, seed=1)
    c = 0.1 * math.log(32) + 1
    for position in (0, 7, 299):
        turned = [rotate(x, table[position : position + 1]).flatten() for x in (q, k)]
        assert (turned[0] @ turned[1]).item() == pytest.approx(c * c * (q.flatten() @ k.flatten()).item(), rel=1e-4)


def test_rotation_pairs_the_halves_and_rounds_every_step(tmp_path) -> None:
    config = load_config(make(tmp_path, layers=2))
    table = kernels.rope_table(config, 64, torch.device("cpu"))
    x = draw(64, 2, 64)
    cos, sin = table[:, 0, None].to(BF16), table[:, 1, None].to(BF16)
    a, b = x[..., :32], x[..., 32:]
    first = ((a.float() * cos.float()).to(BF16).float() - (b.float() * sin.float()).to(BF16).float()).to(BF16)
    second = ((b.float() * cos.float()).to(BF16).float() + (a.float() * sin.float()).to(BF16).float()).to(BF16)
    assert torch.equal(rotate(x, table), torch.cat([first, second], -1))


def test_rope_append_writes_its_slots_and_nothing_else(tmp_path) -> None:
    config = load_config(make(tmp_path, layers=2, heads=4, kv_heads=2))
    table = kernels.rope_table(config, 600, torch.device("cpu"))
    q, k, v = draw(4, 4, 64), draw(4, 2, 64, seed=1), draw(4, 2, 64, seed=2)
    kv = torch.full((2, 5, 2, PAGE, 64), torch.nan, dtype=BF16)
    positions, places = torch.tensor([127, 128, 3, 599]), [(4, 127), (2, 0), (1, 3), (3, 599 % PAGE)]
    pages = torch.zeros(6, 5, dtype=torch.int32)
    rows = torch.tensor([5, 1, 0, 2])
    for row, position, (page, _) in zip(rows, positions, places, strict=True):
        pages[row, position // PAGE] = page
    turned = rope_append_ref(q, k, v, table, Spans(rows, positions), pages, kv)
    assert torch.equal(turned, rotate(q, table[positions]))
    for i, (page, offset) in enumerate(places):
        assert torch.equal(kv[0, page, :, offset], rotate(k, table[positions])[i])
        assert torch.equal(kv[1, page, :, offset], v[i])
        kv[:, page, :, offset] = torch.nan
    assert kv.isnan().all()
