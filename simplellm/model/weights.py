"""Weights from disk, by a table of rules that names every tensor in both layouts.

A tensor that is missing, unread, misshapen or of another dtype is a CheckpointError. On the CPU tensors are views of
the mapped files: nothing is copied, and MXFP4 stays as it is. Source of the names: the files of openai/gpt-oss-20b.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from simplellm.config import ModelConfig
from simplellm.errors import CheckpointError
from simplellm.model.checkpoint import AGAIN, GROUP, Entry, Layout, find_layout, find_tensors
from simplellm.model.upload import Uploader


@dataclass
class LayerWeights:
    """One layer. E experts; gate_up rows alternate gate and up. Blocks hold two E2M1 codes a byte, low nibble first."""

    input_norm: Tensor  # [H]
    q_w: Tensor  # [Hq*D, H]
    q_b: Tensor  # [Hq*D]
    k_w: Tensor  # [Hkv*D, H]
    k_b: Tensor  # [Hkv*D]
    v_w: Tensor  # [Hkv*D, H]
    v_b: Tensor  # [Hkv*D]
    o_w: Tensor  # [H, Hq*D]
    o_b: Tensor  # [H]
    sinks: Tensor  # [Hq]
    post_norm: Tensor  # [H]
    router_w: Tensor  # [E, H]
    router_b: Tensor  # [E]
    gate_up_blocks: Tensor  # [E, 2I, H/32, 16] u8
    gate_up_scales: Tensor  # [E, 2I, H/32] u8, E8M0
    gate_up_b: Tensor  # [E, 2I]
    down_blocks: Tensor  # [E, H, I/32, 16] u8
    down_scales: Tensor  # [E, H, I/32] u8, E8M0
    down_b: Tensor  # [E, H]


L = TypeVar("L")


@dataclass
class Weights(Generic[L]):
    """All tensors of a model, bf16 unless said otherwise. Layers as they are in the files, or as `arrange` made them."""

    embed: Tensor  # [V, H]
    norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]
    layers: list[L]
    num_bytes: int  # of all tensors in the files; arranging moves bytes about


@dataclass(frozen=True)
class Rule:
    """Where a field of Weights or LayerWeights comes from. Axes of `shape` are letters that `_axes` resolves."""

    field: str
    hf: str
    original: str
    shape: str
    dtype: str = "BF16"
    part: int | None = None  # in the original layout: 0, 1, 2 for the q, k, v rows of a fused tensor


MODEL_RULES = (
    Rule("embed", "model.embed_tokens.weight", "embedding.weight", "V H"),
    Rule("norm", "model.norm.weight", "norm.scale", "H"),
    Rule("lm_head", "lm_head.weight", "unembedding.weight", "V H"),
)
LAYER_PREFIX: dict[Layout, str] = {"hf": "model.layers.{}.", "original": "block.{}."}
LAYER_RULES = (
    Rule("input_norm", "input_layernorm.weight", "attn.norm.scale", "H"),
    Rule("q_w", "self_attn.q_proj.weight", "attn.qkv.weight", "Q H", part=0),
    Rule("q_b", "self_attn.q_proj.bias", "attn.qkv.bias", "Q", part=0),
    Rule("k_w", "self_attn.k_proj.weight", "attn.qkv.weight", "K H", part=1),
    Rule("k_b", "self_attn.k_proj.bias", "attn.qkv.bias", "K", part=1),
    Rule("v_w", "self_attn.v_proj.weight", "attn.qkv.weight", "K H", part=2),
    Rule("v_b", "self_attn.v_proj.bias", "attn.qkv.bias", "K", part=2),
    Rule("o_w", "self_attn.o_proj.weight", "attn.out.weight", "H Q"),
    Rule("o_b", "self_attn.o_proj.bias", "attn.out.bias", "H"),
    Rule("sinks", "self_attn.sinks", "attn.sinks", "heads"),
    Rule("post_norm", "post_attention_layernorm.weight", "mlp.norm.scale", "H"),
    Rule("router_w", "mlp.router.weight", "mlp.gate.weight", "E H"),
    Rule("router_b", "mlp.router.bias", "mlp.gate.bias", "E"),
    Rule("gate_up_blocks", "mlp.experts.gate_up_proj_blocks", "mlp.mlp1_weight.blocks", "E 2I H/32 16", "U8"),
    Rule("gate_up_scales", "mlp.experts.gate_up_proj_scales", "mlp.mlp1_weight.scales", "E 2I H/32", "U8"),
    Rule("gate_up_b", "mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias", "E 2I"),
    Rule("down_blocks", "mlp.experts.down_proj_blocks", "mlp.mlp2_weight.blocks", "E H I/32 16", "U8"),
    Rule("down_scales", "mlp.experts.down_proj_scales", "mlp.mlp2_weight.scales", "E H I/32", "U8"),
    Rule("down_b", "mlp.experts.down_proj_bias", "mlp.mlp2_bias", "E H"),
)
ITEM_BYTES = {"BF16": 2, "U8": 1}


def _axes(config: ModelConfig) -> dict[str, int]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return {
        "V": config.vocab_size,
        "H": hidden,
        "Q": config.num_heads * config.head_dim,
        "K": config.num_kv_heads * config.head_dim,
        "heads": config.num_heads,
        "E": config.num_experts,
        "2I": 2 * intermediate,
        "H/32": hidden // GROUP,
        "I/32": intermediate // GROUP,
        "16": GROUP // 2,  # two codes a byte
    }


@dataclass(frozen=True)
class Source:
    """A field and the rows of the stored tensor that it takes; `layer` is None for the fields of Weights itself."""

    field: str
    layer: int | None
    name: str
    dtype: str
    stored: tuple[int, ...]  # shape of the stored tensor
    start: int  # first row, and number of rows
    num_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.stored[1:])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def list_sources(config: ModelConfig, layout: Layout = "hf") -> list[Source]:
    """Every field of a model of this shape and where the layout keeps it: model-wide ones, then layer by layer."""
    axes = _axes(config)
    sources = [_source(rule, None, "", layout, axes) for rule in MODEL_RULES]
    for i in range(config.num_layers):
        prefix = LAYER_PREFIX[layout].format(i)
        sources += [_source(rule, i, prefix, layout, axes) for rule in LAYER_RULES]
    return sources


def _source(rule: Rule, layer: int | None, prefix: str, layout: Layout, axes: dict[str, int]) -> Source:
    shape = tuple(axes[axis] for axis in rule.shape.split())
    if layout == "hf":
        return Source(rule.field, layer, prefix + rule.hf, rule.dtype, shape, 0, shape[0])
    name = prefix + rule.original
    if rule.part is None:
        return Source(rule.field, layer, name, rule.dtype, shape, 0, shape[0])
    start = (0, axes["Q"], axes["Q"] + axes["K"])[rule.part]
    stored = (axes["Q"] + 2 * axes["K"], *shape[1:])
    return Source(rule.field, layer, name, rule.dtype, stored, start, shape[0])


def check_tensors(path: Path, sources: Iterable[Source], found: Mapping[str, Entry]) -> None:
    """Raise CheckpointError unless `found` holds exactly the tensors that `sources` name, in shape and dtype."""
    wanted = {source.name: source for source in sources}
    if missing := [name for name in wanted if name not in found]:
        raise CheckpointError(f"{path} lacks {_names(missing)}: {AGAIN}")
    if extra := [name for name in found if name not in wanted]:
        raise CheckpointError(
            f"{path} holds {_names(extra)}, which no gpt-oss model of this config.json has: "
            f"it is another architecture, or config.json is from another model; {AGAIN}"
        )
    for name, source in wanted.items():
        entry = found[name]
        if entry.shape != source.stored:
            raise CheckpointError(
                f"{name} in {entry.file} has shape {list(entry.shape)}, but config.json asks for "
                f"{list(source.stored)}: the two are from different models; {AGAIN}"
            )
        if entry.dtype != source.dtype:
            raise CheckpointError(
                f"{name} in {entry.file} is {entry.dtype}; supported: {source.dtype}, as in the official checkpoints "
                "(MXFP4 experts, the rest in BF16)"
            )


def _names(names: list[str]) -> str:
    kind = "tensor" if len(names) == 1 else f"{len(names)} tensors:"
    return f"{kind} {', '.join(names[:3])}" + (", ..." if len(names) > 3 else "")


def load_weights(
    path: Path,
    config: ModelConfig,
    device: str | torch.device = "cpu",
    progress: bool = True,
    arrange: Callable[[LayerWeights], L] = lambda layer: layer,  # type: ignore[assignment,return-value]
) -> Weights[L]:
    """All tensors of the checkpoint in folder `path`, checked against `config`, on `device`.

    On the CPU they are views of the mapped files, which must stay as they are; elsewhere copies, made shard by shard. Each
    layer is handed to `arrange` once it is complete, while the next is read; nothing else keeps its tensors.
    Raises CheckpointError naming the tensor or file.
    """
    layout = find_layout(path)
    found = find_tensors(path, layout)
    sources = list_sources(config, layout)
    check_tensors(path, sources, found)
    device = torch.device(device)
    whole: dict[str, Tensor] = {}
    parts: dict[int, dict[str, Tensor]] = {i: {} for i in range(config.num_layers)}
    layers: dict[int, L] = {}
    sources.sort(key=lambda source: found[source.name].file)
    total = sum(source.num_bytes for source in sources)
    check = _reads_scales(sources, device)
    with (
        tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=None if progress else True) as bar,
        Uploader(device) if device.type == "cuda" else nullcontext() as uploader,
    ):
        for file, group in itertools.groupby(sources, key=lambda source: found[source.name].file):
            for source, tensor in _read_shard(file, group, uploader):
                bar.update(source.num_bytes)
                if source.layer is None:
                    whole[source.field] = tensor
                    continue
                if check and source.field.endswith("_scales"):
                    _check_scales(source, tensor)
                part = parts[source.layer]
                part[source.field] = tensor
                if len(part) == len(LAYER_RULES):
                    layers[source.layer] = arrange(LayerWeights(**parts.pop(source.layer)))
                    part = {}  # else the last layer's tensors live on beside what was made of them
                del tensor
    return Weights(layers=[layers[i] for i in range(config.num_layers)], num_bytes=total, **whole)


def _read_shard(file: Path, sources: Iterable[Source], uploader: Uploader | None) -> Iterator[tuple[Source, Tensor]]:
    """The fields that come from one file. Its mapping lives as long as a tensor on the CPU views it."""

    def parts(shard: Any) -> Iterator[tuple[Source, Tensor]]:
        for source in sources:
            yield source, shard.get_tensor(source.name)[source.start : source.start + source.num_rows]

    try:
        with safe_open(file, framework="pt") as shard:
            yield from parts(shard) if uploader is None else uploader.run(parts(shard))
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a valid safetensors file ({error}): {AGAIN}") from None


# Scale bytes read from a mapped file at most. Looking at all scales of the 120b would read 3.6 GB from the disk at a
# load that otherwise reads nothing; on a GPU they are there already and looking takes milliseconds.
MAX_SCALES_READ = 64 << 20


def _reads_scales(sources: Iterable[Source], device: torch.device) -> bool:
    size = sum(source.num_bytes for source in sources if source.field.endswith("_scales"))
    return device.type != "cpu" or size <= MAX_SCALES_READ


def _check_scales(source: Source, scales: Tensor) -> None:
    """Refuse NaN scales (byte 255 in E8M0): dequantising takes them for 2**128, which no real checkpoint has."""
    if (scales == 255).any():
        raise CheckpointError(f"{source.name} holds a NaN scale (byte 255): the file is damaged; {AGAIN}")
