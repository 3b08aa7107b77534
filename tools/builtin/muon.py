"""Muon (Jordan et al. 2024): momentum whose update is made orthogonal, for matrices; stacks of them are many matrices."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """[n, rows, columns] -> the nearest semi-orthogonal matrices, roughly, by a quintic Newton-Schulz iteration."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Parameters [..., rows, columns]; those of one shape are handled together."""

    def __init__(self, params: list[nn.Parameter], lr: float = 0.02, momentum: float = 0.95, decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})
        self._shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            self._shapes.setdefault(param.shape, []).append(param)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        group = self.param_groups[0]
        for shape, params in self._shapes.items():
            grads = torch.stack([param.grad for param in params if param.grad is not None])
            state = self.state[params[0]]
            memory = state.setdefault("memory", torch.zeros_like(grads))
            memory.lerp_(grads, 1 - group["momentum"])
            ahead = grads.lerp(memory, group["momentum"])  # Nesterov's
            update = orthogonal(ahead.view(-1, *shape[-2:])).view_as(ahead).float()
            scale = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
            for param, change in zip(params, update.unbind(0), strict=True):
                param.mul_(1 - group["lr"] * group["decay"]).sub_(change, alpha=scale)
