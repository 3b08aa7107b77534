"""How long something takes on the GPU: what every bench here measures with."""

from __future__ import annotations

from collections.abc import Callable

import torch


def median_microseconds(run: Callable[[], object], rounds: int = 7) -> float:
    """The median of `rounds` calls, such as a graph's replays, after one that does not count."""
    times: list[float] = []
    for _ in range(rounds + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return sorted(times[1:])[rounds // 2]
