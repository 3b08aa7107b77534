"""Without a GPU: what the mailbox's kernels compile to. Words of 16 bytes, past the caches, all of a turn under way at once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from simplellm.kernels.hopper.launch import compiling  # noqa: E402
from simplellm.kernels.hopper.mailbox import HEADER, SLOTS, receive, send  # noqa: E402


def test_loads_and_stores() -> None:
    ints = lambda *shape: torch.empty(shape, dtype=torch.int32, device="meta")  # noqa: E731
    with compiling() as built:
        for size in (544, 5004):
            receive(ints(SLOTS, 5004), ints(1), ints(size))
        for num in (1, 1024):
            send(ints(num), ints(1), ints(SLOTS, HEADER + 1024))
    assert len({id(kernel.kernel) for kernel in built}) == 2, "one each, whatever the sizes"
    first, *_, last = built
    assert [first.count(r"LDG.E.128.STRONG.SYS"), first.count("STG.E.128")] == [4, 4]
    loads = [i for i, text in enumerate(first.sass) if "LDG.E.128" in text]
    assert max(loads) < min(i for i, text in enumerate(first.sass) if "STG.E.128" in text), "the first word waits for no store"
    for kernel in (first, last):
        assert kernel.stack == 0 and kernel.shared == 0 and kernel.registers <= 64
        assert kernel.count("ACQBULK") == 1 and kernel.count("PREEXIT") == 1
    counted = [i for i, text in enumerate(first.sass) if "BAR.SYNC" in text][0]
    assert any("LDG.E " in text for text in first.sass[:counted]), "read by all before it grows"
    assert not any("STG" in text for text in first.sass[:counted])
