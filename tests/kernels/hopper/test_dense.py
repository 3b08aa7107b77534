"""The dense projections against the twins, by every kernel, on both sides of every threshold."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from simplellm.kernels.layer import norm_qkv_ref
from simplellm.kernels.linear import linear_ref
from simplellm.kernels.lm_head import lm_head_ref
from simplellm.kernels.spans import Spans, Work
from tests.kernels.hopper.check import broken, close

pytest.importorskip("triton")
from simplellm.kernels.hopper import dense, dense_gemv, dense_ring, dense_rope  # noqa: E402
from simplellm.kernels.hopper.launch import compiling  # noqa: E402

pytestmark = pytest.mark.gpu
BF16, EPS = torch.bfloat16, 1e-5


class Size(NamedTuple):
    hidden: int
    q_heads: int
    kv_heads: int
    vocab: int


SIZES = {"120b": Size(2880, 64, 8, 201088), "builtin": Size(256, 8, 1, 1536), "test": Size(128, 8, 1, 320)}
QKV = [("120b", n) for n in (1, 2, 3, 8, 64, 300, 1024)] + [(size, n) for size in ("builtin", "test") for n in (1, 2, 3, 65)]
FEW, MANY = (1, 2, 3, 8), (9, 16, 17)
LINEAR = [("120b", n) for n in (*FEW, *MANY, 65)] + [(size, n) for size in ("builtin", "test") for n in (1, 3, 16, 33)]
LOGITS = [("120b", n) for n in (*FEW, *MANY)] + [(size, n) for size in ("builtin", "test") for n in (1, 3, 16, 300, 1024)]


class Qkv(NamedTuple):
    """Arguments of norm_qkv, for spans whose rows take turns; the tokens beyond num_tokens are padding."""

    x: torch.Tensor
    parts: torch.Tensor | None
    gain: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    rope: torch.Tensor
    spans: Spans
    pages: torch.Tensor
    kv: torch.Tensor
    num_tokens: int  # that are real

    def call(self, function, dtype: torch.dtype = BF16, num_tokens: int | None = None):  # type: ignore[no-untyped-def]
        """(x, q, kv) of `function` in dtype, for the first num_tokens only if given: the twins append every token."""
        spans = self.spans
        if num_tokens is not None:
            spans = Spans(spans.rows[:num_tokens], spans.positions[:num_tokens])
        parts = None if self.parts is None else self.parts[:num_tokens].to(dtype)
        kv = self.kv.to(dtype).clone() if num_tokens is not None else self.kv
        x, gain = self.x[:num_tokens].to(dtype), self.gain.to(dtype)
        new, q = function(x, parts, gain, EPS, (self.weight,), (self.bias,), self.rope, spans, self.pages, kv)
        return new, q, kv


def make_qkv(name: str, total: int, num_parts: int, device: str = "cuda", num_tokens: int | None = None) -> Qkv:
    """A quarter of the tokens are padding if num_tokens is not given."""
    size = SIZES[name]
    torch.manual_seed(total)
    width = 64 * (size.q_heads + 2 * size.kv_heads)

    def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * std).to(BF16)

    def ints(values: torch.Tensor) -> torch.Tensor:
        return values.to(device, torch.int32)

    num_tokens = total - total // 4 if num_tokens is None else num_tokens
    token = torch.arange(total) * (torch.arange(total) < num_tokens)
    rows = token % 5
    positions = (torch.tensor([131, 1, 250, 127, 700])[rows] + token // 5) * (torch.arange(total) < num_tokens)
    angle = torch.arange(1024)[:, None] * 0.7 ** torch.arange(32)
    pool = torch.full((3, 2, 44, size.kv_heads, 128, 64), torch.nan, dtype=BF16, device=device)
    counts = ints(torch.tensor([num_tokens, 0, 0, 0, 0, 0, 0, 0]))
    return Qkv(
        draw(total, size.hidden, std=3), draw(total, num_parts, size.hidden) if num_parts else None,
        1 + draw(size.hidden, std=0.3), draw(width, size.hidden, std=size.hidden**-0.5), draw(width),
        (torch.stack([angle.cos(), angle.sin()], 1) * 1.35).to(device),
        Spans(ints(rows), ints(positions), None, Work(counts, ints(torch.empty(0, 6)), ints(torch.empty(0, 4)))),
        ints(torch.randperm(43)[:40].view(5, 8) + 1), pool[1], num_tokens,
    )  # fmt: skip


def check_qkv(module: ModuleType, name: str, total: int, num_parts: int = 4, num_tokens: int | None = None) -> None:
    """Poison must stay in every slot but the real tokens': K and V compare equal as masks, close as values."""
    given = make_qkv(name, total, num_parts, num_tokens=num_tokens)
    n = given.num_tokens
    want, plain = given.call(norm_qkv_ref, torch.float32, n), given.call(norm_qkv_ref, BF16, n)
    new, q, kv = given.call(module.norm_qkv)
    assert torch.equal(kv.isnan(), plain[2].isnan())
    if num_parts:
        close(new[:n], want[0], plain[0])
    else:
        assert torch.equal(new, given.x)
    close(q[:n], want[1], plain[1])
    for kind in range(2):
        written = ~plain[2][kind].isnan()
        close(kv[kind][written], want[2][kind][written], plain[2][kind][written])


