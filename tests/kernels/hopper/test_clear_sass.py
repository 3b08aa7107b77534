"""What clear_tails compiles to, and how little it launches: 16-byte stores, no spills, about a wave for any number of tiles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from simplellm.engine.step import StepShape

pytest.importorskip("triton")
from simplellm.kernels.hopper import clear, launch  # noqa: E402


@pytest.mark.parametrize("layers", [12, 18])
def test_a_large_step_launches_few_programs(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    def recorded(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        grids.append(grid)
        launch.launch(kernel, grid, *args, **options)

    monkeypatch.setattr(clear, "launch", recorded)
    tiles = StepShape.of(16384, 256, 256, chunks=True).tiles
    ints = torch.empty(4 * tiles, dtype=torch.int32, device="meta")
    pool = torch.empty(layers, 2, 100, 8, 128, 64, dtype=torch.bfloat16, device="meta")
    with launch.compiling() as built:
        clear.clear_tails(pool, ints.view(-1, 4), ints.view(-1, 4), ints)
        clear.clear_tails(pool, ints.view(-1, 4), ints.view(-1, 4)[:1], ints)
    assert tiles > 8000 and [math.prod(grid) for grid in grids] == [8 * 8 * 2 * layers, 8 * 2 * layers]
    for kernel in built:
        assert kernel.stack == 0 and kernel.count(r"STG\.E\.128") == 8 and kernel.registers <= 64
