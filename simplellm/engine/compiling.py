"""`simplellm compile`: every kernel that a model needs, compiled for sm_90 into Triton's cache, with or without a GPU."""

from __future__ import annotations

import torch

from simplellm.config import EngineConfig, ModelConfig
from simplellm.engine.gpu_runner import GpuRunner
from simplellm.engine.start import with_prompt_budget
from simplellm.kernels.hopper.launch import Compiled, compiling
from simplellm.kernels.hopper.pack import BLOCK_WORDS, Kind, Stream
from simplellm.model.gpt_oss import GptOss
from simplellm.model.layers import Layer
from simplellm.model.weights import Weights, list_sources


def compile_kernels(config: ModelConfig, options: EngineConfig) -> list[Compiled]:
    """Build a runner over tensors without memory: its launches compile. -> what was compiled, in order of first use."""
    with compiling() as built:
        max_context = options.max_context or config.max_context
        options = with_prompt_budget(options, max_context)
        GpuRunner(GptOss(config, hollow_weights(config), torch.bfloat16, max_context), 1024, options, max_context)
    return built


def hollow_weights(config: ModelConfig) -> Weights[Layer]:
    """Weights as `arrange` leaves them, on the "meta" device: two layers, one of each kind, stand for all."""
    shapes = {source.field: source.shape for source in list_sources(config) if source.layer in (None, 0)}
    size = config.num_heads * config.head_dim + 2 * config.num_kv_heads * config.head_dim

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def stream(kind: Kind) -> Stream:
        num, rows, groups = shapes[f"{kind}_scales"]
        words = empty(num, rows // 64, groups // 2, BLOCK_WORDS, dtype=torch.int32)
        return Stream(words, empty(num, rows, dtype=torch.float32), False, kind, rows, 32 * groups)

    def layer() -> Layer:
        kept = ("input_norm", "o_w", "o_b", "sinks", "post_norm", "router_w", "router_b")
        vectors = {name: empty(*shapes[name]) for name in kept}
        qkv = (empty(size, config.hidden_size),), (empty(size),)
        return Layer(qkv_w=qkv[0], qkv_b=qkv[1], gate_up=stream("gate_up"), down=stream("down"), **vectors)

    whole = {name: empty(*shapes[name]) for name in ("embed", "norm", "lm_head")}
    return Weights(layers=[layer() for _ in range(config.num_layers)], num_bytes=0, **whole)
