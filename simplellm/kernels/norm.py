"""rmsnorm: y = round(x * (mean(x^2) + eps)^-1/2 * gain), rounded once, after the gain (spec: OpenAI's RMSNorm).

x, y [T, H] bf16 or f32; gain [H]. Moves 2 T H elements.
"""

import torch


def rmsnorm_ref(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H], gain [H] -> [T, H] in x's dtype."""
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * gain.double()).to(x.dtype)
