"""experts: weight * (W2 swiglu(W1 x + b1) + b2) of each of a token's experts, on packed MXFP4 weights.

W1 rows interleave gate (2i) and up (2i + 1). swiglu(g, u) = g' sigmoid(alpha g') (u' + 1), g' = min(g, limit),
u' = clamp(u, -limit, limit). Rounded: the activation, each expert's weighted row. 4.25 bit a weight.
"""

import torch

from simplellm.config import ALPHA
from simplellm.kernels.linear import WIDE_BYTES

BLOCK = 32  # weights that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = E2M1 + tuple(-value for value in E2M1)  # by nibble: sign, then code
# A byte's two weights as one complex number: looking up one element is six times faster than looking up a row of two.
PAIRS = torch.tensor([complex(CODES[byte & 15], CODES[byte >> 4]) for byte in range(256)], dtype=torch.complex128)
POWERS = torch.tensor([2.0 ** (byte - 127) for byte in range(256)], dtype=torch.float64)


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks [..., G, 16] uint8 (low nibble first), scales [..., G] uint8 -> [..., 32 G] float64, exact.

    w[..., 32 g + j] = E2M1(nibble j) * 2^(scales[..., g] - 127).
    """
    pairs = PAIRS.to(blocks.device).index_select(0, blocks.int().flatten())
    powers = POWERS.to(scales.device).index_select(0, scales.int().flatten())
    return (torch.view_as_real(pairs).view(-1, BLOCK) * powers[:, None]).view(*scales.shape[:-1], -1)


def swiglu(h: torch.Tensor, limit: float) -> torch.Tensor:
    """h [..., 2 I], gate and up interleaved -> [..., I]; the gate has no lower clamp."""
    gate, up = h[..., 0::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # blocks [E, N, G, 16], scales [E, N, G] uint8, bias [E, N]


def _project(x: torch.Tensor, packed: Packed, experts: torch.Tensor) -> torch.Tensor:
    """x [g, t, K] through the matrices [N, K] of g experts -> float64 [g, t, N]."""
    blocks, scales, bias = packed
    return x.double() @ dequantise(blocks[experts], scales[experts]).mT + bias[experts].double()[:, None]


def experts_ref(
    x: torch.Tensor, route: tuple[torch.Tensor, torch.Tensor], gate_up: Packed, down: Packed, limit: float
) -> torch.Tensor:
    """x [T, H] -> each choice's weighted row [T, k, H] in x's dtype. route: experts and weights [T, k]; down has N = H.

    Experts are unpacked when a token needs them, as many at a time as WIDE_BYTES of float64 hold, and forgotten again.
    """
    experts, weights = route
    num_choices = experts.shape[1]
    rows = x.new_empty(experts.numel(), x.shape[1])  # of each token's choices
    chosen, shares = experts.flatten(), weights.flatten().double()
    for group in chosen.unique().split(max(1, WIDE_BYTES // (16 * gate_up[0][0].numel()))):
        mine = chosen == group[:, None]  # [g, T k]
        num = mine.sum(1)
        place = mine.byte().argsort(dim=1, descending=True, stable=True)[:, : int(num.max())]  # an expert's rows, padded
        inner = swiglu(_project(x[place // num_choices], gate_up, group), limit).to(x.dtype)
        outer = (_project(inner, down, group) * shares[place][..., None]).to(x.dtype)
        real = torch.arange(place.shape[1], device=x.device) < num[:, None]
        rows[place[real]] = outer[real]
    return rows.view(*experts.shape, -1)
