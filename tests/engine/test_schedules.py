"""However requests are scheduled, each gets the tokens it gets alone: greedy and seeded, with every setting, to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from simplellm.engine.scheduler import Request
from simplellm.model.gpt_oss import GptOss
from simplellm.request import Sampling
from tests.checkpoints import make
from tests.conftest import load_model
from tests.engine.harness import Harness
from tests.oracle import Oracle

VOCAB, EOS = 96, (5, 17, 40, 63)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("m"), layers=4, experts=6, hidden=64, heads=2, head_dim=32, vocab=VOCAB)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(path: Path, request: pytest.FixtureRequest) -> GptOss:
    return load_model(path, getattr(torch, request.param))


def settings(rng: random.Random) -> Sampling:
    """Some of everything, greedy as often as not."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 7, "min_p": 0.02, "logprobs": True},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.9, "presence_penalty": 0.7},
        {"temperature": 0.0, "logit_bias": {3: 4.0, 5: -100.0}, "min_tokens": 4},
        {"temperature": 1.0, "stop_token_ids": (11, 12, 13)},
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    return Sampling(**rng.choice(kinds), max_tokens=rng.choice([1, 2, 8, 20, 30]))


LENGTHS = (1, 5, 20, 120, 125, 126, 140, 250, 254, 280)


