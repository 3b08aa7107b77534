"""experts on Hopper: up to FEW rows an expert kernels that stream each weight once, else kernels that fill the tensor cores."""

from __future__ import annotations

import torch

from simplellm.kernels.hopper.moe import experts_small
from simplellm.kernels.hopper.moe_prefill import experts_large
from simplellm.kernels.hopper.pack import Stream
from simplellm.kernels.hopper.router import FEW, Route


def experts(y: torch.Tensor, route: Route, gate_up: Stream, down: Stream, limit: float) -> torch.Tensor:
    """y [T, H] -> each choice's weighted row [T, 4, H]; rows of padded tokens hold anything."""
    few = route.slots is not None and 4 * len(y) <= FEW * len(gate_up.words)
    return (experts_small if few else experts_large)(y, route, gate_up, down, limit)
