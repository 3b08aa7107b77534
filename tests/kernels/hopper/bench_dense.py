"""Times of the dense ops of gpt-oss on the GPU at hand: the product's plans, some alternatives, and cuBLAS.

    python -m tests.kernels.hopper.bench_dense

Each line: 16 calls in a CUDA graph over copies of random weights that fill 300 MB (more than the L2), the median of 7 replays;
first the results of one call are compared with cuBLAS's ("WRONG" if they are more than 1 % off). "qkv" is the whole op, with
cuBLAS three kernels. Rings come last: a wrong barrier there would hang, and the lines before stand.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple
from unittest.mock import patch

import torch

from simplellm.kernels.hopper import dense
from simplellm.kernels.hopper.dense import PLANS, Gemv, Ring
from simplellm.kernels.hopper.launch import compiling
from tests.kernels.hopper.test_dense import Qkv, make_qkv
from tests.kernels.hopper.timing import median_microseconds

CALLS, REPLAYS = 16, 7
SHAPES = {"qkv": (5120, 2880), "linear": (2880, 4096), "logits": (201088, 2880)}
TOKENS = 1, 2, 3, 8, 16, 32
Plan = Gemv | Ring | None  # None: cuBLAS
ALTERNATIVES: dict[tuple[str, int], list[Plan]] = {
    ("qkv", 1): [Gemv(8, 8, 6, 2, 128), Gemv(16, 8, 6, 1, 255), Gemv(8, 8, 6, 1, 255), Gemv(4, 4, 6, 2, 255)],
    ("qkv", 2): [Gemv(16, 16, 6, 1, 128), Gemv(16, 8, 6, 1, 255)],
    ("qkv", 3): [Gemv(8, 8, 6, 2, 128)],
    ("linear", 1): [Gemv(8, 8, 8, 1, 255), Ring(16, 4, 5, 2)],
    ("linear", 2): [Gemv(8, 8, 8, 0, 128), Ring(16, 4, 5, 2)],
    ("linear", 3): [Gemv(8, 8, 8, 2, 128)],
    ("linear", 8): [Ring(16, 8, 2, 2)],
    ("linear", 16): [Ring(32, 4, 5, 1)],
    ("logits", 1): [Gemv(8, 8, 6, 2, 128), Gemv(4, 4, 6, 0, 96), Ring(32, 4, 8, 1)],
    ("logits", 2): [Gemv(8, 8, 6, 2, 128), Ring(32, 4, 8, 1)],
    ("logits", 8): [Ring(16, 4, 8, 2)],
    ("logits", 16): [Ring(16, 4, 15, 1)],
}


class Data(NamedTuple):
    kind: str
    weight: torch.Tensor
    x: torch.Tensor
    bias: torch.Tensor
    given: Qkv | None  # of "qkv"


def cases() -> dict[tuple[str, int, Plan], str]:
    """Each case with a mark if it is what the product runs."""
    found: dict[tuple[str, int, Plan], str] = {}
    for kind in SHAPES:
        for num_tokens in TOKENS:
            product = dense._plan(kind, num_tokens)
            for plan in (product, *ALTERNATIVES.get((kind, num_tokens), []), None):
                found.setdefault((kind, num_tokens, plan), "*" if plan == product else " ")
    return found


def make(kind: str, num_tokens: int, device: str = "cuda") -> Data:
    if kind == "qkv":
        given = make_qkv("120b", num_tokens, 4, device)
        return Data(kind, given.weight, given.x, given.bias, given)
    rows, k = SHAPES[kind]
    torch.manual_seed(num_tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    return Data(kind, draw(rows, k).mul_(k**-0.5), draw(num_tokens, k), draw(rows), None)


def call(data: Data, plan: Plan, weight: torch.Tensor) -> torch.Tensor:
    """The op's y, or q, by the plan."""
    with patch.dict(PLANS, {data.kind: {} if plan is None else {len(data.x): plan}}):
        if data.given is not None:
            return data.given._replace(weight=weight).call(dense.norm_qkv)[1]  # type: ignore[no-any-return]
        return dense.lm_head(data.x, weight) if data.kind == "logits" else dense.linear(data.x, weight, data.bias)


def build(kind: str, num_tokens: int, plan: Plan) -> str:
    with compiling() as built:
        data = make(kind, num_tokens, "meta")
        call(data, plan, data.weight)
    return "".join(f", {k.name} {k.registers} registers, {k.stack} stack, {k.shared >> 10} KB" for k in built)


def check(data: Data, of_plan: Callable[[], torch.Tensor]) -> str:
    def results(function: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        if data.given is None:
            return [function().float()]
        data.given.kv.fill_(torch.nan)
        q = function()
        return [q[: data.given.num_tokens].float(), data.given.kv.float()]

    for want, got in zip(results(partial(call, data, None, data.weight)), results(of_plan), strict=True):
        wrong = float((got - want).nan_to_num().norm() / want.nan_to_num().norm())
        if not torch.equal(want.isnan(), got.isnan()) or not wrong < 0.01:
            return f"WRONG {wrong:.3f} "
    return ""


def microseconds(functions: list[Callable[[], object]]) -> float:
    for function in functions[:2]:
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            functions[i % len(functions)]()
    return median_microseconds(graph.replay, REPLAYS) / CALLS


def main() -> None:
    marks = cases()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        builds = {case: pool.submit(build, *case) for case in marks}
        notes = {case: done.result() for case, done in builds.items()}
    print("op      tokens     us  TB/s  plan (* the product's)")
    data, copies = None, list[torch.Tensor]()
    for kind, num_tokens, plan in sorted(marks, key=lambda case: isinstance(case[2], Ring)):
        if data is None or (data.kind, len(data.x)) != (kind, num_tokens):
            data = make(kind, num_tokens)
            copies = [data.weight.clone() for _ in range(max(1, 300_000_000 // (2 * data.weight.numel())))]
        wrong = check(data, partial(call, data, plan, data.weight))
        us = microseconds([partial(call, data, plan, weight) for weight in copies])
        rate, case = 2e-6 * data.weight.numel() / us, (kind, num_tokens, plan)
        print(f"{kind:7} {num_tokens:6} {us:6.1f} {rate:5.2f} {marks[case]}{wrong}{plan or 'cuBLAS'}{notes[case]}", flush=True)


if __name__ == "__main__":
    main()
