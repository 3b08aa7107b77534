"""embed against the twin: a copy, so equal."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from simplellm.kernels.layer import embed_ref
from simplellm.kernels.spans import Spans
from tests.kernels.hopper.check import broken

pytest.importorskip("triton")
from simplellm.kernels.hopper import embed  # noqa: E402

pytestmark = pytest.mark.gpu


def check(module: ModuleType, num_tokens: int, size: int, vocab: int) -> None:
    torch.manual_seed(num_tokens)
    weight = torch.randn(vocab, size, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(vocab, (num_tokens,), device="cuda", dtype=torch.int32)
    tokens[::3] = -1
    newest = torch.randint(vocab, (9,), device="cuda", dtype=torch.int32)
    rows = torch.randint(9, (num_tokens,), device="cuda", dtype=torch.int32)
    spans = Spans(rows, torch.zeros_like(rows))
    assert torch.equal(module.embed(tokens, newest, spans, weight), embed_ref(tokens, newest, spans, weight, weight.dtype))


@pytest.mark.parametrize(("size", "vocab"), [(2880, 201088), (256, 1536), (128, 320)])
@pytest.mark.parametrize("num_tokens", [1, 17, 1024])
def test_embed(num_tokens: int, size: int, vocab: int) -> None:
    check(embed, num_tokens, size, vocab)


@pytest.mark.parametrize(("old", "new"), [("token < 0, newest", "token < 0, 0"), ("tl.load(rows_ptr + t)", "t % 9")])
def test_the_check_rejects_a_broken_embed(old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check(broken(embed, old, new), 17, 128, 320)
