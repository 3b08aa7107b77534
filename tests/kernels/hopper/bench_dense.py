"""Times of the dense ops of gpt-oss on the GPU at hand, for some plans of the streaming kernel, next to cuBLAS.

    python -m tests.kernels.hopper.bench_dense

Each line: 16 calls in a CUDA graph over copies of the weights that fill 300 MB (more than the L2), the median of 7 replays.
norm_qkv is the whole op, the norm's own kernel included where it is not fused; cuBLAS's line is the product and bias alone.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from simplellm.kernels.hopper import dense
from simplellm.kernels.hopper.dense import Plan
from simplellm.kernels.hopper.launch import compiling
from tests.kernels.hopper.test_dense import make_qkv

CALLS, REPLAYS = 16, 7
SHAPES = {"qkv": (5120, 2880), "o": (2880, 4096), "lm_head": (201088, 2880)}
SMALL = [Plan(16, 8, 8, 2, 2, 3, 80), Plan(16, 8, 8, 1, 3, 3, 80), Plan(16, 8, 8, 2, 3, 2, 128), Plan(32, 8, 8, 2, 2, 2, 128),
         Plan(16, 16, 16, 1, 3, 2, 64)]  # fmt: skip
FUSED = [Plan(32, 8, 8, 2, 2, 2, 128), Plan(32, 8, 8, 1, 3, 2, 128), Plan(16, 8, 8, 1, 3, 3, 80)]
LARGE = [Plan(16, 8, 8, 2, 2, 3, 80), Plan(32, 8, 8, 2, 2, 2, 128), Plan(32, 8, 8, 1, 4, 2, 128)]
CASES: list[tuple[str, int, Plan, int]] = [  # op, tokens, plan, tokens up to which the norm is fused
    *[("qkv", 1, plan, 8) for plan in FUSED], ("qkv", 1, SMALL[0], 0),
    *[("qkv", n, FUSED[0], 8) for n in (2, 4, 8)], *[("qkv", 8, plan, 0) for plan in SMALL[:4]],
    *[("o", 1, plan, 0) for plan in SMALL], ("o", 8, SMALL[0], 0),
    *[("lm_head", 1, plan, 0) for plan in LARGE], ("lm_head", 8, LARGE[1], 0), ("lm_head", 16, LARGE[1], 0),
    ("lm_head", 32, dense.LOGITS[32], 0),
    *[(op, 16, plan, 0) for op in ("qkv", "o") for plan in (dense.PLANS[16], Plan(32, 8, 4, 2, 2, 2, 128))],
    *[(op, 32, plan, 0) for op in ("qkv", "o") for plan in (dense.PLANS[32], Plan(64, 8, 2, 1, 3, 2, 128))],
    *[(op, 64, plan, 0) for op in ("qkv", "o") for plan in (dense.PLANS[64], Plan(64, 8, 2, 1, 2, 2, 128))],
]  # fmt: skip


def use(plan: Plan, max_fused: int) -> None:
    dense.PLANS.update(dict.fromkeys(dense.PLANS, plan))
    dense.LOGITS.update(dict.fromkeys(dense.LOGITS, plan))
    dense.FUSED, dense.MAX_FUSED = plan, max_fused
    dense._cut.cache_clear()


def calls(op: str, num_tokens: int, device: str = "cuda", cublas: bool = False) -> list[Callable[[], object]]:
    """One call of the op, or of cuBLAS's product, for each copy of its weights."""
    shape = SHAPES[op]
    copies = max(1, 300_000_000 // (2 * shape[0] * shape[1])) if device == "cuda" else 1
    weights = [torch.empty(shape, device=device, dtype=torch.bfloat16).fill_(0.01) for _ in range(copies)]
    x, bias = weights[0].new_ones(num_tokens, shape[1]), weights[0].new_ones(shape[0])
    if cublas and op == "lm_head":
        return [partial(torch.mm, x, w.T, out_dtype=torch.float32) for w in weights]
    if cublas:
        return [partial(torch.addmm, bias, x, w.T) for w in weights]
    if op == "lm_head":
        return [partial(dense.lm_head, x, w) for w in weights]
    if op == "o":
        return [partial(dense.linear, x, w, bias) for w in weights]
    given = make_qkv("120b", num_tokens, 4, device)
    return [partial(given._replace(weight=w).call, dense.norm_qkv) for w in weights]


def microseconds(functions: list[Callable[[], object]]) -> float:
    for function in functions[:2]:
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            functions[i % len(functions)]()
    times = []
    for _ in range(REPLAYS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return sorted(times[1:])[REPLAYS // 2]


def build(op: str, num_tokens: int, plan: Plan, max_fused: int) -> None:
    use(plan, max_fused)
    with compiling():
        calls(op, num_tokens, "meta")[0]()


def main() -> None:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        builds = [pool.submit(build, *case) for case in reversed(CASES)]
        for done in builds:
            done.result()
    print("op       tokens     us  TB/s  plan")
    for op, num_tokens in dict.fromkeys((op, num_tokens) for op, num_tokens, _, _ in CASES):
        rows = [(f"{plan} fused up to {fused}", plan, fused) for o, n, plan, fused in CASES if (o, n) == (op, num_tokens)]
        for name, plan, fused in [*rows, ("cuBLAS", None, 0)]:
            if plan is not None:
                use(plan, fused)
            us = microseconds(calls(op, num_tokens, cublas=plan is None))
            shape = SHAPES[op]
            print(f"{op:8} {num_tokens:6} {us:6.1f} {2e-6 * shape[0] * shape[1] / us:5.2f}  {name}", flush=True)


if __name__ == "__main__":
    main()
