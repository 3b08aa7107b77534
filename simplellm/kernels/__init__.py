"""One function per op of the model. In bf16 on a Hopper GPU it is a kernel of `hopper/`; elsewhere its `_ref` twin, which is
the definition and runs wherever torch does.

A twin computes in float64 and rounds where the model rounds, to the dtype of its activations: float32, or bfloat16. So a
result does not depend on how a batch was cut: float64 sums differ between shapes in bits that the rounding removes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from simplellm.kernels import layer
from simplellm.kernels.attention import attention_ref
from simplellm.kernels.linear import linear_ref
from simplellm.kernels.lm_head import lm_head_ref
from simplellm.kernels.moe import experts_ref
from simplellm.kernels.norm import rmsnorm_ref as rmsnorm
from simplellm.kernels.rope import rope_table
from simplellm.kernels.router import router_ref as router
from simplellm.kernels.sampling import logprobs_ref as logprobs
from simplellm.kernels.sampling import penalise_ref as penalise
from simplellm.kernels.sampling import sample_ref as sample
from simplellm.kernels.spans import Spans, Work

__all__ = [
    "Spans",
    "Work",
    "attention",
    "embed",
    "experts",
    "final_norm",
    "linear",
    "lm_head",
    "logprobs",
    "norm_qkv",
    "norm_router",
    "on_hopper",
    "penalise",
    "rmsnorm",
    "rope_table",
    "router",
    "sample",
]

P = ParamSpec("P")
R = TypeVar("R")


@cache
def on_hopper(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the ops are kernels: bf16 on a Hopper GPU with Triton there; "meta" stands for one while compiling."""
    if dtype != torch.bfloat16 or find_spec("triton") is None:
        return False
    return device.type == "meta" or (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9)


def _op(module: str, twin: Callable[Concatenate[torch.Tensor, P], R]) -> Callable[Concatenate[torch.Tensor, P], R]:
    """The twin, or the function of its name in hopper/`module` where the first argument's values live on a Hopper GPU."""
    name = twin.__name__.removesuffix("_ref")

    @wraps(twin)
    def op(x: torch.Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        if on_hopper(x.device, x.dtype):
            kernel: Any = getattr(import_module(f"simplellm.kernels.hopper.{module}"), name)
            return cast(R, kernel(x, *args, **kwargs))
        return twin(x, *args, **kwargs)

    return cast(Callable[Concatenate[torch.Tensor, P], R], op)


attention = _op("attention", attention_ref)
experts = _op("experts", experts_ref)
final_norm = _op("norm", layer.final_norm_ref)
linear = _op("dense", linear_ref)
lm_head = _op("dense", lm_head_ref)
norm_qkv = _op("dense", layer.norm_qkv_ref)
norm_router = _op("router", layer.norm_router_ref)


def embed(tokens: torch.Tensor, newest: torch.Tensor, spans: Spans, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """layer.embed_ref, which see."""
    if on_hopper(weight.device, dtype):
        from simplellm.kernels.hopper.embed import embed as kernel

        return kernel(tokens, newest, spans, weight)
    return layer.embed_ref(tokens, newest, spans, weight, dtype)
