"""router: the top experts of each token and their weights: softmax over the chosen logits only.

x [T, H]; W [E, H], b [E] bf16. Logits and weights are rounded to x's dtype; of equal logits the lower index wins.
"""

import torch

from simplellm.kernels.linear import linear_ref


def router_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> experts [T, k] int64, best first, and their weights [T, k] in x's dtype."""
    logits, experts = linear_ref(x, weight, bias).sort(dim=-1, descending=True, stable=True)
    return experts[:, :k], logits[:, :k].double().softmax(-1).to(x.dtype)
