"""The trained model as a checkpoint in the official layout, and back, to go on training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simplellm.config import ModelConfig
from simplellm.kernels.moe import dequantise
from simplellm.model.checkpoint import SINGLE, load_config
from simplellm.model.weights import LAYER_RULES, MODEL_RULES, LayerWeights, list_sources, load_weights
from tools.builtin.model import Model, quantise
from tools.make_checkpoint import add_tokenizer, encode_header, hf_config, list_entries

SHAPE = {
    "layers": 6,
    "experts": 8,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
NIBBLES = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}


def write_config(path: Path, tokenizer: dict[str, Any], **shape: Any) -> ModelConfig:
    """config.json, generation_config.json and tokenizer.json of a model of this vocabulary; SHAPE where left out."""
    size = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    config = hf_config(**(SHAPE | shape), vocab_size=size)  # type: ignore[arg-type]
    add_tokenizer(path, config, tokenizer)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    return load_config(path)


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> blocks [..., K / 32, 16] and scales [..., K / 32], uint8, as the loader reads them."""
    values, exponent = quantise(weight)
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    for value, code in NIBBLES.items():
        codes[values.abs() == value] = code
    codes |= (values < 0).byte() << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent.squeeze(-1) + 127).byte()


def write_weights(model: Model, path: Path) -> int:
    """model.safetensors in the official layout. Returns its bytes."""
    sources = list_sources(model.shape)
    part = {source.name: source for source in sources}
    header, _ = list_entries(part)
    partial = path / f"{SINGLE}.partial"
    with partial.open("wb") as stream:
        stream.write(encode_header(header))
        for source in part.values():
            owner = model if source.layer is None else model.layers[source.layer]
            tensor = _stored(owner, source.field)
            assert tensor.shape == source.stored, source.name
            stream.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    partial.rename(path / SINGLE)  # whoever ends the training early finds the last whole file
    return (path / SINGLE).stat().st_size


def _stored(owner: Any, field: str) -> Tensor:
    for name in ("gate_up", "down"):
        if field in (f"{name}_blocks", f"{name}_scales"):
            return pack_mxfp4(getattr(owner, name).detach().cpu())[field.endswith("_scales")]
    tensor: Tensor = getattr(owner, field).detach().cpu().bfloat16()
    return tensor


def read_weights(model: Model, path: Path) -> None:
    """Take the parameters from a checkpoint in the official layout, to go on training."""
    weights = load_weights(path, model.shape, progress=False)
    state = {rule.field: getattr(weights, rule.field) for rule in MODEL_RULES}
    for i in range(model.shape.num_layers):
        state |= {f"layers.{i}.{name}": value for name, value in _layer_state(weights.layers[i]).items()}
    model.load_state_dict({name: value.float() for name, value in state.items()})


def _layer_state(layer: LayerWeights) -> dict[str, Tensor]:
    state = {r.field: getattr(layer, r.field) for r in LAYER_RULES if not r.field.endswith(("_blocks", "_scales"))}
    for name in ("gate_up", "down"):
        state[name] = dequantise(getattr(layer, f"{name}_blocks"), getattr(layer, f"{name}_scales"))
    return state
