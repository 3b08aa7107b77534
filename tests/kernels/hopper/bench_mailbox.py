"""What a step of the engine costs beside its kernels, on the GPU at hand: by copies between two graphs, and by the mailbox.

    python -m tests.kernels.hopper.bench_mailbox

receive, send: calls in a CUDA graph, for one call. Then steps of a graph that idles for a known time in place of the layers,
launched as the engine does with lag 1: a step's time less that of idling. "copies": array in, body, draws in, head, tokens out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from simplellm.kernels.hopper.mailbox import HEADER, SLOTS, receive, send
from tests.kernels.hopper.timing import median_microseconds

SIZES, TOKENS = (544, 1288, 13_000, 68_000), (1, 64, 1024)  # arrays of 1 and 64 decodes, of 1,024, of a prompt
IDLE, STEPS = 400_000, 400  # clock cycles, about 0.2 ms


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="cuda")


def pinned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, pin_memory=True)


def record(run: Callable[[], object], times: int = 1) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph


def microseconds(run: Callable[[], object], calls: int = 50) -> float:
    """One call's, of `calls` in a graph."""
    return median_microseconds(record(run, calls).replay) / calls


def a_step(step: Callable[[], object]) -> float:
    """Microseconds, each step launched once the last but one is done."""
    events: list[torch.cuda.Event] = []
    for i in range(STEPS + 20):
        if i == 20:
            torch.cuda.synchronize()
            began = time.perf_counter()
        if i >= SLOTS:
            events[i - SLOTS].synchronize()
        step()
        events.append(torch.cuda.Event())
        events[-1].record()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e6 / STEPS


def main() -> None:
    plans, drawn, step, count = pinned(SLOTS, SIZES[-1]), pinned(SLOTS, HEADER + 1024), ints(SIZES[-1]), ints(1)
    for size in SIZES:
        print(f"receive {size:6} int32s: {microseconds(lambda size=size: receive(plans, count, step[:size])):6.2f} us")
    for num in TOKENS:
        print(f"send {num:6} tokens: {microseconds(lambda num=num: send(step[:num], count, drawn)):6.2f} us")
    idle = microseconds(lambda: torch.cuda._sleep(IDLE), 10)
    array, draws, out = pinned(544), pinned(1, 2), pinned(1)
    body = record(lambda: (torch.cuda._sleep(IDLE), step[:1].add_(0)))
    head = record(lambda: step[:1].add_(0))
    whole = record(lambda: (receive(plans, count, step[:544]), torch.cuda._sleep(IDLE), send(step[:1], count, drawn)))

    def by_copies() -> None:
        step[:544].copy_(array, non_blocking=True)
        body.replay()
        step[544:546].copy_(draws[0], non_blocking=True)
        head.replay()
        out.copy_(step[:1], non_blocking=True)

    for name, run in (("copies", by_copies), ("mailbox", whole.replay)) * 2:
        print(f"a step by {name:7}: {a_step(run) - idle:6.2f} us beside {idle:.0f}")


if __name__ == "__main__":
    main()
