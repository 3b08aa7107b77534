"""lm_head: logits = x W^T in float32, for the rows that draw a token only. No bias.

x [N, H] bf16 or f32; W [V, H] bf16; logits [N, V] float32, not rounded to bf16: at least as exact as the references,
and equal logits (ties that a batch's shape could break) become rare. Moves V H weights.
"""

import torch

from simplellm.kernels.linear import contract


def lm_head_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [N, H], weight [V, H] -> [N, V] float32."""
    return contract(x, weight).float()
