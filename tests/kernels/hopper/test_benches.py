"""The benches are of the kernels as they are now: each can be imported, without a GPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

BENCHES = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))


@pytest.mark.parametrize("bench", BENCHES)
def test_it_can_be_imported(bench: str) -> None:
    pytest.importorskip("triton")
    assert callable(import_module(f"tests.kernels.hopper.{bench}").main)
