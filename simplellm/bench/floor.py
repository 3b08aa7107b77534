"""What a step must read and compute at the least, from the model's shapes; and how fast this card reads, measured."""

from __future__ import annotations

import torch

from simplellm.config import ModelConfig

CODE_BYTES = 17 / 32  # of an MXFP4 weight: half a byte and a 32nd of a scale


def experts_hit(config: ModelConfig, num_tokens: int) -> float:
    """Experts of a layer that `num_tokens` tokens choose among them, if routing is uniform."""
    e = config.num_experts
    return e * (1 - (1 - config.experts_per_token / e) ** num_tokens)


def op_bytes(config: ModelConfig, batch: int, context: int) -> dict[str, float]:
    """Bytes that each op of one layer reads in a decode step of `batch` sequences of `context` tokens; lm_head's of the step.

    Weights once, KV once; activations are not counted. Attention is that of a full or of a window layer.
    """
    c = config
    q, k = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    hit = experts_hit(c, batch)
    return {
        "qkv": 2.0 * (q + 2 * k) * c.hidden_size,
        "attention_full": 4.0 * k * batch * context,
        "attention_window": 4.0 * k * batch * min(context, c.sliding_window),
        "output": 2.0 * q * c.hidden_size,
        "router": 2.0 * c.num_experts * c.hidden_size,
        "gate_up": CODE_BYTES * hit * 2 * c.intermediate_size * c.hidden_size,
        "down": CODE_BYTES * hit * c.intermediate_size * c.hidden_size,
        "lm_head": 2.0 * c.vocab_size * c.hidden_size,
    }


def step_bytes(config: ModelConfig, batch: int, context: int) -> float:
    """Bytes of a whole decode step."""
    layers = {"attention_full": len(config.full_layers), "attention_window": len(config.window_layers), "lm_head": 1}
    return sum(layers.get(op, config.num_layers) * size for op, size in op_bytes(config, batch, context).items())


def prompt_flops(config: ModelConfig, num_tokens: int) -> float:
    """Operations that the prompt of one sequence takes: matrices, attention over what each query sees, lm_head once."""
    c = config
    q, k = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    dense = 2.0 * c.hidden_size * (2 * q + 2 * k)
    experts = 6.0 * c.experts_per_token * c.hidden_size * c.intermediate_size
    w = min(c.sliding_window, num_tokens)
    full = num_tokens * (num_tokens + 1) / 2
    window = w * num_tokens - w * (w - 1) / 2
    attention = 4.0 * q * (len(c.full_layers) * full + len(c.window_layers) * window)
    return c.num_layers * num_tokens * (dense + experts) + attention + 2.0 * c.vocab_size * c.hidden_size


def read_bandwidth(device: torch.device, num_bytes: int = 4 << 30) -> float:
    """Bytes per second that a kernel which does nothing else reads on a GPU: the ceiling of every step."""
    from simplellm.kernels.hopper.read import read

    times = []
    with torch.cuda.device(device):  # kernels and events go to the current one
        data = torch.empty(num_bytes // 4, dtype=torch.int32, device=device).random_()
        for _ in range(8):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            read(data)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return float(num_bytes / sorted(times)[len(times) // 2])