def requests(num: int, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[Request]:
    """Prompts of 1 to 300 tokens, many of which turn a page soon; some share their beginnings."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(270)]
    made = []
    for rid in range(num):
        length = rng.choice(lengths)
        shared = common[: min(length, rng.choice([0, 0, 128, 200, 256]))]
        prompt = (*shared, *(rng.randrange(VOCAB) for _ in range(length - len(shared))))
        made.append(Request(rid, prompt, settings(rng), seed=rng.getrandbits(64), priority=rng.choice([0, 0, 1])))
    return made


def one_by_one(model: GptOss, num: int, **options) -> dict[int, tuple]:
    harness = Harness(model, eos=EOS, lag=0, prefix_cache=False, **options)
    for request in requests(num):
        harness.add(request)
        harness.run()
    return harness.answers()


SCHEDULES = {
    "together": {"lag": 1},
    "together, lag 0": {"lag": 0},
    "chunks of 3": {"lag": 1, "token_budget": 3},
    "chunks of 5, lag 0, cache off": {"lag": 0, "token_budget": 5, "prefix_cache": False},
    "few pages": {"lag": 1, "num_pages": 9},
    "few pages, lag 0, cache off": {"lag": 0, "num_pages": 7, "prefix_cache": False},
    "cache off": {"lag": 1, "prefix_cache": False},
    "three rows": {"lag": 1, "max_running": 3},
}


def test_any_schedule_gives_the_same_answers(model: GptOss) -> None:
    num = 12
    want = one_by_one(model, num)
    assert {answer[1] for answer in want.values()} == {"stop", "length"}
    for name, options in SCHEDULES.items():
        harness = Harness(model, eos=EOS, **options)
        harness.add(*requests(num))
        assert harness.run().answers() == want, name


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_give_the_same_answers(path: Path, lag: int, prefix_cache: bool) -> None:
    """All of them turn a page within a few steps of each other, in a pool that has no room for that."""
    model, rng = load_model(path, torch.bfloat16), random.Random(5)
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(118, 127))) for _ in range(9)]

    def made() -> list[Request]:
        rng = random.Random(6)
        return [Request(i, p, replace(settings(rng), max_tokens=16), seed=i) for i, p in enumerate(prompts)]

    alone = Harness(model, lag=0, prefix_cache=False, eos=EOS)
    for request in made():
        alone.add(request)
        alone.run()
    tight = Harness(model, lag=lag, prefix_cache=prefix_cache, num_pages=15, eos=EOS)
    tight.add(*made())
    assert tight.run().answers() == alone.answers()
    assert tight.scheduler.num_preemptions > 0


@pytest.mark.parametrize("lag", [0, 1])
def test_arrivals_and_aborts_do_not_matter(path: Path, lag: int) -> None:
    """Those that are not aborted get what they get alone, whenever the others come and go."""
    model = load_model(path, torch.bfloat16)
    want = one_by_one(model, 16)
    rng, waiting = random.Random(lag), requests(16)
    harness = Harness(model, eos=EOS, lag=lag, num_pages=12, token_budget=48)
    dropped: set[int] = set()
    harness.add(waiting.pop())

    def between(step: int) -> None:
        if waiting and rng.random() < 0.3:
            harness.add(waiting.pop(rng.randrange(len(waiting))))
        if rng.random() < 0.05 and (alive := [rid for rid in harness.tokens if rid not in harness.reasons]):
            rid = rng.choice(alive)
            event = harness.scheduler.abort(rid)
            harness.take([event] if event else [])
            dropped.add(rid)

    while waiting or not harness.loop.idle:
        harness.run(between)
        if waiting:
            harness.add(waiting.pop())
    got = harness.answers()
    assert 0 < len(dropped) < 12
    for rid, answer in want.items():
        if rid in dropped:
            assert harness.reasons[rid] == "abort" and answer[0][: len(got[rid][0])] == got[rid][0]
        else:
            assert got[rid] == answer


def test_three_hundred_requests_in_a_pool_that_preempts(tmp_path: Path) -> None:
    """All at once, of mixed lengths and settings, against as many runs one by one."""
    model = load_model(make(tmp_path, layers=2, experts=4, hidden=64, intermediate=32, heads=2, head_dim=32, vocab=VOCAB))
    lengths = (*LENGTHS, *[127] * 40)  # so that many turn a page at once

    def made() -> list[Request]:
        listed = requests(300, seed=7, lengths=lengths)
        for request in listed:
            request.sampling = replace(request.sampling, max_tokens=4 + request.rid % 13)
        return listed

    alone = Harness(model, eos=EOS, lag=0, prefix_cache=False)
    for request in made():
        alone.add(request)
        alone.run()
    together = Harness(model, eos=EOS, num_pages=24, token_budget=8192)
    together.add(*made())
    assert together.run().answers() == alone.answers()
    assert together.scheduler.num_preemptions > 0
    pool = together.scheduler.pool
    assert pool.num_available == pool.num_usable


def test_greedy_equals_the_oracle(path: Path) -> None:
    """The engine with pages, chunks and batches against no cache at all."""
    oracle, model = Oracle(path), load_model(path)
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(num)) for num in (1, 40, 126)]
    harness = Harness(model, token_budget=50)
    harness.add(*(Request(i, p, Sampling(temperature=0, max_tokens=6)) for i, p in enumerate(prompts)))
    harness.run()
    for i, prompt in enumerate(prompts):
        assert harness.tokens[i] == oracle.greedy(list(prompt), 6)


def test_second_turn_reuses_the_pages_of_the_first(path: Path) -> None:
    """A conversation of 700 tokens goes on: all its full pages are found again, and the answer is what it is alone."""
    model = load_model(path, torch.bfloat16)
    rng = random.Random(2)
    first = Request(0, tuple(rng.randrange(VOCAB) for _ in range(700)), Sampling(temperature=0, max_tokens=90))
    harness = Harness(model, num_pages=60)
    harness.add(first)
    harness.run()
    longer = (*first.prompt, *harness.tokens[0], *(rng.randrange(VOCAB) for _ in range(30)))
    second = Request(1, longer, Sampling(temperature=0, max_tokens=20))
    harness.add(second)
    harness.run()
    assert second.cached_tokens == (700 + 89) // 128 * 128
    alone = Harness(model, num_pages=60, prefix_cache=False)
    alone.add(Request(1, longer, second.sampling))
    assert alone.run().tokens[1] == harness.tokens[1]


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("lag", [0, 1])
def test_rows_with_a_mask_wait_alone(path: Path, share: float, lag: int) -> None:
    """Masked rows draw only allowed tokens, also when their masks come late; the others' answers do not change."""
    model = load_model(path, torch.bfloat16)
    num, rng = 10, random.Random(3)
    masked = set(range(int(num * share)))
    made = requests(num, seed=4)
    even = bytes([0b01010101] * (VOCAB // 8))

    def drive(late: bool) -> Harness:
        harness = Harness(model, lag=lag, eos=EOS)
        for request in requests(num, seed=4):
            harness.add(request)
            if request.rid in masked:
                harness.loop.masks[request.rid] = lambda rid: None if late and rng.random() < 0.4 else even
        return harness.run()

    unmasked = Harness(model, lag=lag, eos=EOS)
    unmasked.add(*made)
    want, prompt_done, late = unmasked.run().answers(), drive(False).answers(), drive(True).answers()
    assert prompt_done == late
    for rid in range(num):
        if rid in masked:
            assert all(token % 2 == 0 for token in late[rid][0]) and late[rid][0]
        else:
            assert late[rid] == want[rid]
