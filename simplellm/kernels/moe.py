"""experts: sum over a token's experts of weight * (W2 swiglu(W1 x + b1) + b2), on packed MXFP4 weights.

W1 rows interleave gate (2i) and up (2i + 1). swiglu(g, u) = g' sigmoid(alpha g') (u' + 1), g' = min(g, limit),
u' = clamp(u, -limit, limit). Rounded: the activation, each expert's weighted row, the sum. One expert: 4.25 bit a weight.
"""

import torch

from simplellm.config import ALPHA
from simplellm.kernels.linear import WIDE_BYTES

BLOCK = 32  # weights that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = E2M1 + tuple(-value for value in E2M1)  # by nibble: sign, then code
PAIRS = torch.tensor([(CODES[byte & 15], CODES[byte >> 4]) for byte in range(256)], dtype=torch.float64)
POWERS = torch.tensor([2.0 ** (byte - 127) for byte in range(256)], dtype=torch.float64)


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks [N, G, 16] uint8 (low nibble first), scales [N, G] uint8 -> [N, 32 G] float64, exact.

    w[r, 32 g + j] = E2M1(nibble j) * 2^(scales[r, g] - 127).
    """
    values = PAIRS.to(blocks.device)[blocks.int()].flatten(-2)  # [N, G, 32]
    return (values * POWERS.to(scales.device)[scales.int()][..., None]).flatten(-2)


def swiglu(h: torch.Tensor, limit: float) -> torch.Tensor:
    """h [T, 2 I], gate and up interleaved -> [T, I]; the gate has no lower clamp."""
    gate, up = h[..., 0::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def _project(x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [t, K] through one expert's packed matrix [N, K] -> float64 [t, N]."""
    rows = max(1, WIDE_BYTES // (8 * x.shape[1]))
    wide = x.double()
    parts = [wide @ dequantise(b, s).T for b, s in zip(blocks.split(rows), scales.split(rows), strict=True)]
    return torch.cat(parts, dim=-1) + bias.double()


def experts_ref(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    limit: float,
) -> torch.Tensor:
    """x [T, H] -> [T, H] in x's dtype.

    experts, weights [T, k]; gate_up and down: blocks [E, N, G, 16] and scales [E, N, G] uint8, bias [E, N],
    with N = 2 I and H. An expert is unpacked when a token needs it, and forgotten again.
    """
    rows = x.new_zeros(*experts.shape, x.shape[1])  # [T, k, H]
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        inner = swiglu(_project(x[token], *(part[expert] for part in gate_up)), limit).to(x.dtype)
        outer = _project(inner, *(part[expert] for part in down))
        rows[token, choice] = (outer * weights[token, choice, None].double()).to(x.dtype)
    return rows.double().sum(1).to(x.dtype)
