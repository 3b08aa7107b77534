"""linear: y = round(x W^T + b): a projection, bias added before the one rounding.

x [T, K] bf16 or f32; W [N, K], b [N] bf16; y [T, N] in x's dtype. Moves N K weights; 2 T N K FLOP.
"""

import torch

WIDE_BYTES = 64 << 20  # of float64 weights at a time: a whole lm_head would take 4.6 GB


def contract(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, in float64 [T, N], a block of output columns at a time."""
    rows = max(1, WIDE_BYTES // (8 * weight.shape[1]))
    wide = x.double()
    if len(weight) <= rows:
        return wide @ weight.double().T
    return torch.cat([wide @ block.double().T for block in weight.split(rows)], dim=-1)


def linear_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in x's dtype."""
    return (contract(x, weight) + bias.double()).to(x.dtype)
