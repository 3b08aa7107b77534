"""Times attention on the GPU at the sizes of both checkpoints: `python -m tests.kernels.hopper.bench_attention`.

Decode: us a layer and TB/s of K and V, in CUDA graphs over several layers' pages, together more than the L2 holds, for some
configurations. Chunks: ms and TFLOP/s, 256 FLOP a pair of a head's query and a key it sees. Medians; nothing is checked here.
"""

import torch

from simplellm.kernels.hopper import attention_chunk, attention_decode
from tests.kernels.hopper.timing import median_microseconds
from tests.kernels.hopper.work import make_spans

NUM_KV, DIM, PAGE = 8, 64, 128
POOL = 1 << 30  # bytes of K and V that a graph reads, at the least
WORKLOADS = [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (1000, 512), (1, 122_880), (8, 32_768)]  # sequences, keys of each
CONFIGS = [(64, 4, 4), (64, 5, 4), (64, 3, 4), (128, 3, 4), (64, 4, 2), (32, 5, 2)]  # KEYS, STAGES, num_warps
CHUNKS = [(0, 4096), (0, 16_384), (114_688, 8192)]  # start, length


def pool(num_layers, num_pages):
    kv = torch.empty(num_layers, 2, num_pages, NUM_KV, PAGE, DIM, dtype=torch.bfloat16, device="cuda")
    return kv.normal_()


def milliseconds(run, rounds):
    return median_microseconds(run, rounds) / 1000


def inputs(spans, num_decodes):
    """q, pages, spans, sinks, out and the number of pages; page 0 belongs to nobody, the others lie in random order."""
    pages = -(-max(start + length for _, start, length in spans) // PAGE)
    table = (torch.randperm(len(spans) * pages, device="cuda") + 1).view(len(spans), pages).to(torch.int32)
    q = torch.randn(sum(length for _, _, length in spans), 8 * NUM_KV, DIM, dtype=torch.bfloat16, device="cuda")
    sinks = torch.randn(8 * NUM_KV, dtype=torch.bfloat16, device="cuda")
    return q, table, make_spans(spans, num_decodes), sinks, torch.empty_like(q), len(spans) * pages + 1


def bench_decode(batch, keys):
    q, table, spans, sinks, out, num_pages = inputs([(row, keys - 1, 1) for row in range(batch)], batch)
    for window in (None, 128):
        size = batch * min(keys, window or keys) * NUM_KV * DIM * 4  # bytes of a layer that are looked at
        num_layers = max(2, min(64, POOL // size, (16 << 30) // (num_pages * NUM_KV * PAGE * DIM * 4)))
        kv = pool(num_layers, num_pages)
        for config in CONFIGS if window is None else CONFIGS[:1]:
            names = dict(zip(("KEYS", "STAGES", "num_warps"), config, strict=True))
            if window is None:
                attention_decode.FULL.update(names)

            def run(kv=kv, window=window):
                for layer in kv:
                    attention_decode.decode(q, layer, table, spans, sinks, window, out)

            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            us = milliseconds(graph.replay, 7) * 1000 / num_layers
            label = " ".join(f"{name} {value}" for name, value in names.items()) if window is None else "window"
            print(f"decode {batch:4} x {keys:6}, {label}: {us:8.2f} us, {size / us / 1e6:.2f} TB/s", flush=True)


def bench_chunk(start, length):
    q, table, spans, sinks, out, num_pages = inputs([(0, start, length)], 0)
    kv = pool(1, num_pages)[0]
    for window in (None, 128):
        seen = sum(min(position + 1, window or position + 1) for position in range(start, start + length))
        run = lambda window=window: attention_chunk.chunk(q, kv, table, spans, sinks, window, out)  # noqa: E731
        ms = milliseconds(run, 9)
        speed = 256 * 8 * NUM_KV * seen / ms / 1e9
        print(f"chunk {length} from {start}, window {window}: {ms:.3f} ms, {speed:.0f} TFLOP/s", flush=True)


def main():
    chosen = dict(attention_decode.FULL)
    print(torch.cuda.get_device_name(), torch.__version__, "chosen:", chosen, flush=True)
    for workload in WORKLOADS:
        bench_decode(*workload)
    for place in CHUNKS:
        bench_chunk(*place)


if __name__ == "__main__":
    main()
