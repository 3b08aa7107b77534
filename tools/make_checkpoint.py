"""Write a gpt-oss checkpoint with random weights in an official layout: MXFP4 experts, the rest in bf16.

    python -m tools.make_checkpoint 20b DIR      (13.8 GB; 120b: 65.2 GB)

Names, shapes and dtypes are the official ones, and the values are scaled so that activations stay in a normal range and
routing differs from token to token: engines read the same bytes and do the same work as with the real model.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from simplellm.config import FULL, WINDOW, ModelConfig
from simplellm.model.checkpoint import INDEX, SINGLE, Layout, load_config
from simplellm.model.weights import ITEM_BYTES, Source, list_sources

SIZES = {"20b": (24, 32, 3), "120b": (36, 128, 15)}  # layers, experts, shards of the official files
CODE_RMS = math.sqrt(68.5 / 8)  # of the eight E2M1 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6


@dataclass(frozen=True)
class Flavour:
    """What the random values stress. One seed gives the same values in both layouts, but other ones on a GPU."""

    seed: int = 0
    large_sinks: bool = False  # of std 8 instead of 1: some take nearly all the attention, some none
    big_experts: bool = False  # half of gate and up beyond the clamp; down makes up for it, lest they drown attention
    device: str = "cpu"  # that draws the numbers


def hf_config(layers: int, experts: int, **fields: Any) -> dict[str, Any]:
    """The official config.json for this many layers and experts, with `fields` replaced or added."""
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {"original_max_position_embeddings": 4096, "truncate": False}
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    official = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": [FULL if i % 2 else WINDOW for i in range(layers)],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept},
        "rms_norm_eps": 1e-05,
        "rope_scaling": rope,
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    }
    return official | fields


def original_config(layers: int, experts: int, **fields: Any) -> dict[str, Any]:
    """The official original/config.json for this many layers and experts, with `fields` replaced or added."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "swiglu_limit", "head_dim", "num_attention_heads")
    same += ("num_key_value_heads", "sliding_window", "initial_context_length", "rope_theta", "experts_per_token")
    official = {name: value for name, value in hf_config(layers, experts).items() if name in same}
    official |= {"num_hidden_layers": layers, "num_experts": experts}
    return official | {"rope_scaling_factor": 32.0, "rope_ntk_alpha": 1, "rope_ntk_beta": 32} | fields


