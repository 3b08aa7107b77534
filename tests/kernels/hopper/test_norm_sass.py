"""What the row kernels compile to: 16-byte loads, no spills."""

from __future__ import annotations

import pytest
import torch

from simplellm.kernels.spans import Spans

pytest.importorskip("triton")
from simplellm.kernels.hopper.clear import clear_tails  # noqa: E402
from simplellm.kernels.hopper.embed import embed  # noqa: E402
from simplellm.kernels.hopper.launch import compiling  # noqa: E402
from simplellm.kernels.hopper.norm import add_norm, final_norm  # noqa: E402


def test_the_row_kernels() -> None:
    x = torch.empty(8, 2880, dtype=torch.bfloat16, device="meta")
    ints = torch.empty(8, dtype=torch.int32, device="meta")
    with compiling() as built:
        add_norm(x, x.new_empty(8, 4, 2880), x[0], 1e-5)
        final_norm(x, None, x[0], 1e-5, ints)
        embed(ints, ints, Spans(ints, ints), x.new_empty(201088, 2880))
        clear_tails(x.new_empty(12, 2, 100, 8, 128, 64), ints.view(4, 2), ints.view(2, 4), ints)
    norm, final, copy, clear = built
    assert all(kernel.stack == 0 for kernel in built)
    assert norm.count(r"LDG\.E\.128") >= 5 and norm.count(r"STG\.E\.128") >= 2 and norm.registers <= 64
    assert final.count(r"LDG\.E\.128") >= 2 and copy.count(r"STG\.E\.128") >= 1
    assert clear.count(r"STG\.E\.128") == 8
