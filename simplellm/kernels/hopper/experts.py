"""experts on Hopper: the streaming kernels for few tokens, the tensor cores' kernels for many."""

from __future__ import annotations

import torch

from simplellm.kernels.hopper.moe import experts_small
from simplellm.kernels.hopper.moe_fused import WIDTH, experts_fused
from simplellm.kernels.hopper.moe_prefill import experts_large
from simplellm.kernels.hopper.pack import Stream
from simplellm.kernels.hopper.router import Route

FUSED = 0  # tokens up to which one launch does both matrices: none until it is measured
FEW = 24  # mean rows an expert up to which the streaming kernels, which read every weight about once, are the faster


def experts(y: torch.Tensor, route: Route, gate_up: Stream, down: Stream, limit: float) -> torch.Tensor:
    """y [T, H] -> each choice's weighted row [T, 4, H]; rows of padded tokens hold anything."""
    if len(y) <= FUSED and route.width == WIDTH and gate_up.big == down.big:
        return experts_fused(y, route, gate_up, down, limit)
    few = route.slots is not None and 4 * len(y) <= FEW * len(gate_up.words)
    return (experts_small if few else experts_large)(y, route, gate_up, down, limit)
