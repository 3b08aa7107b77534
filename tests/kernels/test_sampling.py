"""Each sampling setting against its exact distribution, by frequencies of 40,000 draws; draws fixed by (seed, position)."""

import math

import pytest
import torch

from simplellm import kernels
from simplellm.kernels.sampling import philox, race

NUM = 40_000
LOGITS = [2.0, 1.5, 1.5, 0.3, 0.0, -0.4, -1.0, -1.0, -2.0, -3.0, -30.0]


def exact(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution by the definition: temperature, min-p, top-k (ties stay), top-p (the fewest that reach it)."""
    weights = {v: math.exp(z / temperature) for v, z in enumerate(logits)}
    best = max(weights.values())
    weights = {v: w for v, w in weights.items() if w >= min_p * best}
    if top_k:
        kth = sorted(weights.values(), reverse=True)[:top_k][-1]
        weights = {v: w for v, w in weights.items() if w >= kth}
    total, mass, kept = sum(weights.values()), 0.0, {}
    for value in sorted(set(weights.values()), reverse=True):
        if top_p < 1 and mass >= top_p * total * (1 - 1e-12):
            break
        for v in [v for v, w in weights.items() if w == value]:
            kept[v] = value
            mass += value
    return [kept.get(v, 0.0) / sum(kept.values()) for v in range(len(logits))]


def draw(logits, seed=1, num=NUM, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    rows = torch.tensor(logits).expand(num, -1)
    column = lambda value, dtype: torch.full((num,), value, dtype=dtype)  # noqa: E731
    return kernels.sample(
        rows,
        column(temperature, torch.float32),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seed, torch.int64),
        torch.arange(num),
    )


def fits(tokens, want) -> bool:
    """Chi-square of the counts against `want`, at about 1 in 10,000; nothing that must not be drawn was."""
    counts = torch.bincount(tokens, minlength=len(want)).tolist()
    if any(count and not p for count, p in zip(counts, want, strict=True)):
        return False
    expected = [(count, p * len(tokens)) for count, p in zip(counts, want, strict=True) if p * len(tokens) >= 5]
    chi2 = sum((count - mean) ** 2 / mean for count, mean in expected)
    freedom = len(expected) - 1
    return chi2 < freedom + 3.7 * math.sqrt(2 * freedom) + 8


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 2},  # the second and the third are equal: both stay
    {"top_k": 4},
    {"top_k": 1000},
    {"top_p": 0.3},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.7, "top_p": 0.95, "min_p": 0.1},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_follow_the_exact_distribution(setting) -> None:
    assert fits(draw(LOGITS, **setting), exact(LOGITS, **setting))


@pytest.mark.parametrize("setting", [{"temperature": 0.7}, {"top_p": 0.95}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_a_wrong_setting_is_noticed(setting) -> None:
    assert not fits(draw(LOGITS, **setting), exact(LOGITS))


def test_order_of_filters_is_min_p_then_top_k_then_top_p() -> None:
    """top-p counts the mass of what the others left: 0.8 of the best three is the best two, of all it would be four."""
    setting = {"top_k": 3, "top_p": 0.45}
    assert fits(draw(LOGITS, **setting), exact(LOGITS, **setting))
    kept = set(draw(LOGITS, **setting).tolist())
    assert kept == {0, 1, 2} or kept == {0}
    assert kept == {v for v, p in enumerate(exact(LOGITS, **setting)) if p}


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    assert draw([0.0, 3.0, 3.0, 1.0], temperature=0.0, num=3).tolist() == [1, 1, 1]


def test_mixed_rows_do_not_meet() -> None:
    """A row's token depends on its own logits, settings, seed and position: alone or among others, to the bit."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=g)
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 2.0, 1.0])
    top_k, top_p = torch.tensor([0, 0, 5, 0, 0, 3]), torch.tensor([1.0, 1.0, 1.0, 0.5, 0.9, 1.0])
    min_p, seeds = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0]), torch.tensor([1, 2, 3, -4, 5, 2**62])
    arguments = (logits, temperature, top_k, top_p, min_p, seeds, torch.tensor([3, 7, 7, 1, 100_000, 9]))
    together = kernels.sample(*arguments)
    alone = torch.cat([kernels.sample(*(a[i : i + 1] for a in arguments)) for i in range(6)])
    assert torch.equal(together, alone)


def test_draws_depend_on_seed_and_position() -> None:
    one, again, other = draw(LOGITS, seed=1, num=500), draw(LOGITS, seed=1, num=500), draw(LOGITS, seed=2, num=500)
    assert torch.equal(one, again) and not torch.equal(one, other)
    same = (one == other).float().mean().item()
    chance = sum(p * p for p in exact(LOGITS))
    assert abs(same - chance) < 0.1
    assert not torch.equal(draw(LOGITS, seed=1, num=500), draw(LOGITS, seed=1 + 2**32, num=500))


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = [-math.inf if v % 2 else z for v, z in enumerate(LOGITS)]
    assert fits(draw(logits, temperature=2.0), exact(logits, temperature=2.0))


def test_philox_gives_the_published_vectors() -> None:
    """Known answers of Philox 4x32-10 (Random123's kat_vectors)."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    for counter, key, want in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
        assert tuple(word.item() for word in words) == want


def test_race_is_gumbel() -> None:
    """Mean 0.5772, variance pi^2 / 6, every value finite."""
    values = race(torch.tensor([7]), torch.tensor([5]), 200_000)
    assert values.isfinite().all()
    assert values.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_penalties() -> None:
    """Repetition for prompt and answer, presence and frequency for the answer alone."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0, 0.5]])
    counts, seen = torch.tensor([[0, 3, 1, 0, 0]]), torch.tensor([[True, False, False, False, False]])
    arguments = (torch.tensor([0.5]), torch.tensor([0.1]), torch.tensor([2.0]))
    got = kernels.penalise(logits, counts, seen, *arguments)
    want = [2.0 / 2, -2.0 * 2 - 0.3 - 0.5, 1.0 / 2 - 0.1 - 0.5, 1.0, 0.5]
    assert got[0].tolist() == pytest.approx(want)


def test_logprobs() -> None:
    """Of the model's own distribution, alternatives best first, equal ones by id."""
    own, ids, best = kernels.logprobs(torch.tensor([LOGITS, LOGITS]), torch.tensor([4, 0]), 3)
    total = math.log(sum(math.exp(z) for z in LOGITS))
    assert own.tolist() == pytest.approx([0.0 - total, 2.0 - total], rel=1e-6)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert best[0].tolist() == pytest.approx([2.0 - total, 1.5 - total, 1.5 - total], rel=1e-6)
