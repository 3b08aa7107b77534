"""add_norm and final_norm against the twins: sizes that are no power of two, one part and four, rows beyond the outputs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from simplellm.kernels.layer import add_ref, final_norm_ref
from simplellm.kernels.norm import rmsnorm_ref
from tests.kernels.hopper.check import broken, close

pytest.importorskip("triton")
from simplellm.kernels.hopper import norm  # noqa: E402

pytestmark = pytest.mark.gpu
EPS = 1e-5


def draw(num_tokens: int, size: int, num_parts: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    torch.manual_seed(num_tokens + size)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, gain = 3 * torch.randn(num_tokens, size, **options), 1 + 0.3 * torch.randn(size, **options)
    return x, torch.randn(num_tokens, num_parts, size, **options) if num_parts else None, gain


def check(module: ModuleType, num_tokens: int, size: int, num_parts: int) -> None:
    x, parts, gain = draw(num_tokens, size, num_parts)
    new, y = module.add_norm(x, parts, gain, EPS)
    wide = add_ref(x.float(), None if parts is None else parts.float())
    plain = add_ref(x, parts)
    if num_parts > 1:
        close(new, wide, plain)  # the order of a float32 sum can show in the last bit
    else:
        assert torch.equal(new, plain)
    close(y, rmsnorm_ref(wide, gain.float(), EPS), rmsnorm_ref(plain, gain, EPS))


def check_final(module: ModuleType, num_tokens: int, size: int, num_parts: int) -> None:
    x, parts, gain = draw(num_tokens, size, num_parts)
    outputs = torch.tensor([num_tokens - 1, 0, num_tokens // 2, 0], device="cuda", dtype=torch.int32)
    got = module.final_norm(x, parts, gain, EPS, outputs)
    want = final_norm_ref(x.float(), None if parts is None else parts.float(), gain.float(), EPS, outputs)
    close(got, want, final_norm_ref(x, parts, gain, EPS, outputs))


@pytest.mark.parametrize("size", [2880, 256, 128])
@pytest.mark.parametrize("num_parts", [0, 1, 4])
@pytest.mark.parametrize("num_tokens", [1, 3, 65, 1024])
def test_add_norm(num_tokens: int, size: int, num_parts: int) -> None:
    check(norm, num_tokens, size, num_parts)


@pytest.mark.parametrize("size", [2880, 256, 128])
@pytest.mark.parametrize("num_parts", [0, 4])
def test_final_norm(size: int, num_parts: int) -> None:
    check_final(norm, 17, size, num_parts)


@pytest.mark.parametrize(
    ("old", "new"),
    [("* scale * gain)", "* scale)"), ("static_range(PARTS)", "static_range(PARTS - 1)"), ("/ H + eps", "/ BLOCK + eps")],
)
def test_the_check_rejects_a_broken_norm(old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check(broken(norm, old, new), 3, 2880, 4)


def test_the_check_rejects_the_wrong_row() -> None:
    with pytest.raises(AssertionError):
        check_final(broken(norm, "tl.load(outputs_ptr + out).to(tl.int64) if FINAL else out", "out"), 17, 128, 4)
