"""A GPU without the kernels, in float32: the twins there, with the same answers as on the CPU."""

import gc
from pathlib import Path

import pytest
import torch

from simplellm import LLM


@pytest.mark.gpu
def test_answers_of_the_twins_on_the_gpu_equal_those_on_the_cpu(tiny: Path) -> None:
    """Float64 sums, rounded, are the same on both; so are the draws."""
    prompts = ["Hello", "a longer prompt, of more than one page, " * 8, [1, 2, 3]]
    settings = dict(max_tokens=24, seed=[1, 2, 3], temperature=[0.0, 1.0, 0.7], top_p=0.9, repetition_penalty=[1.0, 1.2, 1.0])
    answers = {}
    for device in ("cpu", "cuda"):
        with LLM(tiny, device=device, dtype="float32", num_pages=64, progress=False) as llm:
            answers[device] = [output.token_ids for output in llm.generate(prompts, **settings).result()]
    assert answers["cuda"] == answers["cpu"]


@pytest.mark.gpu
def test_a_grammar_on_the_gpu_and_the_memory_after_it(tiny: Path) -> None:
    """Masks are unpacked on the device, beside rows without one; a stopped engine leaves nothing behind."""
    before = torch.cuda.memory_allocated()
    answers = {}
    for device in ("cpu", "cuda"):
        with LLM(tiny, device=device, dtype="float32", num_pages=4096, progress=False) as llm:  # 268 MB
            asked = [{"role": "user", "content": "hi"}]
            formats = [{"type": "json_object"}, None]
            running = [
                llm.chat(asked, response_format=form, max_tokens=40, seed=5, current_date="2026-01-01") for form in formats
            ]
            answers[device] = [generation.result()[0].token_ids for generation in running]
    assert answers["cuda"] == answers["cpu"]
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 64 << 20  # cuBLAS keeps a workspace for each thread that used it
