"""Times of norm_router on the GPU at hand.

    python -m tests.kernels.hopper.bench_router

Each line: calls in a CUDA graph, one for each of the copies of the weights that fill 120 MB (more than the L2), with parts of
four experts to add; the median of 7 replays, for one call.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from simplellm.kernels.hopper import router
from simplellm.kernels.hopper.launch import compiling
from simplellm.kernels.hopper.router import Route
from simplellm.kernels.spans import COUNTS, Spans, Work
from tests.kernels.hopper.timing import median_microseconds

HIDDEN, BYTES, REPLAYS = 2880, 120_000_000, 7
TOKENS, EXPERTS = (1, 2, 8, 16, 32, 64, 128, 256, 1024), (32, 128)


def calls(num_tokens: int, num_experts: int, device: str = "cuda") -> list[Callable[[], Route]]:
    """A call for each copy of the weights."""

    def normal(*shape: int) -> torch.Tensor:
        return (
            torch.randn(*shape, device=device).bfloat16() if device == "cuda" else torch.empty(shape, device=device).bfloat16()
        )

    torch.manual_seed(num_tokens)
    weight = normal(num_experts, HIDDEN)
    x, parts, gain, bias = normal(num_tokens, HIDDEN), normal(num_tokens, 4, HIDDEN), normal(HIDDEN), normal(num_experts)
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    counts = torch.full((COUNTS,), num_tokens, dtype=torch.int32, device=device)
    spans = Spans(nothing, nothing, None, Work(counts, nothing, nothing))

    def call(w: torch.Tensor) -> Route:
        return router.norm_router(x, parts, gain, 1e-5, w, bias, 4, spans)[2]

    copies = BYTES // (2 * weight.numel()) if device == "cuda" else 1
    return [partial(call, weight.clone()) for _ in range(copies)]


def microseconds(functions: list[Callable[[], Route]]) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return median_microseconds(graph.replay, REPLAYS) / len(functions)


def build(num_tokens: int, num_experts: int) -> None:
    with compiling():
        calls(num_tokens, num_experts, "meta")[0]()


def main() -> None:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        builds = [pool.submit(build, num_tokens, num_experts) for num_tokens in TOKENS for num_experts in EXPERTS]
        for done in builds:
            done.result()
    print("experts  tokens      us")
    for num_experts in EXPERTS:
        for num_tokens in TOKENS:
            print(f"{num_experts:7} {num_tokens:7} {microseconds(calls(num_tokens, num_experts)):7.2f}", flush=True)


if __name__ == "__main__":
    main()
