"""A layer's weights as the ops take them: for the twins as they are in the files, for Hopper stacked and packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simplellm import kernels
from simplellm.model.weights import LayerWeights


@dataclass
class Layer:
    """Shapes as in LayerWeights, which says where they come from."""

    input_norm: Tensor
    qkv_w: tuple[Tensor, ...]  # rows of q, then k, then v: three tensors, or one
    qkv_b: tuple[Tensor, ...]
    o_w: Tensor
    o_b: Tensor
    sinks: Tensor
    post_norm: Tensor
    router_w: Tensor
    router_b: Tensor
    gate_up: Any  # blocks, scales, bias; or hopper's Stream
    down: Any


def arrange(w: LayerWeights, dtype: torch.dtype = torch.bfloat16) -> Layer:
    """For activations of `dtype`, on the device that holds `w`. The twins' form views `w`; Hopper's matrices are new."""
    qkv_w, qkv_b = (w.q_w, w.k_w, w.v_w), (w.q_b, w.k_b, w.v_b)
    gate_up, down = (w.gate_up_blocks, w.gate_up_scales, w.gate_up_b), (w.down_blocks, w.down_scales, w.down_b)
    experts: tuple[Any, Any] = gate_up, down
    if kernels.on_hopper(w.q_w.device, dtype):
        from simplellm.kernels.hopper.pack import pack

        qkv_w, qkv_b = (torch.cat(qkv_w),), (torch.cat(qkv_b),)  # type: ignore[assignment]
        experts = pack("gate_up", *gate_up), pack("down", *down)
    kept = ("input_norm", "o_w", "o_b", "sinks", "post_norm", "router_w", "router_b")
    return Layer(qkv_w=qkv_w, qkv_b=qkv_b, gate_up=experts[0], down=experts[1], **{name: getattr(w, name) for name in kept})
