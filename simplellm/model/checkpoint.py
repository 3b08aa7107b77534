"""A checkpoint on disk: config.json as a ModelConfig, and the shards' headers as a table. Reads no weights.

Two layouts: Hugging Face's ("hf": config.json has a model_type) and that of OpenAI's `original/` folder ("original").
Anything but a gpt-oss model in MXFP4 is refused by a CheckpointError that names the file or field and what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from simplellm.config import ALPHA, FULL, PAGE, WINDOW, ModelConfig, read_json
from simplellm.errors import CheckpointError

Layout = Literal["hf", "original"]

GROUP = 32  # inputs that share one MXFP4 scale

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
AGAIN = "download the model again (hf download resumes)"
MAX_HEADER = 100_000_000  # bytes; the safetensors format's own limit


# --- config.json ---


def load_config(path: Path) -> ModelConfig:
    """The model's shape from the checkpoint in folder `path`. Raises CheckpointError naming the file and the field."""
    fields, layout = _config_fields(path)
    config = _hf_config(fields) if layout == "hf" else _original_config(fields)
    _check_sizes(fields, config)
    return config


def find_layout(path: Path) -> Layout:
    """Which of the two layouts the folder `path` has, by its config.json."""
    return _config_fields(path)[1]


@dataclass(frozen=True)
class Fields:
    """One JSON object of a config file. What it lacks or holds wrongly is an error that names file and field."""

    file: Path
    data: Mapping[str, Any]
    inside: str = ""  # name of the object within the file

    def refuse(self, name: str, supported: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self.inside}{name} is {self.data.get(name)!r}; supported: {supported}")

    def need(self, name: str) -> Any:
        if name not in self.data:
            raise CheckpointError(f"{self.file}: field {self.inside}{name} is missing; {AGAIN}")
        return self.data[name]

    def whole(self, name: str) -> int:
        value = self.need(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise self.refuse(name, "a whole number from 1 to 2**31 - 1")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.need(name) if default is None else self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e12:
            raise self.refuse(name, "a number above 0, at most 1e12")
        return float(value)

    def only(self, name: str, supported: Any) -> None:
        """Refuse any value but `supported`; a field that is not there, or null, says nothing."""
        value = self.data.get(name)
        if value is not None and value != supported:
            raise self.refuse(name, json.dumps(supported))

    def object(self, name: str) -> Fields:
        value = self.need(name)
        if not isinstance(value, dict):
            raise self.refuse(name, "a JSON object")
        return Fields(self.file, value, f"{self.inside}{name}.")


def _config_fields(path: Path) -> tuple[Fields, Layout]:
    _check_folder(path)
    file = path / "config.json"
    data = read_json(file)
    if "model_type" in data or "architectures" in data:
        return Fields(file, data), "hf"
    if "num_experts" in data:
        return Fields(file, data), "original"
    raise CheckpointError(
        f"{file} has neither model_type (Hugging Face layout) nor num_experts (OpenAI's original layout): "
        "it does not describe a gpt-oss model"
    )


def _check_folder(path: Path) -> None:
    if not path.exists():
        is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.is_dir()
        model = str(path) if is_hub_id else f"openai/gpt-oss-{'120b' if '120b' in path.name else '20b'}"
        target = path.name if is_hub_id else path
        raise CheckpointError(
            f"{path} does not exist. A checkpoint is a local folder; to download one: "
            f'hf download {model} --local-dir {target} --exclude "original/*" --exclude "metal/*"'
        )
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file: pass the folder that holds config.json and the .safetensors files")
    if not any(path.iterdir()):
        raise CheckpointError(f"{path} is empty: {AGAIN}, or check the path")
    if not (path / "config.json").exists() and (path / "original" / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json, but its folder original/ has one: pass {path / 'original'}")


def _hf_config(fields: Fields) -> ModelConfig:
    _check_architecture(fields)
    num_layers = fields.whole("num_hidden_layers")
    rope = fields.object("rope_parameters" if fields.data.get("rope_parameters") is not None else "rope_scaling")
    _check_rope(rope)
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("intermediate_size"),
        num_heads=fields.whole("num_attention_heads"),
        num_kv_heads=fields.whole("num_key_value_heads"),
        head_dim=fields.whole("head_dim"),
        num_experts=fields.whole("num_local_experts"),
        experts_per_token=_experts_per_token(fields),
        vocab_size=fields.whole("vocab_size"),
        layer_types=_layer_types(fields, num_layers),
        sliding_window=fields.whole("sliding_window"),
        max_context=fields.whole("max_position_embeddings"),
        rms_norm_eps=fields.real("rms_norm_eps"),
        swiglu_limit=fields.real("swiglu_limit"),
        rope_theta=(rope if "rope_theta" in rope.data else fields).real("rope_theta"),
        rope_factor=rope.real("factor"),
        rope_beta_fast=rope.real("beta_fast", 32.0),  # defaults, here and of truncate: YaRN's own, as in transformers
        rope_beta_slow=rope.real("beta_slow", 1.0),
        rope_original_context=rope.whole("original_max_position_embeddings"),
        rope_truncate=_truncate(rope),
        eos_token_ids=_eos_token_ids(fields),
    )


def _original_config(fields: Fields) -> ModelConfig:
    """OpenAI's own spelling. It leaves out what its reference code has as constants (gpt_oss/torch/model.py)."""
    num_layers = fields.whole("num_hidden_layers")
    context, factor = fields.whole("initial_context_length"), fields.real("rope_scaling_factor")
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("intermediate_size"),
        num_heads=fields.whole("num_attention_heads"),
        num_kv_heads=fields.whole("num_key_value_heads"),
        head_dim=fields.whole("head_dim"),
        num_experts=fields.whole("num_experts"),
        experts_per_token=fields.whole("experts_per_token"),
        vocab_size=fields.whole("vocab_size"),
        layer_types=tuple(FULL if i % 2 else WINDOW for i in range(num_layers)),
        sliding_window=fields.whole("sliding_window"),
        max_context=int(context * factor),
        rms_norm_eps=1e-5,
        swiglu_limit=fields.real("swiglu_limit"),
        rope_theta=fields.real("rope_theta"),
        rope_factor=factor,
        rope_beta_fast=fields.real("rope_ntk_beta"),
        rope_beta_slow=fields.real("rope_ntk_alpha"),
        rope_original_context=context,
        rope_truncate=False,
        eos_token_ids=_eos_token_ids(fields, above=True),
    )


