"""receive and send: each step's array from the slot that its number picks, its tokens into the same one, no more than that."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.kernels.hopper.check import broken

pytest.importorskip("triton")
from simplellm.kernels.hopper import mailbox  # noqa: E402

pytestmark = pytest.mark.gpu

SIZE, ROWS = 70_000, 1024  # of a prompt's step: 17 turns of `receive`
SHAPES = [(544, 1), (4, 3), (4096, 1024), (4100, 128), (SIZE, 129), (544, 1), (8, 1000)]  # int32s of the array, tokens


def check(module: ModuleType, first: int = 0) -> None:
    """Steps first + 1 and on, as graphs and launched one by one; the host fills a slot while the step before is on its way."""
    plans, drawn = (torch.zeros(mailbox.SLOTS, n, dtype=torch.int32, pin_memory=True) for n in (SIZE, mailbox.HEADER + ROWS))
    step, count = torch.zeros(SIZE, dtype=torch.int32, device="cuda"), torch.full((1,), first, dtype=torch.int32, device="cuda")
    tokens, scratch = torch.zeros(ROWS, dtype=torch.int32, device="cuda"), torch.zeros(SIZE, dtype=torch.int32, device="cuda")

    def run(size: int, num: int) -> None:
        module.receive(plans, count, step[:size])
        torch.add(step[:num], 5, out=tokens[:num])
        module.send(tokens[:num], count, drawn)

    run(4, 1)  # compiles
    count.fill_(first)
    graphs = {}
    for size, num in set(SHAPES):
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            run(size, num)
        graphs[size, num] = graph
    assert int(count) == first
    events: list[torch.cuda.Event] = []
    wanted: list[torch.Tensor] = []
    for i, (size, num) in enumerate(SHAPES * 6):
        number = (first + 1 + i) % mailbox.WRAP
        slot = number % mailbox.SLOTS
        if i >= mailbox.SLOTS:
            events[i - mailbox.SLOTS].synchronize()
            old = (number - mailbox.SLOTS) % mailbox.WRAP
            size_then, num_then = (SHAPES * 6)[i - mailbox.SLOTS]
            assert int(drawn[slot, 0]) == old
            have = min(size_then, num_then)
            got = drawn[slot, mailbox.HEADER : mailbox.HEADER + have]
            assert torch.equal(got, wanted[i - mailbox.SLOTS][:have] + 5)
            assert (drawn[slot, mailbox.HEADER + num_then :] == -9).all(), "written beyond the tokens"
        plans[slot] = torch.randint(1 << 30, (SIZE,), dtype=torch.int32)
        drawn[slot] = -9
        wanted.append(plans[slot].clone())
        scratch.copy_(step)
        graphs[size, num].replay() if i % 2 else run(size, num)
        events.append(torch.cuda.Event())
        events[-1].record()
        if i % 5 == 0:  # else it may still be under way when the next slot is filled
            assert torch.equal(step[:size].cpu(), wanted[i][:size]) and torch.equal(step[size:], scratch[size:])


@pytest.mark.parametrize("first", [0, mailbox.WRAP - 7])
def test_receive_and_send(first: int) -> None:
    check(mailbox, first)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("plans += (number % SLOTS)", "plans += (number // 2 % SLOTS)"),
        ("drawn += (number % SLOTS)", "drawn += (0 * number)"),
        ("inside = at < num_tokens", "inside = at < num_tokens + 1"),
        ("word = first + ", "word = "),
        ("% WRAP", "+ 0"),
    ],
)
def test_it_finds_what_is_wrong(old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check(broken(mailbox, old, new), mailbox.WRAP - 7)
