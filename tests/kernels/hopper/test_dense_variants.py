"""The candidate dense kernels against cuBLAS and rope_append, and that the comparison rejects broken ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.hopper.check import broken

pytest.importorskip("triton")
from simplellm.kernels.hopper import dense_gemv, dense_ring, dense_rows  # noqa: E402
from tests.kernels.hopper import bench_dense_variants as bench  # noqa: E402
from tests.kernels.hopper.bench_dense_variants import A1, Gemv, Ring, Rows, check, make  # noqa: E402

pytestmark = pytest.mark.gpu
LOOP, LOOP_FUSED, TILE = Gemv(8, 8, 6, 2, 128), Gemv(8, 8, 6, 2, 128, True), Gemv(4, 4, 6, 0, 128)
CASES: list[tuple[str, int, Any]] = [
    ("qkv", 1, LOOP_FUSED), ("qkv", 2, LOOP_FUSED), ("qkv", 3, TILE), ("qkv", 4, LOOP), ("o", 1, TILE), ("lm_head", 1, LOOP),
    ("qkv", 1, Rows(A1, True)), ("qkv", 8, Rows(A1)), ("o", 8, Rows(A1)), ("qkv", 7, Ring(16, 4, 8, 2)),
    ("o", 8, Ring(16, 4, 5, 2)),
]  # fmt: skip
FAULTS: list[tuple[Any, str, str, str, int, Any]] = [
    (dense_gemv, "dense_gemv", "y0 += found[0].to(gl.float32)", "y0 += 0.0", 1, LOOP),
    (dense_gemv, "dense_gemv", "* scale * gain.to(gl.float32)", "* scale", 1, LOOP_FUSED),
    (dense_gemv, "dense_gemv", "t < num_tokens", "t < num_tokens + 1", 4, LOOP),
    (dense_rows, "dense_rows", "first + place % WK * STEPS + place // WK", "first + place", 8, Rows(A1)),
    (dense_ring, "dense_ring", "permute([0, 3, 4, 5, 2, 6, 1])", "permute([0, 4, 3, 5, 2, 6, 1])", 8, Ring(16, 4, 8, 2)),
]


@pytest.mark.parametrize(("op", "num_tokens", "variant"), CASES)
def test_agrees(op: str, num_tokens: int, variant: Any) -> None:
    assert check(make(op, num_tokens), variant) == ""


@pytest.mark.parametrize(("module", "name", "old", "new", "num_tokens", "variant"), FAULTS)
def test_rejects_a_broken_kernel(
    module: Any, name: str, old: str, new: str, num_tokens: int, variant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, name, broken(module, old, new))
    assert check(make("qkv", num_tokens), variant).startswith("WRONG")