def _check_architecture(fields: Fields) -> None:
    fields.only("model_type", "gpt_oss")
    fields.only("architectures", ["GptOssForCausalLM"])
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", True)
    fields.only("tie_word_embeddings", False)
    fields.only("swiglu_alpha", ALPHA)
    if fields.data.get("quantization_config") is None:
        raise CheckpointError(
            f"{fields.file}: quantization_config is missing, so the experts are not in MXFP4 (a dequantised copy?); "
            "supported: the official MXFP4 checkpoints, openai/gpt-oss-20b and openai/gpt-oss-120b"
        )
    quantization = fields.object("quantization_config")
    if quantization.need("quant_method") != "mxfp4":
        raise quantization.refuse("quant_method", '"mxfp4" (the official checkpoints)')


def _check_rope(rope: Fields) -> None:
    kind = "type" if "type" in rope.data and "rope_type" not in rope.data else "rope_type"  # "type": older spelling
    if rope.need(kind) != "yarn":
        raise rope.refuse(kind, '"yarn"')
    for name in ("attention_factor", "mscale", "mscale_all_dim"):  # each would change YaRN's concentration
        if rope.data.get(name) is not None:
            raise rope.refuse(name, "none: the concentration follows from factor")
    rope.only("partial_rotary_factor", 1.0)


def _truncate(rope: Fields) -> bool:
    value = rope.data.get("truncate", True)
    if not isinstance(value, bool):
        raise rope.refuse("truncate", "true or false")
    return value


def _experts_per_token(fields: Fields) -> int:
    """The official file has the number under two names."""
    names = [name for name in ("num_experts_per_tok", "experts_per_token") if name in fields.data]
    values = {fields.whole(name) for name in names or ["num_experts_per_tok"]}
    if len(values) > 1:
        raise fields.refuse("num_experts_per_tok", f"the same as experts_per_token, {fields.data['experts_per_token']}")
    return values.pop()


