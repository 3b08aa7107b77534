"""What a checkpoint is and what fits in a GPU's memory: `simplellm info`. Reads config.json and the shards' headers.

What fits follows the engine's own accounting with the default options: weights, what the engine itself takes
(engine/memory.py), and the rest is KV pages. A request holds one page for every PAGE tokens in the full-attention layers and
two in the window layers.
"""

from __future__ import annotations

import math
from pathlib import Path

from simplellm.config import PAGE, EngineConfig, ModelConfig
from simplellm.engine import memory
from simplellm.engine.start import with_prompt_budget
from simplellm.model.checkpoint import find_layout, find_tensors, load_config
from simplellm.model.weights import Source, check_tensors, list_sources

CARDS_GB = (80.0, 141.0)  # H100, H200
CONTEXTS = (4096, 32768, 131072)
WINDOW_PAGES = 2  # of a decoding request: the window's tokens, and where the next one goes


def describe(path: str | Path, memory_gb: float | None = None) -> str:
    """A report of some lines on the checkpoint in folder `path`; memory_gb: of one GPU, in 1e9 bytes.

    Raises CheckpointError for a checkpoint that could not be loaded, as far as its headers show.
    """
    path = Path(path)
    config, layout = load_config(path), find_layout(path)
    sources = list_sources(config, layout)
    found = find_tensors(path, layout)
    check_tensors(path, sources, found)
    num_shards = len({entry.file for entry in found.values()})
    lines = [f"{path}: gpt-oss, {layout} layout, {len(found)} tensors in {num_shards} file(s)"]
    lines += _describe_shape(config) + _describe_sizes(config)
    for card in CARDS_GB if memory_gb is None else (memory_gb,):
        lines += _describe_fit(config, card)
    return "\n".join(lines)


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """All parameters, and those one token uses: lm_head counted, the embedding table not, as OpenAI counts."""
    total = active = 0
    for source in list_sources(config):
        number = _parameters(source)
        total += number
        if source.field.startswith(("gate_up_", "down_")):
            active += number * config.experts_per_token // config.num_experts
        elif source.field != "embed":
            active += number
    return total, active


def count_bytes(config: ModelConfig) -> int:
    """Bytes of the tensors on disk, and on the device."""
    return sum(source.num_bytes for source in list_sources(config))


def count_pages(config: ModelConfig, memory_gb: float) -> int:
    """KV pages in bf16 that fit beside the weights; negative if these do not fit."""
    return math.floor((memory_gb * 1e9 - count_bytes(config) - count_spare(config)) / config.page_bytes())


def count_spare(config: ModelConfig) -> int:
    """Bytes that an engine with the default options takes on a Hopper GPU beside weights and pages."""
    options = with_prompt_budget(EngineConfig(), config.max_context)
    return sum(memory.needs(config, options, config.max_context).values())


def count_requests(config: ModelConfig, num_pages: int, num_tokens: int) -> int:
    """Decoding requests of `num_tokens` tokens that `num_pages` hold while one more runs a prompt chunk."""
    chunk = EngineConfig.token_budget // PAGE - 1  # window pages of a chunk beyond the two counted for each request
    each = -(-num_tokens // PAGE) + WINDOW_PAGES
    return max(0, min((num_pages - chunk) // each, EngineConfig.max_running))


def _parameters(source: Source) -> int:
    if source.field.endswith("_scales"):  # belong to the blocks' parameters
        return 0
    return math.prod(source.shape) * (2 if source.field.endswith("_blocks") else 1)


def _describe_shape(config: ModelConfig) -> list[str]:
    window, full = len(config.window_layers), len(config.full_layers)
    return [
        f"  layers       {config.num_layers}: {window} see {config.sliding_window} tokens, {full} see all",
        f"  hidden       {config.hidden_size}",
        f"  attention    {config.num_heads} query heads, {config.num_kv_heads} KV heads of {config.head_dim}",
        f"  experts      {config.num_experts} a layer, {config.experts_per_token} a token, "
        f"intermediate size {config.intermediate_size}",
        f"  vocabulary   {config.vocab_size}",
        f"  context      {config.max_context} tokens (YaRN: {config.rope_original_context} x {config.rope_factor:g})",
    ]


def _describe_sizes(config: ModelConfig) -> list[str]:
    total, active = count_parameters(config)
    return [
        f"  parameters   {total:,}, of which {active:,} per token",
        f"  weights      {count_bytes(config):,} bytes (MXFP4 experts, the rest in bf16)",
        f"  KV page      {config.page_bytes():,} bytes in bf16: {PAGE} tokens of {config.page_layers} layers",
    ]


def _describe_fit(config: ModelConfig, memory_gb: float) -> list[str]:
    spare = count_spare(config)
    title = f"In {memory_gb:g} GB of GPU memory, with {spare / 1e9:.1f} GB left for activations and CUDA:"
    num_pages = count_pages(config, memory_gb)
    if num_pages < 1 + WINDOW_PAGES:
        short = (count_bytes(config) + spare) / 1e9
        return [title, f"  does not fit: weights and headroom alone are {short:.1f} GB"]
    lines = [title, f"  KV           {num_pages:,} pages, {num_pages * PAGE:,} tokens in the full-attention layers"]
    for num_tokens in CONTEXTS:
        if num_tokens <= config.max_context:
            number = count_requests(config, num_pages, num_tokens)
            most = " (max_running)" if number == EngineConfig.max_running else ""
            pages = f"{-(-num_tokens // PAGE)} + {WINDOW_PAGES} pages each"
            lines.append(f"  requests     {number:,}{most} of {num_tokens:,} tokens ({pages})")
    return lines
