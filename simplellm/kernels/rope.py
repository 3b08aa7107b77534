"""rope_append: rotate q and k by position (YaRN), then write k and v into their pages.

Half-split pairs: with a, b the halves of a head, a' = a cos - b sin, b' = b cos + a sin. Tables are float32, times
YaRN's concentration, rounded to the activations' dtype first; each product and sum is rounded, as the references do.
"""

import math

import torch

from simplellm.config import PAGE, ModelConfig
from simplellm.kernels.spans import Spans


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """YaRN's [D/2] float32 inverse frequencies: slow dimensions interpolated, fast ones kept, a ramp between."""
    half = config.head_dim // 2
    base = config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    low, high = (
        half * math.log(config.rope_original_context / (beta * 2 * math.pi)) / math.log(config.rope_theta)
        for beta in (config.rope_beta_fast, config.rope_beta_slow)
    )
    if config.rope_truncate:
        low, high = max(math.floor(low), 0), min(math.ceil(high), config.head_dim - 1)
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (config.rope_factor * base)) * (1 - keep) + (1.0 / base) * keep


def rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """cos and sin [num_positions, 2, D/2] float32, both times the concentration 0.1 ln(factor) + 1."""
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(config)
    concentration = 0.1 * math.log(config.rope_factor) + 1 if config.rope_factor > 1 else 1.0
    return (torch.stack([angle.cos(), angle.sin()], 1) * concentration).to(device)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], table [T, 2, D/2] -> x rotated, every operation rounded to x's dtype."""
    cos, sin = table.to(x.dtype)[:, :, None].unbind(1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rope_append_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: torch.Tensor,
    spans: Spans,
    pages: torch.Tensor,
    kv: torch.Tensor,
) -> torch.Tensor:
    """Rotated q [T, Hq, D]; writes rotated k and v [T, Hkv, D] into kv [2, pages, Hkv, PAGE, D].

    rope [positions, 2, D/2]; pages [rows, P]: each row's pages by position // PAGE.
    """
    angles = rope[spans.positions]
    owned, offsets = pages[spans.rows, spans.positions // PAGE], spans.positions % PAGE
    kv[0, owned, :, offsets] = rotate(k, angles)
    kv[1, owned, :, offsets] = v
    return rotate(q, angles)