def _layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    kinds = fields.need("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.refuse("layer_types", f"a list of {num_layers} kinds, one for each of num_hidden_layers")
    for i, kind in enumerate(kinds):
        if kind not in (WINDOW, FULL):
            raise CheckpointError(f"{fields.file}: layer_types[{i}] is {kind!r}; supported: {WINDOW!r}, {FULL!r}")
    return tuple(kinds)


def _eos_token_ids(fields: Fields, above: bool = False) -> tuple[int, ...]:
    """Ids that end a generation: those of generation_config.json, beside config.json or one folder up, then its own."""
    folder = fields.file.parent
    files = [place / "generation_config.json" for place in ([folder, folder.parent] if above else [folder])]
    sources = [Fields(file, read_json(file)) for file in files if file.is_file()][:1] + [fields]
    found: dict[int, None] = {}
    for source in sources:
        value = source.data.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < fields.whole("vocab_size"):
                raise source.refuse("eos_token_id", f"token ids below vocab_size, {fields.whole('vocab_size')}")
            found[token] = None
    return tuple(found)


def _check_sizes(fields: Fields, config: ModelConfig) -> None:
    if config.sliding_window > PAGE:
        raise fields.refuse("sliding_window", f"1 to {PAGE}, the tokens of a KV page")
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % GROUP:
            raise fields.refuse(name, f"multiples of {GROUP}, the inputs that share an MXFP4 scale")
    if config.num_heads % config.num_kv_heads:
        raise fields.refuse("num_attention_heads", f"multiples of num_key_value_heads, {config.num_kv_heads}")
    if config.head_dim % 2:
        raise fields.refuse("head_dim", "even numbers (the rotation works on two halves)")
    if config.experts_per_token > config.num_experts:
        name = "num_experts_per_tok" if "num_experts_per_tok" in fields.data else "experts_per_token"
        raise fields.refuse(name, f"at most the number of experts, {config.num_experts}")


# --- shards ---


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard, as its header has it. `dtype` is safetensors' own name: BF16, U8, ..."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def find_tensors(path: Path, layout: Layout) -> dict[str, Entry]:
    """Every tensor of the checkpoint in folder `path`, from the shards' headers alone."""
    if layout == "hf" and (path / INDEX).exists():
        return _read_indexed(path)
    if layout == "hf" and (path / SINGLE).exists():
        return read_header(path / SINGLE)
    files = sorted(path.glob("*.safetensors"))
    if layout == "original" and files:  # OpenAI's loader opens whatever lies in the folder; there is no index
        return _read_all(files)
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
    if files:
        raise CheckpointError(f"{path / INDEX} is missing, which says what lies in {files[0].name}: {AGAIN}")
    if pickles:
        raise CheckpointError(
            f"{path} has its weights as pickles only ({pickles[0]}): nothing is ever unpickled here, since that can "
            "run code; download the .safetensors files"
        )
    wanted = f"{INDEX} nor {SINGLE}" if layout == "hf" else "model.safetensors nor any other .safetensors file"
    raise CheckpointError(f"{path} has neither {wanted}: {AGAIN}")


def _read_indexed(path: Path) -> dict[str, Entry]:
    index = path / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index}: weight_map is no table of tensor and file names; {AGAIN}")
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is not the name of a file in the same folder")
        if not (path / name).exists():
            tensor = next(tensor for tensor, place in places.items() if place == name)
            raise CheckpointError(f"shard {path / name} is missing ({INDEX} names it for {tensor}): {AGAIN}")
    found = _read_all([path / name for name in sorted(set(places.values()))])
    for tensor, name in places.items():
        if tensor not in found or found[tensor].file.name != name:
            raise CheckpointError(f"{path / name} does not hold {tensor}, though {INDEX} says so: {AGAIN}")
    for tensor, entry in found.items():
        if tensor not in places:
            raise CheckpointError(f"{entry.file} holds {tensor}, which {INDEX} does not list: {AGAIN}")
    return found


def _read_all(files: list[Path]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for file in files:
        for tensor, entry in read_header(file).items():
            if tensor in found:
                raise CheckpointError(f"{tensor} is both in {found[tensor].file} and in {file}: remove the stale file")
            found[tensor] = entry
    return found


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, after checking that the file is as long as its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":  # of "version https://git-lfs.github.com/spec/v1"
            raise CheckpointError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull`, or {AGAIN}")
        length = int.from_bytes(start, "little")
        if size >= 8 and length > MAX_HEADER:
            raise CheckpointError(f"{file} is not a safetensors file (its header would be {length} bytes): {AGAIN}")
        if size < 8 + length:
            raise CheckpointError(f"{file} is truncated: {size} bytes, not even its whole header; {AGAIN}")
        header = stream.read(length)
    try:
        listed = json.loads(header)
        listed.pop("__metadata__", None)
        found = {name: Entry(file, str(one["dtype"]), tuple(map(int, one["shape"]))) for name, one in listed.items()}
        end = 8 + length + max((int(one["data_offsets"][1]) for one in listed.values()), default=0)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        raise CheckpointError(f"{file} is not a safetensors file (its header is garbage): {AGAIN}") from None
    if size != end:
        state = "truncated" if size < end else "damaged"
        raise CheckpointError(f"{file} is {state}: {size} bytes, but its header says {end}; {AGAIN}")
    return found
