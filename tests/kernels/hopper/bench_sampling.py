"""us per draw in a CUDA graph, for N rows of 201,088 logits: python -m tests.kernels.hopper.bench_sampling

floor: the time in which 4.5 TB/s read the logits once. The logits rotate over more than the L2 holds.
"""

import torch

from simplellm.engine.gpu_rows import GpuRows, LogprobTensors
from simplellm.request import RowStart, Sampling
from tests.kernels.hopper.timing import median_microseconds

VOCAB_SIZE = 201_088
KINDS = {
    "greedy": ({"temperature": 0.0}, False),
    "temperature": ({}, False),
    "temperature, full": ({}, True),
    "top-p 0.95": ({"top_p": 0.95}, True),
    "top-k 40, top-p 0.95": ({"top_k": 40, "top_p": 0.95}, True),
    "logprobs": ({"logprobs": True}, True),
}


def measure(num_rows: int, options: dict, full: bool) -> float:
    device = torch.device("cuda")
    rows = GpuRows(num_rows, 1, VOCAB_SIZE, device)
    rows.start([RowStart(i, Sampling(**options), i, 10, (), None, frozenset()) for i in range(num_rows)])
    copies = max(2, 128 // num_rows)
    logits = [torch.randn(num_rows, VOCAB_SIZE, device=device) * 2.5 for _ in range(copies)]
    draws = torch.tensor([[i, 100] for i in range(num_rows)], dtype=torch.int32, device=device)
    tokens, newest = (torch.zeros(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    out = LogprobTensors.empty(num_rows, device)
    rows.draw(logits[0], draws, tokens, newest, out, full)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in logits:
            rows.draw(one, draws, tokens, newest, out, full)
    return median_microseconds(graph.replay) / copies


def main() -> None:
    sizes = (1, 64, 256)
    print(f"{'us per draw':<24}" + "".join(f"{f'N = {n}':>10}" for n in sizes))
    print(f"{'floor':<24}" + "".join(f"{n * VOCAB_SIZE * 4 / 4.5e6:>10.1f}" for n in sizes))
    for name, (options, full) in KINDS.items():
        print(f"{name:<24}" + "".join(f"{measure(n, options, full):>10.1f}" for n in sizes), flush=True)


if __name__ == "__main__":
    main()
