"""Tiny random checkpoints in the official layouts, for tests: fast, deterministic by seed, on the CPU.

The default has four layers, so that a mistake in a window layer can travel, and 4 and 2 MXFP4 groups along its two
quantised axes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simplellm.model.checkpoint import INDEX, Layout, load_config
from simplellm.model.weights import list_sources
from tools.make_checkpoint import (
    Flavour,
    add_tokenizer,
    encode_header,
    hf_config,
    list_entries,
    original_config,
    split_shards,
    write_checkpoint,
    write_json,
)
from tools.tiny_tokenizer import tiny_tokenizer

__all__ = ["make", "make_hollow", "tiny_tokenizer"]


def make(
    path: Path,
    *,
    layers: int = 4,
    experts: int = 8,
    hidden: int = 128,
    intermediate: int = 64,
    heads: int = 8,
    kv_heads: int = 1,
    head_dim: int = 64,
    experts_per_token: int = 4,
    vocab: int = 320,
    window: int = 128,
    seed: int = 0,
    layout: Layout = "hf",
    shards: int = 1,
    tokenizer: dict[str, Any] | None = None,
    large_sinks: bool = False,
    big_experts: bool = False,
    **overrides: Any,
) -> Path:
    """Write a checkpoint into folder `path` and return it.

    `overrides` go into config.json as they are, in the layout's own spelling. Without a tokenizer there are no eos ids.
    """
    fields: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads}
    fields |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab, "sliding_window": window}
    fields |= {"experts_per_token": experts_per_token}
    flavour = Flavour(seed, large_sinks, big_experts)
    if layout == "original":
        config = original_config(layers, experts, **fields, **overrides)
    else:
        fields |= {"num_experts_per_tok": experts_per_token, "eos_token_id": None, "pad_token_id": None}
        config = hf_config(layers, experts, **(fields | overrides))
    if tokenizer is not None:
        add_tokenizer(path, config, tokenizer, layout)
    write_checkpoint(path, config, layout, shards, flavour)
    return path


def make_hollow(path: Path, config: dict[str, Any], shards: int) -> Path:
    """A full-size checkpoint without its disk space: each shard is a true header, then a hole that reads as zeros."""
    path.mkdir()
    write_json(path / "config.json", config)
    parts = split_shards(list_sources(load_config(path)), "hf", shards)
    for name, part in parts.items():
        header, num_bytes = list_entries(part)
        with (path / name).open("wb") as stream:
            stream.truncate(stream.write(encode_header(header)) + num_bytes)
    write_json(path / INDEX, {"weight_map": {tensor: name for name, part in parts.items() for tensor in part}})
    return path
