"""The GPU engine under load: thousands of arrivals, aborts and preemptions lose no page; how prompts are cut changes nothing;
prompts of the model's whole context; memory that holds NaN at the start changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from random import Random

import pytest
import torch

from simplellm import LLM

pytestmark = pytest.mark.gpu
GREEDY = {"temperature": 0.0, "max_tokens": 24, "min_tokens": 24}


def test_thousands_of_arrivals_aborts_and_preemptions() -> None:
    """Few pages for many requests; afterwards all pages are free and an answer is what it was before."""
    random = Random(1)
    prompts = [[random.randrange(3, 1000) for _ in range(random.choice((2, 40, 130, 700)))] for _ in range(40)]
    with LLM(progress=False, max_running=64, num_pages=48, penalty_slots=4) as llm:
        before = llm.generate(prompts[:4], **GREEDY).result()
        running = []
        for i in range(2500):
            settings = {"temperature": i % 2, "seed": i, "max_tokens": random.choice((1, 5, 90, 400)), "ignore_eos": True}
            if i % 9 == 0:
                settings["presence_penalty"] = 0.5
            running.append(llm.generate([random.choice(prompts)], **settings))
            if random.random() < 0.3:
                running[random.randrange(len(running))].cancel()
            if i % 50 == 0:
                time.sleep(0.02)
        asked = [generation for generation in running if not generation.cancelled()]
        outputs = [generation.result()[0] for generation in asked]
        assert 1500 < len(asked) < 2500 and all(output.finish_reason == "length" for output in outputs)
        while not llm._engine.worker.loop.idle:  # those that were cancelled last
            time.sleep(0.01)
        scheduler = llm._engine.scheduler
        assert scheduler.num_preemptions > 0
        scheduler.audit()
        assert not scheduler.requests and scheduler.pool.num_available == scheduler.pool.num_usable
        after = llm.generate(prompts[:4], **GREEDY).result()
    assert [output.token_ids for output in after] == [output.token_ids for output in before]


def test_how_prompts_are_cut_changes_nothing() -> None:
    """Alone and whole, in chunks beside decodes, together in one step: the same tokens, or a near tie."""
    random = Random(2)
    prompts = [[random.randrange(3, 1000) for _ in range(num)] for num in (1, 127, 128, 129, 1000, 2049, 5000)]
    asked = GREEDY | {"logprobs": True, "top_logprobs": 2}
    answers = {}
    for name, options in {"whole": {}, "chunks": {"token_budget": 100, "prompt_budget": 100}}.items():
        with LLM(progress=False, max_running=16, num_pages=600, prefix_cache=False, **options) as llm:
            if name == "whole":
                answers["alone"] = [llm.generate([prompt], **asked).result()[0] for prompt in prompts]
            answers[name] = llm.generate(prompts, **asked).result()
    for name in ("whole", "chunks"):
        for prompt, alone, other in zip(prompts, answers["alone"], answers[name], strict=True):
            at = next((i for i, (a, b) in enumerate(zip(alone.token_ids, other.token_ids, strict=True)) if a != b), None)
            if at is not None:
                top = alone.logprobs[at].top
                assert top[0][1] - top[1][1] < 0.05, (name, len(prompt), at)


def test_a_prompt_of_the_whole_context() -> None:
    """131,000 tokens, in steps of 16,384 and of 5,000: the same tokens; a second time from the prefix cache."""
    random = Random(3)
    prompt = [random.randrange(3, 1000) for _ in range(131_000)]
    answers = []
    for budget in (16_384, 5_000):
        with LLM(progress=False, max_running=4, num_pages=2500, prompt_budget=budget) as llm:
            answers += [llm.generate([prompt], **GREEDY).result()[0] for _ in range(2)]
            assert answers[-1].cached_tokens > 130_000
    tokens = [answer.token_ids for answer in answers]
    assert all(any(ids) for ids in tokens) and tokens.count(tokens[0]) == len(tokens), tokens  # nothing but token 0 is NaN


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever is allocated meanwhile holds NaN, or the largest integer: what an engine does not write it must not read."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty makes, in graphs at each replay
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize("budget", [16_384, 5_000])
def test_what_was_in_memory_before_changes_nothing(budget: int) -> None:
    """Prompts of all kinds, from the prefix cache too, in an engine that finds NaN wherever it did not write."""
    random = Random(4)
    prompts = [[random.randrange(3, 1000) for _ in range(num)] for num in (1, 2, 127, 129, 3000, 40_000)]
    answers = []
    for before in (nullcontext(), poisoned()):
        with before, LLM(progress=False, max_running=8, num_pages=1200, prompt_budget=budget) as llm:
            for _ in range(2):
                answers.append([llm.generate([prompt], **GREEDY).result()[0].token_ids for prompt in prompts])
    assert all(any(ids) for run in answers for ids in run), f"nothing but token 0, which is NaN: {answers}"
    assert answers[:2] == answers[2:]