def check_linear(module: ModuleType, name: str, total: int) -> None:
    size = SIZES[name]
    torch.manual_seed(total)
    x = torch.randn(total, 64 * size.q_heads, device="cuda", dtype=BF16)
    weight = (torch.randn(size.hidden, 64 * size.q_heads, device="cuda") / 8 / size.q_heads**0.5).to(BF16)
    bias = torch.randn(size.hidden, device="cuda", dtype=BF16)
    got = module.linear(x, weight, bias)
    close(got, linear_ref(x.float(), weight, bias), linear_ref(x, weight, bias))
    assert torch.equal(module.linear(x, weight, bias), got)  # sums in a fixed order


def check_logits(module: ModuleType, name: str, total: int) -> None:
    """The error of float32 sums of H products, each of which may lose a last bit."""
    size = SIZES[name]
    torch.manual_seed(total)
    x = torch.randn(total, size.hidden, device="cuda", dtype=BF16)
    weight = (torch.randn(size.vocab, size.hidden, device="cuda") / size.hidden**0.5).to(BF16)
    got, want = module.lm_head(x, weight), lm_head_ref(x.float(), weight)
    assert got.dtype == torch.float32 and not got.isnan().any()
    assert float((got - want).norm() / want.norm()) < size.hidden * 2**-23


