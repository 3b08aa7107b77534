"""Times ways to do decode attention on the GPU: `python -m tests.kernels.hopper.bench_attention_decode`.

For each workload, variant and number of pieces aimed at, two times in us a call: `alone`, calls in a row; and `before` a
projection of one token, which fills the card, empties the L2 and begins to read its weights when it may, as in a step: the time
of pairs less that of the projections alone. In CUDA graphs, each call with pages of its own; items have the room that
a step's have. Medians; nothing is checked here. Kernels are compiled first, by several processes.
"""

import gc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import torch

from simplellm.kernels.hopper import attention_decode, dense
from simplellm.kernels.hopper.launch import compiling
from simplellm.kernels.spans import COUNTS, ITEM, TILE_FIELDS, Spans, Work
from tests.kernels.hopper.timing import median_microseconds
from tests.kernels.hopper.work import make_spans

NUM_KV, DIM, PAGE = 8, 64, 128
WIDTH = 1024  # of the page table
POOL = 3 << 29  # bytes of K and V that a graph reads, at the least, if that is not too many calls
MOST, FEWEST = 48, 4  # calls a graph
FILLER = 2880, 4096  # of the projection behind it: 24 MB
WORKLOADS = [
    (1, 1100),
    (1, 2100),
    (2, 1050),
    (8, 1050),
    (64, 1050),
    (256, 1050),
    (1, 122_880),
    (8, 32_768),
]  # sequences, keys of each
WINDOWS = [(1, 1100), (8, 1050), (64, 1050)]


@dataclass(frozen=True)
class Variant:
    """The kernel with other options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    targets: tuple[int, ...] = (64, 128)  # numbers of pieces to time

    def decode(self, q, kv, pages, spans, sinks, window, out):
        options = attention_decode.FULL if window is None else attention_decode.ONE_STEP
        before = dict(options)
        options.update(self.options)
        try:
            attention_decode.decode(q, kv, pages, spans, sinks, window, out)
        finally:
            options.clear()
            options.update(before)


FULLS = [
    Variant("product", targets=(4, 8, 32, 64, 128, 256)),
    Variant("128 keys a step", {"KEYS": 128, "STAGES": 2}),
    Variant("4 warps", {"num_warps": 4}),
]
WINDOW_VARIANTS = [Variant("product"), Variant("8 warps", {"num_warps": 8})]


def compile_variant(place):
    """In a process of its own: the cache on disk then holds the kernel. (128, -1): the projection."""
    window, number = place
    variant = (FULLS if window is None else WINDOW_VARIANTS)[number]

    def meta(*shape, dtype=torch.int32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, kv = meta(8, 8 * NUM_KV, DIM, dtype=torch.bfloat16), meta(2, 9, NUM_KV, PAGE, DIM, dtype=torch.bfloat16)
    spans = Spans(meta(8), meta(8), None, Work(meta(COUNTS), meta(64, ITEM), meta(0, TILE_FIELDS)))
    with compiling():
        if number < 0:
            n, k = FILLER
            bf16 = torch.bfloat16
            dense.linear(meta(1, k, dtype=bf16), meta(n, k, dtype=bf16), meta(n, dtype=bf16))
            return
        variant.decode(q, kv, meta(8, WIDTH), spans, q[0, :, 0].contiguous(), window, torch.empty_like(q))


def capture(run):
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(graph, rounds=11):
    return median_microseconds(graph.replay, rounds)


def with_room(spans, num_items):
    """A step's items have room for decodes + PIECES; programs beyond the true ones start, too."""
    work = spans.work
    items = work.items.new_zeros(num_items, ITEM)
    items[: len(work.items)] = work.items
    return replace(spans, work=replace(work, items=items))


class Bench:
    def __init__(self):
        n, k = FILLER
        self.weights = torch.randn(MOST, n, k, dtype=torch.bfloat16, device="cuda")
        self.x = torch.randn(1, k, dtype=torch.bfloat16, device="cuda")
        self.bias = torch.randn(n, dtype=torch.bfloat16, device="cuda")
        self.fillers = {}

    def filler(self, i):
        dense.linear(self.x, self.weights[i], self.bias)

    def fillers_alone(self, calls):
        if calls not in self.fillers:
            self.fillers[calls] = microseconds(capture(lambda: [self.filler(i) for i in range(calls)]))
        return self.fillers[calls]

    def workload(self, batch, keys, window, variants):
        size = batch * min(keys, window or keys) * NUM_KV * DIM * 4  # bytes of a call
        owned = -(-keys // PAGE)
        calls = max(FEWEST, min(MOST, POOL // size, (12 << 30) // (batch * owned * NUM_KV * PAGE * DIM * 4)))
        kv = torch.empty(calls, 2, batch * owned + 1, NUM_KV, PAGE, DIM, dtype=torch.bfloat16, device="cuda").normal_()
        table = torch.zeros(batch, WIDTH, dtype=torch.int32, device="cuda")
        table[:, :owned] = torch.randperm(batch * owned, device="cuda").view(batch, owned) + 1
        q = torch.randn(batch, 8 * NUM_KV, DIM, dtype=torch.bfloat16, device="cuda")
        sinks, out = torch.randn(8 * NUM_KV, dtype=torch.bfloat16, device="cuda"), torch.empty_like(q)
        for variant in variants:
            done = set()  # with many sequences, numbers of items: targets that cut alike need no two times
            for target in variant.targets if window is None else (64,):
                spans = make_spans([(row, keys - 1, 1) for row in range(batch)], batch, target=target)
                num_items = len(spans.work.items)
                if batch >= 64 and num_items in done:
                    continue
                done.add(num_items)
                spans = with_room(spans, batch + target)

                def one(i, variant=variant, spans=spans):
                    variant.decode(q, kv[i], table, spans, sinks, window, out)

                alone = microseconds(capture(lambda one=one: [one(i) for i in range(calls)])) / calls
                pairs = microseconds(capture(lambda one=one: [(self.filler(i), one(i)) for i in range(calls)]))
                before = (pairs - self.fillers_alone(calls)) / calls
                pieces = f"{target:4} pieces" if window is None else "window     "
                label = f"{batch:4} x {keys:6} {variant.name:28} {pieces}"
                rates = f"{size / alone / 1e6:5.2f} {size / before / 1e6:5.2f} TB/s"
                print(f"{label}: alone {alone:7.2f}, before {before:7.2f} us, {rates}", flush=True)


def main():
    places = [(128, -1)] + [(None, i) for i in range(len(FULLS))] + [(128, i) for i in range(len(WINDOW_VARIANTS))]
    with ProcessPoolExecutor(len(places), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_variant, places))
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    gc.collect()
    gc.freeze()  # each capture collects garbage: let it not look at what will stay
    bench = Bench()
    for workload in WORKLOADS:
        bench.workload(*workload, None, FULLS)
    for workload in WINDOWS:
        bench.workload(*workload, 128, WINDOW_VARIANTS)


if __name__ == "__main__":
    main()
