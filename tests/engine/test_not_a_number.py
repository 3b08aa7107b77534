"""A NaN in the model ends the request that meets it with an error, and nobody else finds what it computed."""

from __future__ import annotations

import pytest
import torch

from simplellm import LLM
from simplellm.errors import EngineError
from simplellm.kernels.sampling import sample_ref

GREEDY = {"temperature": 0.0, "max_tokens": 8, "min_tokens": 8}
PROMPT = list(range(3, 403))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("settings", [{}, {"logprobs": True, "presence_penalty": 0.5}, {"temperature": 1.0, "seed": 1}])
def test_nan_in_cached_keys_ends_the_request_and_leaves_the_cache(device: str, settings: dict[str, object]) -> None:
    with LLM(progress=False, device=device, max_running=4, num_pages=60) as llm:
        right = llm.generate([PROMPT], **GREEDY).result()[0]
        pool = llm._engine.runner.kv
        llm._engine.worker.call(lambda: pool[:, :, 1:].fill_(torch.nan))
        with pytest.raises(EngineError, match="no logit of the model's output is a number"):
            llm.generate([PROMPT], **{**GREEDY, **settings}).result()
        llm._engine.worker.call(lambda: pool.zero_())
        again = llm.generate([PROMPT], **GREEDY).result()[0]
        assert again.cached_tokens == 0 and again.token_ids == right.token_ids
        llm._engine.scheduler.audit()


def test_a_row_without_a_number_draws_nothing() -> None:
    logits = torch.zeros(4, 8)
    logits[1], logits[2], logits[3, 5] = torch.nan, -torch.inf, torch.nan
    for temperature in (0.0, 1.0):
        rows = torch.full((4,), temperature), torch.zeros(4, dtype=torch.int64), torch.ones(4), torch.zeros(4)
        tokens = sample_ref(logits, *rows, torch.arange(4), torch.arange(4))
        assert tokens[1] == tokens[2] == -1 and tokens[0] >= 0 and tokens[3] not in (-1, 5)
