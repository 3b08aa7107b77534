"""Times the experts of many tokens on the GPU at hand: python -m tests.kernels.hopper.bench_moe_prefill [seconds]

Random routing, random codes. Calls go over several layers in one CUDA graph, so that no weight is still in the L2 from the call
before. TFLOP/s counts 6 P H I for P = 4 T rows, TB/s the weights of the experts chosen, each once; the time is of the whole
call: gather, gate_up and down. Kernels are compiled before, in parallel, by processes that share Triton's cache.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from simplellm.kernels.hopper import moe_prefill as moe
from simplellm.kernels.hopper.launch import compiling
from simplellm.kernels.hopper.pack import BLOCK_WORDS, Kind, Stream
from simplellm.kernels.hopper.router import Route
from tests.kernels.hopper.timing import median_microseconds

HIDDEN = INNER = 2880
N64, N128 = (v for _, v in moe.VARIANTS)
WIDE = moe.WIDEST
CANDIDATES = {  # by mean rows an expert, up to
    24: [N64, N128],
    70: [N64, replace(N64, unit=5), N128],
    140: [N128, replace(N128, unit=5), N64, WIDE],
    600: [N128, WIDE, replace(WIDE, lag=False)],
    9999: [WIDE, replace(WIDE, lag=False), replace(WIDE, unit=5), N128, replace(N128, lag=True)],
}
SIZES = [(E, T) for T in (128, 256, 1024, 4096, 16384) for E in (32, 128)]


def build(v: moe.Variant) -> None:
    """Fill Triton's cache."""

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def stream(kind: Kind, rows: int) -> Stream:
        words = meta(32, rows // 64, HIDDEN // 64, BLOCK_WORDS)
        return Stream(words, meta(32, rows, dtype=torch.float32), False, kind, rows, HIDDEN)

    at = Route(meta(33), meta(8192), meta(8192), meta(8192, dtype=torch.float32), meta(1), None, 0)
    with compiling():
        y = meta(2048, HIDDEN, dtype=torch.bfloat16)
        moe.run(y, at, stream("gate_up", 2 * INNER), stream("down", HIDDEN), 7.0, v)


def stream(kind: Kind, experts: int, rows: int, columns: int) -> Stream:
    shape = (experts, rows // 64, columns // 64, BLOCK_WORDS)
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
    words.view(torch.uint8)[..., 2048:] = torch.randint(243, 248, (*words.shape[:3], 128), dtype=torch.uint8, device="cuda")
    return Stream(words, torch.randn(experts, rows, device="cuda"), False, kind, rows, columns)


def route(experts: int, tokens: int) -> Route:
    chosen = torch.rand(tokens, experts, device="cuda").topk(4).indices.flatten()
    pair = chosen.argsort(stable=True)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device="cuda")
    offsets[1:] = chosen.bincount(minlength=experts).cumsum(0)
    gate = torch.rand(4 * tokens, device="cuda")
    return Route(offsets, (pair // 4).int(), pair.int(), gate, torch.tensor([tokens], device="cuda").int(), None, 0)


def timed(calls: list[Callable[[], object]], reps: int) -> float:
    """Microseconds of one call, the median of `reps` replays of all."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_microseconds(graph.replay, reps) / len(calls)


def main() -> None:
    start = time.monotonic()
    with ProcessPoolExecutor() as pool:
        list(pool.map(build, dict.fromkeys(v for vs in CANDIDATES.values() for v in vs)))
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    limit = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 25)
    layers = {
        experts: [
            (stream("gate_up", experts, 2 * INNER, HIDDEN), stream("down", experts, HIDDEN, INNER))
            for _ in range(256 // experts)
        ]
        for experts in (32, 128)
    }
    for experts, tokens in SIZES:
        y, at = torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), route(experts, tokens)
        mean = 4 * tokens / experts
        used = int((at.offsets[1:] > at.offsets[:-1]).sum())
        for v in next(vs for most, vs in CANDIDATES.items() if mean <= most):
            if time.monotonic() > limit:
                return print("out of time")
            few = layers[experts][: 2 if mean > 300 else None]
            reps = 3 if mean > 300 else 5
            us = timed([partial(moe.run, y, at, *w, 7.0, v) for w in few], reps)
            flops, bytes_ = 6 * 4 * tokens * HIDDEN * INNER, used * 3 * HIDDEN * INNER * 17 / 32
            print(
                f"E {experts:3d} T {tokens:5d} ({mean:6.1f} rows) {us:8.1f} us {flops / us / 1e6:4.0f} TFLOP/s"
                f" {bytes_ / us / 1e6:5.2f} TB/s  {v}",
                flush=True,
            )


if __name__ == "__main__":
    main()
