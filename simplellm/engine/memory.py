"""GPU memory, from the options: what an engine takes beside weights and KV pages, and words for when there is too little.

Of a step of T tokens most lives at once where q, k and v are made, or in the experts; in elements of 2 bytes a token, H the
hidden size, Q and K the columns of q and of k, I the intermediate size:

    q, k, v   8 H + 4 Q + 2 K   x, its sum with the 4 parts, both norms; qkv, q rotated; q and attention of the layer before
    experts   7 H + 2 Q + 4 I   x, norm, attention's projection, the 4 parts; what is inside the 4 experts; q and attention

Graphs keep one such set for their largest size, eager steps another one. A head's logits are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from simplellm.config import PAGE, EngineConfig, ModelConfig
from simplellm.engine.loop import ran_out
from simplellm.engine.runner import SCORE_ROWS
from simplellm.errors import OptionError
from simplellm.kernels.hopper.sampling_tables import MAX_ENTRIES

GRAPH_TOKENS, HEAD_ROWS = 2048, 256  # gpu_runner's: of the largest mixed graph, and rows whose logits exist at a time
SCORE_BYTES = 64  # a logit while prompt tokens are scored: float32 and float64, sorted with indices and scratch
FIXED = 2 << 30  # CUDA, kernels' code, some 40 graphs, cuBLAS's workspaces; a guess at an upper bound, not measured apart

CUDA = "CUDA"  # stands for FIXED among the options


def step_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Of activations in bf16, a quarter for what the allocator rounds up or cannot fit again."""
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    most = max(8 * hidden + 4 * q + 2 * k, 7 * hidden + 2 * q + 4 * inner)
    return 2 * most * num_tokens * 5 // 4


def needs(config: ModelConfig, options: EngineConfig, max_context: int) -> dict[str, int]:
    """Bytes on a Hopper GPU beside weights and pages, by the option that decides about them."""
    vocab, rows = config.vocab_size, options.max_running
    eager = step_bytes(config, options.idle_budget) if options.idle_budget > GRAPH_TOKENS else 0
    graphs = step_bytes(config, max(GRAPH_TOKENS, rows)) + 5 * vocab * min(rows, HEAD_ROWS)
    partials = 16 * config.num_heads * config.head_dim  # of decodes that are cut in pieces, in float32, for each size of graph
    row = 12 * MAX_ENTRIES + vocab // 8 + 2 * config.hidden_size + partials + 8 * -(-max_context // PAGE)
    return {
        "prompt_budget" if options.prompt_budget == options.idle_budget else "token_budget": max(
            eager, SCORE_BYTES * SCORE_ROWS * vocab
        ),
        "max_running": graphs + row * rows,
        "penalty_slots": 5 * vocab * options.penalty_slots,
        "max_context": 4 * config.head_dim * max_context,  # cos and sin
        CUDA: FIXED,
    }


def tell(needed: dict[str, int], options: EngineConfig) -> str:
    """As "prompt_budget=16384 takes 1.7 GB, ...", the largest first, what rounds to nothing left out."""
    parts = sorted(needed.items(), key=lambda part: -part[1])
    names = {name: name if name == CUDA else f"{name}={getattr(options, name)}" for name, _ in parts}
    return ", ".join(f"{names[name]} takes {size / 1e9:.1f} GB" for name, size in parts if size >= 5e7)


@contextmanager
def explained(device: torch.device, doing: str, advice: str) -> Iterator[None]:
    """Raise OptionError where the GPU's memory runs out, whoever says so: PyTorch, cuBLAS, Triton or the driver."""
    try:
        yield
    except RuntimeError as error:
        if device.type != "cuda" or not ran_out(error):
            raise
        free, total = torch.cuda.mem_get_info(device)
        left = f"{free / 1e9:.1f} of its {total / 1e9:.1f} GB are free"
        raise OptionError(f"device: {device} ran out of memory while {doing} ({left}): {advice}") from error