def write_checkpoint(
    path: Path, config: dict[str, Any], layout: Layout = "hf", shards: int = 1, flavour: Flavour | None = None
) -> int:
    """Write config.json and the weights into folder `path`, one tensor in memory at a time. Returns the tensors' bytes."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    model = load_config(path)
    sources = list_sources(model, layout)
    tensors = _tensors(sources, model, flavour or Flavour())
    places: dict[str, str] = {}  # tensor -> file
    for file, part in split_shards(sources, layout, shards).items():
        header, _ = list_entries(part)
        with (path / file).open("wb") as stream:
            stream.write(encode_header(header))
            for name in part:
                drawn, tensor = next(tensors)
                assert drawn == name
                stream.write(tensor.view(torch.uint8).numpy())
        places |= dict.fromkeys(part, file)
    total = sum(source.num_bytes for source in sources)
    if layout == "hf" and shards > 1:
        write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return total


def split_shards(sources: list[Source], layout: Layout, shards: int) -> dict[str, dict[str, Source]]:
    """File name -> stored tensors in order, of about equal bytes per file."""
    names = _shard_names(layout, shards)
    total, before = sum(source.num_bytes for source in sources), 0
    parts: dict[str, dict[str, Source]] = {name: {} for name in names}
    places: dict[str, str] = {}
    for source in sources:  # the q, k and v of a fused tensor stay together, where its first rows are
        place = places.setdefault(source.name, names[before * shards // total])
        parts[place].setdefault(source.name, source)
        before += source.num_bytes
    assert all(parts.values()), f"{shards} shards are too many"
    return parts


def list_entries(part: dict[str, Source]) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file that holds these tensors, and the bytes of their data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, source in part.items():
        start, end = end, end + math.prod(source.stored) * ITEM_BYTES[source.dtype]
        header[name] = {"dtype": source.dtype, "shape": source.stored, "data_offsets": [start, end]}
    return header, end


def encode_header(header: Any) -> bytes:
    """Length and JSON, padded so that the data behind it is aligned to 8 bytes: the start of a safetensors file."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def add_tokenizer(path: Path, config: dict[str, Any], tokenizer: dict[str, Any], layout: Layout = "hf") -> None:
    """Write tokenizer.json and generation_config.json, and put their ids into a Hugging Face `config`."""
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    start, pad = ids["<|startoftext|>"], ids["<|endoftext|>"]
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "tokenizer.json", tokenizer)
    eos = [ids["<|return|>"], pad, ids["<|call|>"]]
    generation = {"bos_token_id": start, "do_sample": True, "eos_token_id": eos, "pad_token_id": pad}
    write_json(path / "generation_config.json", generation)
    if layout == "hf":
        config |= {"eos_token_id": eos[0], "pad_token_id": pad}


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _shard_names(layout: Layout, shards: int) -> list[str]:
    """As the official files are called: counted from 0 with the last number after "of", or from 1 with two hyphens."""
    if shards == 1:
        return [SINGLE]
    if layout == "hf":
        return [f"model-{i:05}-of-{shards - 1:05}.safetensors" for i in range(shards)]
    return [f"model--{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]


def _tensors(sources: list[Source], model: ModelConfig, flavour: Flavour) -> Iterator[tuple[str, torch.Tensor]]:
    """Stored tensors with their names. Values are drawn field by field, so both layouts get the same ones."""
    generator = torch.Generator(device=flavour.device).manual_seed(flavour.seed)
    fused: dict[str, list[torch.Tensor]] = {}  # q, k and v rows seen so far of a fused tensor
    for source in sources:
        tensor = _draw(source, model, flavour, generator).cpu()
        parts = fused.setdefault(source.name, [])
        parts.append(tensor)
        if sum(len(part) for part in parts) == source.stored[0]:
            yield source.name, torch.cat(fused.pop(source.name)) if len(parts) > 1 else tensor


def _draw(source: Source, model: ModelConfig, flavour: Flavour, generator: torch.Generator) -> torch.Tensor:
    """Random values of a field, on the generator's device."""
    field, device = source.field, generator.device
    if field.endswith("_blocks"):
        return torch.randint(0, 256, source.shape, generator=generator, device=device, dtype=torch.uint8)
    if field.endswith("_scales"):
        fan_in = model.hidden_size if field.startswith("gate_up") else model.intermediate_size
        middle = 127 + round(-math.log2(CODE_RMS * math.sqrt(fan_in)))  # outputs of rms 1 for inputs of rms 1
        shift = (3 if field.startswith("gate_up") else -3) if flavour.big_experts else 0
        low = middle + shift - 1
        return torch.randint(low, low + 3, source.shape, generator=generator, device=device, dtype=torch.uint8)
    noise = torch.randn(source.shape, generator=generator, device=device)
    if field in ("norm", "input_norm", "post_norm"):
        return noise.mul_(0.1).add_(1).bfloat16()
    return noise.mul_(_deviation(source, flavour)).bfloat16()


def _deviation(source: Source, flavour: Flavour) -> float:
    field = source.field
    if field == "sinks":
        return 8.0 if flavour.large_sinks else 1.0
    if field == "embed":
        return 1.0
    if field.endswith("_b"):
        return 0.2
    gain = {"lm_head": 3.0, "router_w": 1.5}.get(field, 1.0)  # so that tokens and experts differ clearly
    return gain / math.sqrt(source.shape[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="write a full-size gpt-oss checkpoint with random weights")
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    layers, experts, shards = SIZES[args.size]
    flavour = Flavour(args.seed, device="cuda" if torch.cuda.is_available() else "cpu")
    total = write_checkpoint(args.path, hf_config(layers, experts), shards=shards, flavour=flavour)
    eos = {"bos_token_id": 199998, "do_sample": True, "eos_token_id": [200002, 199999, 200012], "pad_token_id": 199999}
    write_json(args.path / "generation_config.json", eos)
    print(f"{args.path}: {total:,} bytes of tensors")


if __name__ == "__main__":
    main()
