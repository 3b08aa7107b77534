"""norm_router against the twins: exact where sums are exact, ties included, near on random data; its lists exactly."""

import pytest
import torch

from simplellm.kernels.hopper import router, router_few
from simplellm.kernels.norm import rmsnorm_ref
from simplellm.kernels.router import router_ref
from simplellm.kernels.spans import COUNTS, Spans, Work
from tests.kernels.hopper.check import broken, close
from tests.kernels.hopper.routes import make_route, poisoned

BF16 = torch.bfloat16
SIZES = {"20b": (2880, 32), "120b": (2880, 128), "built-in": (256, 8), "test": (128, 8)}  # H, E
LAUNCHES = [("test", 1, 1), ("built-in", 3, 2), ("20b", 1, 1), ("20b", 8, 8), ("20b", 40, 33), ("120b", 64, 64), ("120b", 1, 0)]
LAUNCHES += [
    ("120b", 8, 7),
    ("120b", 16, 16),
    ("120b", 256, 200),
    ("20b", 64, 64),
    ("test", 257, 256),
    ("120b", 512, 500),
    ("120b", 768, 768),
]
LAUNCHES += [("test", 65, 60), ("20b", 256, 250), ("120b", 100, 90), ("120b", 2500, 2400), ("20b", 32768, 32768)]


def spans(num_tokens: int) -> Spans:
    counts = torch.zeros(COUNTS, dtype=torch.int32, device="cuda")
    counts[0] = num_tokens
    nothing = torch.zeros(0, dtype=torch.int32, device="cuda")
    return Spans(nothing, nothing, None, Work(counts, nothing, nothing))


def exact_data(hidden, num_experts, padded, with_parts):
    """x plus the parts is 1 or -1 everywhere, and so is its norm; logits are whole numbers: many equal ones."""
    g = torch.Generator("cuda").manual_seed(padded + num_experts)

    def whole(*shape, size=2):
        return torch.randint(-size, size + 1, shape, device="cuda", generator=g).to(BF16)

    total = 2 * torch.randint(2, (padded, hidden), device="cuda", generator=g).to(BF16) - 1
    parts = whole(padded, 4, hidden) if with_parts else None
    x = total if parts is None else total - parts.float().sum(1).to(BF16)
    return x, parts, total, whole(num_experts, hidden, size=1), whole(num_experts, size=5)


def check_exact(module, size, padded, num, with_parts=True) -> None:
    hidden, num_experts = SIZES[size]
    x, parts, total, w, b = exact_data(hidden, num_experts, padded, with_parts)
    with poisoned():
        new, y, route = module.norm_router(x, parts, torch.ones(hidden, dtype=BF16, device="cuda"), 0.0, w, b, 4, spans(num))
    assert torch.equal(new[:num], total[:num]) and torch.equal(y[:num], total[:num])
    experts, weights = router_ref(total[:num], w, b, 4)
    want = make_route(experts, weights, num_experts, padded)
    assert torch.equal(route.offsets, want.offsets) and int(route.num_tokens) == num and route.width == want.width
    for got, all_of_it in ((route.token, want.token), (route.pair, want.pair)):
        assert torch.equal(got[: 4 * num], all_of_it[: 4 * num])
    assert (route.slots is None) == (padded > max(256, 6 * num_experts))
    if route.slots is not None:
        assert want.slots is not None and torch.equal(route.slots[: len(want.slots)], want.slots)
    gate, wanted = route.gate[: 4 * num], want.gate[: 4 * num]
    assert ((gate - wanted).abs() <= wanted / 128).all()  # one step of bfloat16, where float32's exp is on the edge
    assert num == 0 or (gate == wanted).float().mean() > 0.98
    assert not any(words.any() for words in module.router_few.mail(x.device))


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "padded", "num"), LAUNCHES)
def test_exact_sums_and_lists(size, padded, num) -> None:
    check_exact(router, size, padded, num)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [8, 100])
def test_without_parts(padded) -> None:
    check_exact(router, "20b", padded, padded, with_parts=False)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [7, 300])
def test_random_data(padded) -> None:
    """x and y near the twin's; the experts chosen are those of the kernel's y, up to logits that round differently."""
    hidden, num_experts = SIZES["20b"]
    g = torch.Generator("cuda").manual_seed(padded)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=g).to(BF16)

    x, parts, gain, w, b = normal(padded, hidden), normal(padded, 4, hidden), normal(hidden), normal(32, hidden), normal(32)
    new, y, route = router.norm_router(x, parts, gain, 1e-5, w, b, 4, spans(padded))
    assert torch.equal(new, x + parts.double().sum(1).to(BF16))
    close(y, rmsnorm_ref(new.float(), gain, 1e-5), rmsnorm_ref(new, gain, 1e-5))
    want = make_route(*router_ref(y, w, b, 4), num_experts, padded)
    assert (route.pair[: 4 * padded] == want.pair).float().mean() > 0.95
    again = router.norm_router(x, parts, gain, 1e-5, w, b, 4, spans(padded))[2]
    assert torch.equal(route.pair, again.pair) and torch.equal(route.gate, again.gate)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("old", "new", "size"),
    [
        ('left = tl.where(mine, float("-inf"), left)', "left = left + 0", "test"),
        ("tl.cumsum(mine.to(tl.int32), 0) - 1", "tl.cumsum(mine.to(tl.int32), 0) * 0", "test"),
        ("+ bias[None, :]", "", "test"),
        ("(block < me)[:, None]", "(block < 0)[:, None]", "test"),
        ("return_indices=True)", "return_indices=True, return_indices_tie_break_left=False)", "test"),
        ("tl.arange(0, EXPERTS)[:, None] + 0 * j", "tl.arange(0, EXPERTS)[:, None] + 1 + 0 * j", "120b"),
    ],
    ids=[
        "one chosen twice",
        "all in one place",
        "no bias",
        "blocks in one place",
        "ties to the higher",
        "slots of the next expert",
    ],
)
def test_a_broken_router_is_noticed(old, new, size) -> None:
    module = broken(router, old, new)
    with pytest.raises(AssertionError):
        check_exact(module, size, 300, 300)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("old", "new", "padded"),
    [
        ("left = tl.where(left == top[:, None], 0, left)", "left = left + 0", 8),
        ("_count_bits(tl.gather(masks, of, 0) & earlier)", "0 * earlier.to(tl.int32)", 8),
        ("1) + bias)", "1))", 64),
        ("+ bias[:, None]", "", 100),
        ("other < me, found", "other < 0, found", 100),
        ("bits + 0x8000, 0xFFFF - bits", "bits + 0x8000, bits", 100),
        ("tl.store(at, tl.zeros_like(words)", "tl.store(at, words", 8),
    ],
    ids=[
        "one chosen again and again",
        "all in one place",
        "no bias",
        "no bias by MMA",
        "blocks in one place",
        "negative logits upside down",
        "words left behind",
    ],
)
def test_a_broken_router_few_is_noticed(old, new, padded, monkeypatch) -> None:
    monkeypatch.setattr(router, "router_few", broken(router_few, old, new))
    with pytest.raises(AssertionError):
        check_exact(router, "test", padded, padded)
