"""Routes by plain torch: what norm_router has to make of the experts chosen and their weights."""

import contextlib
from collections.abc import Iterator

import torch

from simplellm.kernels.hopper.router import Route, pick_width


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """What torch.empty gives holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_route(experts: torch.Tensor, weights: torch.Tensor, num_experts: int, padded: int) -> Route:
    """experts [n, 4] and weights [n, 4] of the true tokens -> the Route of `padded` tokens; slots end where they do."""
    flat, device = experts.flatten(), experts.device
    pair = flat.argsort(stable=True)
    offsets = torch.bincount(flat, minlength=num_experts).cumsum(0)
    edges = [0, *offsets.tolist()]
    width = pick_width(padded, num_experts)
    slots = [(e, at) for e in range(num_experts) for at in range(edges[e], edges[e + 1], width)]
    words = [len(slots), 0, *(word for slot in slots for word in slot), 0, edges[-1]]

    def whole(values: torch.Tensor, length: int) -> torch.Tensor:
        out = torch.full((length,), 2**31 - 1, dtype=torch.int32, device=device)
        out[: len(values)] = values
        return out

    gate = torch.full((4 * padded,), float("nan"), device=device)
    gate[: len(pair)] = weights.flatten()[pair].float()
    return Route(
        offsets=whole(torch.tensor(edges), num_experts + 1),
        token=whole(pair // 4, 4 * padded),
        pair=whole(pair, 4 * padded),
        gate=gate,
        num_tokens=whole(torch.tensor([len(experts)]), 1),
        slots=whole(torch.tensor(words), len(words)),
        width=width,
    )