def build(op: str, name: str, total: int) -> None:
    """Compile what a test will launch, into Triton's cache."""
    size = SIZES[name]
    with compiling():
        if op == "qkv":
            given = make_qkv(name, total, 4, "meta")
            given.call(dense.norm_qkv)
        elif op == "linear":
            weight = torch.empty(size.hidden, 64 * size.q_heads, device="meta", dtype=BF16)
            dense.linear(weight.new_empty(total, weight.shape[1]), weight, weight.new_empty(size.hidden))
        else:
            weight = torch.empty(size.vocab, size.hidden, device="meta", dtype=BF16)
            dense.lm_head(weight.new_empty(total, size.hidden), weight)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Side by side, as a kernel takes seconds."""
    cases = [("qkv", *c) for c in QKV] + [("linear", *c) for c in LINEAR] + [("logits", *c) for c in LOGITS]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(build, *case) for case in reversed(cases)]:
            done.result()


@pytest.mark.parametrize(("name", "total"), QKV)
def test_norm_qkv(name: str, total: int) -> None:
    check_qkv(dense, name, total)


@pytest.mark.parametrize("total", [1, 2, 8])
def test_norm_qkv_without_parts(total: int) -> None:
    check_qkv(dense, "test", total, 0)


def test_norm_qkv_of_one_part() -> None:
    check_qkv(dense, "test", 1, 1)


@pytest.mark.parametrize("name", ["120b", "test"])
def test_norm_qkv_of_a_token_and_padding(name: str) -> None:
    check_qkv(dense, name, 2, num_tokens=1)


@pytest.mark.parametrize(("name", "total"), LINEAR)
def test_linear(name: str, total: int) -> None:
    check_linear(dense, name, total)


@pytest.mark.parametrize(("name", "total"), LOGITS)
def test_lm_head(name: str, total: int) -> None:
    check_logits(dense, name, total)


FAULTS = {  # of gemv_kernel
    "no bias": ("y0 += found[0].to(gl.float32)", "y0 += 0.0"),
    "words dropped": ("column < K // 2 - j * PIECE)", "column < K // 2 - j * PIECE - 8)"),
    "pairs turned backwards": ("y0 * cos - y1 * sin", "y0 * cos + y1 * sin"),
    "halves swapped": ("gl.store(to_q, z0,", "gl.store(to_q, z1,"),
    "append off by one": ("position % 128) * 64", "(position + 1) % 128) * 64"),
    "no gain": ("* scale * gain.to(gl.float32)", "* scale"),
    "a part left out": ("static_range(PARTS)", "static_range(PARTS - 1)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_rejects_a_broken_gemv(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "dense_gemv", broken(dense_gemv, *FAULTS[fault]))
    with pytest.raises(AssertionError):
        check_qkv(dense, "test", 1)


@pytest.mark.parametrize(
    ("old", "new", "num_tokens"),
    [
        ("t < num_tokens", "t < num_tokens + 1", 1),
        ("xs.index(t).slice", "xs.index(0).slice", 2),
    ],
)
def test_the_check_rejects_a_broken_gemv_of_two(old: str, new: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "dense_gemv", broken(dense_gemv, old, new))
    with pytest.raises(AssertionError):
        check_qkv(dense, "test", 2, num_tokens=num_tokens)


def test_the_check_rejects_a_gemv_that_repeats_its_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    old = "words = _point(w_ptr, this + gl.num_programs(0),"
    monkeypatch.setattr(dense, "dense_gemv", broken(dense_gemv, old, "words = _point(w_ptr, this,"))
    with pytest.raises(AssertionError):
        check_qkv(dense, "120b", 1)


RING_FAULTS = {
    "no bias": ("y0 + b0.to(gl.float32)", "y0"),
    "half the rows twice": ("[row + HALF, k]", "[row, k]"),
    "k dropped": ("(n < tokens) & (k < K)", "(n < tokens) & (k < K - 64)"),
    "k in the wrong order": ("permute([0, 3, 4, 5, 2, 6, 1])", "permute([0, 4, 3, 5, 2, 6, 1])"),
}


@pytest.mark.parametrize("fault", RING_FAULTS)
def test_the_check_rejects_a_broken_ring(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "dense_ring", broken(dense_ring, *RING_FAULTS[fault]))
    with pytest.raises(AssertionError):
        check_linear(dense, "test", 8)


def test_the_check_rejects_a_ring_that_repeats_its_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_ring = broken(dense_ring, "row = tile * ROWS + p", "row = first * ROWS + p")
    monkeypatch.setattr(dense, "dense_ring", broken_ring)
    with pytest.raises(AssertionError):
        check_linear(dense, "120b", 16)


@pytest.mark.parametrize(
    ("module", "old", "new", "total"),
    [
        (dense_gemv, "low * _low(x) + high * _high(x)", "low * _low(x)", 2),
        (dense_ring, "gl.store(out + HALF, y1,", "gl.store(out + HALF, y0,", 16),
    ],
)
def test_the_check_rejects_broken_logits(
    module: ModuleType, old: str, new: str, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, module.__name__.split(".")[-1], broken(module, old, new))
    with pytest.raises(AssertionError):
        check_logits(dense, "test", total)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b * cos + a * sin", "b * cos - a * sin"),
        ("position % 128) * 64", "(position + 1) % 128) * 64"),
        ("inside & real &", "inside &"),
    ],
)
def test_the_check_rejects_a_broken_rope(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "rope_append", broken(dense_rope, old, new).rope_append)
    with pytest.raises(AssertionError):
        check_qkv(dense, "test", 65)
