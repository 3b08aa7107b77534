"""experts_large on a GPU against its twin: every variant, ragged and skewed experts, padded tokens, other models' sizes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from simplellm.kernels.moe import experts_ref
from tests.kernels.hopper.check import broken, close

pytest.importorskip("triton")

from simplellm.kernels.hopper import moe_prefill  # noqa: E402
from simplellm.kernels.hopper.pack import Kind, Stream, pack  # noqa: E402
from simplellm.kernels.hopper.router import Route  # noqa: E402

pytestmark = pytest.mark.gpu
LIMIT = 7.0
BIG, SMALL, TINY = (2880, 2880), (256, 128), (128, 64)  # H, I of gpt-oss, of the built-in model, of the tests' model
POISON = 2**30  # what a list holds beyond its end: as an address it is nowhere


class Layer:
    """Random experts, as the checkpoint has them and packed. `top`: the largest scale byte."""

    def __init__(self, num_experts: int, hidden: int, inner: int, top: int = 121, seed: int = 0):
        self.num_experts, self.hidden = num_experts, hidden
        self.random = torch.Generator("cuda").manual_seed(seed)
        self.gate_up, self.w1 = self._matrix("gate_up", 2 * inner, hidden, top)
        self.down, self.w2 = self._matrix("down", hidden, inner, top)

    def _matrix(self, kind: Kind, rows: int, columns: int, top: int) -> tuple[tuple[torch.Tensor, ...], Stream]:
        def bytes_(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=self.random, dtype=torch.uint8, device="cuda")

        blocks = bytes_(0, 256, self.num_experts, rows, columns // 32, 16)
        scales = bytes_(top - 5, top + 1, self.num_experts, rows, columns // 32)
        bias = torch.randn(self.num_experts, rows, generator=self.random, device="cuda").bfloat16()
        return (blocks, scales, bias), pack(kind, blocks, scales, bias)

    def tokens(self, num_tokens: int, padding: int = 0, skew: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """y, experts [T, 4] and their weights; `skew` draws everybody to expert 3 and away from the last one."""
        y = torch.randn(num_tokens + padding, self.hidden, generator=self.random, device="cuda").bfloat16()
        score = torch.randn(num_tokens, self.num_experts, generator=self.random, device="cuda")
        score[:, 3] += skew
        score[:, -1] -= skew
        weights, experts = score.topk(4)
        return y, experts, weights.softmax(-1).bfloat16()


def route(experts: torch.Tensor, weights: torch.Tensor, num_experts: int, padding: int) -> Route:
    """What the router's kernel leaves, made by torch."""
    pair = experts.flatten().argsort(stable=True)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device="cuda")
    offsets[1:] = experts.flatten().bincount(minlength=num_experts).cumsum(0)

    def padded(x: torch.Tensor, poison: float) -> torch.Tensor:
        return torch.cat([x, x.new_full((4 * padding,), poison)])

    return Route(
        offsets,
        padded((pair // 4).int(), POISON),
        padded(pair.int(), POISON),
        padded(weights.flatten()[pair].float(), float("nan")),
        torch.tensor([len(experts)], dtype=torch.int32, device="cuda"),
        None,
        0,
    )


def poison_free_memory(num_elements: int) -> None:
    """What the next `torch.empty` of about this size returns holds NaN."""
    torch.empty(3 * num_elements, dtype=torch.bfloat16, device="cuda").fill_(float("nan"))


def check(module: ModuleType, layer: Layer, num_tokens: int, padding: int = 0, skew: float = 0.0) -> None:
    y, experts, weights = layer.tokens(num_tokens, padding, skew)
    at = route(experts, weights, layer.num_experts, padding)
    poison_free_memory(4 * y.numel())
    got, again = (module.experts_large(y, at, layer.w1, layer.w2, LIMIT) for _ in range(2))
    assert got.shape == (len(y), 4, layer.hidden) and torch.equal(got[:num_tokens], again[:num_tokens])
    choices, real = (experts, weights), y[:num_tokens]
    want, plain = (experts_ref(x, choices, layer.gate_up, layer.down, LIMIT) for x in (real.float(), real))
    close(got[:num_tokens], want, plain)


@pytest.fixture(scope="module")
def layers() -> Callable[[int, tuple[int, int]], Layer]:
    made: dict[tuple[int, tuple[int, int]], Layer] = {}

    def layer(num_experts: int, size: tuple[int, int]) -> Layer:
        if (num_experts, size) not in made:
            made[num_experts, size] = Layer(num_experts, *size)
        return made[num_experts, size]

    return layer


@pytest.mark.parametrize(
    ("num_experts", "num_tokens", "columns"),
    [(8, 65, 64), (8, 300, 128), (8, 2048, 256), (32, 65, 64), (32, 300, 64), (32, 700, 128), (32, 6400, 256)],
)
def test_like_the_twin(layers, num_experts: int, num_tokens: int, columns: int) -> None:
    assert moe_prefill.variant(4 * num_tokens / num_experts).columns == columns
    check(moe_prefill, layers(num_experts, BIG), num_tokens)


@pytest.mark.parametrize(("num_tokens", "padding"), [(65, 0), (1, 99), (100, 12)])
@pytest.mark.parametrize("size", [SMALL, TINY])
def test_other_sizes_and_padded_tokens(layers, size: tuple[int, int], num_tokens: int, padding: int) -> None:
    check(moe_prefill, layers(8, size), num_tokens, padding)


def test_no_tokens(layers) -> None:
    layer = layers(8, SMALL)
    y, experts, weights = layer.tokens(0, padding=80)
    moe_prefill.experts_large(y, route(experts, weights, 8, 80), layer.w1, layer.w2, LIMIT)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("num_experts", "num_tokens"), [(32, 300), (32, 2000)])
def test_one_expert_gets_all_and_some_none(layers, num_experts: int, num_tokens: int) -> None:
    check(moe_prefill, layers(num_experts, BIG), num_tokens, padding=7, skew=100.0)


def test_scales_above_two() -> None:
    layer = Layer(8, *TINY, top=131)
    assert layer.w1.big and layer.w2.big
    check(moe_prefill, layer, 90)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y_ptr + token[:, None] * H", "y_ptr + p[:, None] // 4 * H"),
        ("tl.minimum(end - row, COLUMNS)", "tl.minimum(end - row, 32)"),
        ("tl.store(entry, pid,", "tl.store(entry, pid // 2,"),
    ],
)
def test_the_check_rejects_broken_lists(layers, old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check(broken(moe_prefill, old, new), layers(8, SMALL), 100)


@pytest.mark.parametrize(
    ("old", "new"), [("_store(acc + shift[:, None]", "_store(acc"), ("b = xs.index(stage)", "b = xs.index(0)")]
)
def test_the_check_rejects_broken_products(layers, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.setattr(moe_prefill, "kernel", broken(moe_prefill.kernel, old, new))
    with pytest.raises(AssertionError):
        check(moe_prefill, layers(8, SMALL), 100)
