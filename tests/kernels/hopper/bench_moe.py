"""Times of the experts of few tokens on the GPU at hand, by kernel and configuration, next to a plain read of the same weights.

    python -m tests.kernels.hopper.bench_moe [seconds]

Each line: 16 random routings in a CUDA graph, going round 3.4 GB of random packed weights, the median of 7 replays; time of one
call, gate_up and down, and TB/s of the weights of the experts in use, each counted once. "read" loads the same bytes, the
experts one after another in each matrix, and does nothing with them: the ceiling, two launches. A line's result is first
compared with that of the product's configuration. Kernels are compiled before, by processes that share Triton's cache. A kernel
that does not end within some seconds the first time ends the process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper import moe
from simplellm.kernels.hopper.launch import compiling, launch, num_sms
from simplellm.kernels.hopper.pack import BLOCK_WORDS, Kind, Stream
from simplellm.kernels.hopper.router import Route, pick_width
from tests.kernels.hopper.timing import median_microseconds

HIDDEN = INNER = 2880
CALLS, REPLAYS, PATIENCE = 16, 7, 5.0
EXPERT_BYTES = 3 * HIDDEN * INNER * 17 // 32
PIECE = 8192  # words that "read" loads at a time


class Pair(NamedTuple):
    """moe.py's two launches with an entry of its CONFIG, or the product's"""

    width: int
    config: tuple[int, int, int, int, bool, int] | None = None


FEW = [Pair(8), Pair(8, (1, 128, 4, 4, True, 128)), Pair(8, (2, 128, 4, 4, True, 128)), Pair(8, (5, 64, 4, 4, True, 128)),
       Pair(8, (3, 64, 4, 4, True, 128))]  # fmt: skip
MANY = [Pair(8), Pair(16), Pair(16, (9, 128, 4, 2, True, 255)),
        Pair(16, (3, 256, 8, 2, True, 128)), Pair(16, (5, 128, 8, 2, True, 128)), Pair(16, (15, 64, 4, 2, True, 255)),
        Pair(16, (9, 128, 8, 2, False, 128))]  # fmt: skip
CASES: list[tuple[int, int, Pair]] = [
    *[(num_experts, 1, v) for num_experts in (128, 32) for v in FEW],
    *[(num_experts, T, v) for T in (2, 4, 8) for num_experts in (128, 32) for v in FEW[:2]],
    *[(32, 64, v) for v in MANY],
    *[(128, 64, v) for v in MANY[:2]],
]


def watched(name: str, function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """function(), waited for; a kernel that has not ended after PATIENCE seconds ends the process."""
    print(f"  {name}", end="", flush=True)
    out = function()
    done = torch.cuda.Event()
    done.record()
    limit = time.monotonic() + PATIENCE
    while not done.query():
        if time.monotonic() > limit:
            print(f"\n{name} does not end", flush=True)
            os._exit(3)
    print("\r", end="", flush=True)
    return out


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def build(variant: Pair) -> str:
    """Fill Triton's cache; -> registers, stack and shared memory."""

    def stream(kind: Kind, rows: int) -> Stream:
        words = meta(32, rows // 64, HIDDEN // 64, BLOCK_WORDS)
        return Stream(words, meta(32, rows, dtype=torch.float32), False, kind, rows, HIDDEN)

    route = Route(meta(33), meta(32), meta(32), meta(32, dtype=torch.float32), meta(1), meta(100), variant.width)
    with compiling() as built:
        call(variant, meta(8, HIDDEN, dtype=torch.bfloat16), route, (stream("gate_up", 2 * INNER), stream("down", HIDDEN)))
    return f"{built[0].registers} registers, {built[0].stack} stack, {built[0].shared >> 10} KB"


def call(variant: Pair, y: torch.Tensor, route: Route, streams: tuple[Stream, Stream]) -> torch.Tensor:
    moe.CONFIG[variant.width] = variant.config or PRODUCT[variant.width]
    return moe.experts_small(y, route, *streams, 7.0)


def label(variant: Pair) -> str:
    config = "product" if variant.config is None else ",".join(str(int(x)) for x in variant.config)
    return f"pair N={variant.width} {config}"


PRODUCT = dict(moe.CONFIG)


@triton.jit
def read_kernel(w_ptr, slots_ptr, out_ptr, WORDS: tl.constexpr, PIECE: tl.constexpr):
    """The first WORDS words of each slot's matrix, whole pieces of them; slots of one expert follow each other."""
    gdc_wait()
    gdc_launch_dependents()
    each = WORDS // PIECE
    total = tl.zeros([PIECE], tl.int32)
    for piece in tl.range(tl.program_id(0), tl.load(slots_ptr) * each, tl.num_programs(0), num_stages=3):
        e = tl.load(slots_ptr + 2 + 2 * (piece // each)).to(tl.int64)
        total ^= tl.load(w_ptr + e * WORDS + piece % each * PIECE + tl.arange(0, PIECE))
    tl.store(out_ptr + tl.program_id(0) * 256 + tl.arange(0, 256), tl.xor_sum(tl.reshape(total, [256, PIECE // 256]), 1))


def read(route: Route, streams: tuple[Stream, Stream]) -> torch.Tensor:
    grid = 3 * num_sms()
    out = torch.empty(grid * 256, dtype=torch.int32, device=route.offsets.device)
    for stream in streams:
        words = stream.words[0].numel()
        launch(read_kernel, (grid,), stream.words, route.slots, out, WORDS=words, PIECE=PIECE, num_warps=8)
    return out


def make_stream(kind: Kind, experts: int, rows: int, columns: int) -> Stream:
    shape = (experts, rows // 64, columns // 64, BLOCK_WORDS)
    words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
    words.view(torch.uint8)[..., 2048:] = torch.randint(243, 248, (*words.shape[:3], 128), dtype=torch.uint8, device="cuda")
    return Stream(words, torch.randn(experts, rows, device="cuda"), False, kind, rows, columns)


@cache
def make_routes(experts: int, tokens: int, width: int) -> list[tuple[Route, int]]:
    """CALLS of them, the same whatever the width, and the number of experts in use."""
    g = torch.Generator().manual_seed(1000 * experts + tokens)
    routes = []
    for _ in range(CALLS):
        chosen = torch.rand(tokens, experts, generator=g).topk(4).indices.flatten()
        pair = chosen.argsort(stable=True)
        edges = [0, *chosen.bincount(minlength=experts).cumsum(0).tolist()]
        slots = [(e, at) for e in range(experts) for at in range(edges[e], edges[e + 1], width)]
        words = [len(slots), 0, *(word for slot in slots for word in slot), 0, 4 * tokens]
        whole = words + [2**31 - 1] * (2 * (experts + 4 * tokens // width) + 4 - len(words))
        lists = [
            torch.tensor(x, dtype=torch.int32).cuda() for x in (edges, (pair // 4).tolist(), pair.tolist(), [tokens], whole)
        ]
        gate = torch.rand(4 * tokens, generator=g).cuda()
        used = sum(a < b for a, b in zip(edges, edges[1:], strict=False))
        routes.append((Route(*lists[:3], gate, lists[3], lists[4], width), used))
    return routes


def timed(calls: list[Callable[[], object]]) -> float:
    """Microseconds of one call, the median of replays of all."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in calls:
            function()
    return median_microseconds(graph.replay, REPLAYS) / len(calls)


def build_read() -> str:
    with compiling() as built:
        for rows in (2 * INNER, HIDDEN):
            words = rows // 64 * (HIDDEN // 64) * BLOCK_WORDS
            launch(read_kernel, (1,), meta(8), meta(8), meta(8), WORDS=words, PIECE=PIECE, num_warps=8)
    return f"{built[0].registers} registers"


def main() -> None:
    start = time.monotonic()
    limit = start + float(sys.argv[1] if len(sys.argv) > 1 else 55)
    notes: dict[Pair, str] = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        reader = pool.submit(build_read)
        builds = {variant: pool.submit(build, variant) for variant in dict.fromkeys(v for _, _, v in CASES)}
        weights = {
            E: [(make_stream("gate_up", E, 2 * INNER, HIDDEN), make_stream("down", E, HIDDEN, INNER)) for _ in range(256 // E)]
            for E in (128, 32)
        }
        for variant, done in builds.items():
            try:
                notes[variant] = done.result()
            except Exception as error:
                notes[variant] = f"FAILED {error!r:.120}"
        reader.result()
    print(f"compiled in {time.monotonic() - start:.0f} s")
    for variant, note in notes.items():
        print(f"  {label(variant)}: {note}")
    print("  E  T      us  TB/s", flush=True)
    want: dict[tuple[int, int], torch.Tensor] = {}
    for E, T, variant in CASES:
        if time.monotonic() > limit:
            return print("out of time")
        layers = [weights[E][i % len(weights[E])] for i in range(CALLS)]
        y = torch.randn(T, HIDDEN, generator=torch.Generator().manual_seed(T)).cuda().bfloat16()
        routes = make_routes(E, T, variant.width)
        bytes_ = sum(used for _, used in routes) / CALLS * EXPERT_BYTES
        if (E, T) not in want:
            first = make_routes(E, T, pick_width(T, E))
            want[E, T] = call(Pair(first[0][0].width), y, first[0][0], layers[0])
            us = timed(
                [partial(read, route, streams) for (route, _), streams in zip(make_routes(E, T, 4 * T), layers, strict=True)]
            )
            print(f"{E:3d} {T:2d} {us:7.1f} {bytes_ / us / 1e6:5.2f}  read", flush=True)
        try:
            functions = [partial(call, variant, y, route, streams) for (route, _), streams in zip(routes, layers, strict=True)]
            got = watched(label(variant), functions[0])
            off = float((got.float() - want[E, T].float()).norm() / want[E, T].float().norm())
            us = timed(functions)
        except Exception as error:
            print(f"{E:3d} {T:2d}          {label(variant)} {error!r:.160}", flush=True)
            continue
        wrong = "" if off < 0.005 else f"WRONG {off:.3f} "
        print(f"{E:3d} {T:2d} {us:7.1f} {bytes_ / us / 1e6:5.2f}  {wrong}{label(variant)}", flush=True)


if __name__ == "__main__":
    main()
