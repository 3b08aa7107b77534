"""Weights: complete both ways, in both layouts, without a copy; and each kind of damage with its message."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from simplellm.errors import CheckpointError
from simplellm.model.checkpoint import load_config
from simplellm.model.weights import LayerWeights, Weights, list_sources, load_weights
from tests.checkpoints import make, make_hollow, tiny_tokenizer
from tools.builtin.install import BUILTIN
from tools.make_checkpoint import hf_config, original_config, write_json

OFFICIAL = [  # spec: layers, experts, tensors in the two layouts, bytes
    (24, 32, 459, 363, 13_761_264_768),
    (36, 128, 687, 543, 65_248_815_744),
]
HF_LAYER = {
    *("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.sinks"),
    *(f"self_attn.{x}_proj.{kind}" for x in "qkvo" for kind in ("weight", "bias")),
    *("mlp.router.weight", "mlp.router.bias"),
    *(f"mlp.experts.{x}_proj_{kind}" for x in ("gate_up", "down") for kind in ("blocks", "scales", "bias")),
}
ORIGINAL_LAYER = {
    *("attn.norm.scale", "attn.qkv.weight", "attn.qkv.bias", "attn.sinks", "attn.out.weight", "attn.out.bias"),
    *("mlp.norm.scale", "mlp.gate.weight", "mlp.gate.bias"),
    *(f"mlp.mlp{i}_weight.{kind}" for i in "12" for kind in ("blocks", "scales")),
    *("mlp.mlp1_bias", "mlp.mlp2_bias"),
}


def load(path: Path) -> Weights:
    return load_weights(path, load_config(path), progress=False)


def tensors(weights: Weights) -> dict[str, torch.Tensor]:
    """Every tensor by a name of its own."""
    named = {f"layers.{i}.{k}": v for i, layer in enumerate(weights.layers) for k, v in vars(layer).items()}
    return named | {name: getattr(weights, name) for name in ("embed", "norm", "lm_head")}


def assert_same(a: Weights, b: Weights) -> None:
    a_tensors, b_tensors = tensors(a), tensors(b)
    assert a_tensors.keys() == b_tensors.keys()
    for name, tensor in a_tensors.items():
        assert tensor.dtype == b_tensors[name].dtype and torch.equal(tensor, b_tensors[name]), name


@pytest.mark.parametrize(("layers", "experts", "num_hf", "num_original", "num_bytes"), OFFICIAL)
def test_the_table_has_the_official_names_and_bytes(
    tmp_path: Path, layers: int, experts: int, num_hf: int, num_original: int, num_bytes: int
) -> None:
    write_json(tmp_path / "config.json", hf_config(layers, experts))
    config = load_config(tmp_path)
    hf, original = list_sources(config, "hf"), list_sources(config, "original")
    last = layers - 1
    assert {s.name for s in hf if s.layer == last} == {f"model.layers.{last}.{name}" for name in HF_LAYER}
    assert {s.name for s in original if s.layer == last} == {f"block.{last}.{name}" for name in ORIGINAL_LAYER}
    assert len({s.name for s in hf}) == num_hf and len({s.name for s in original}) == num_original
    assert sum(s.num_bytes for s in hf) == sum(s.num_bytes for s in original) == num_bytes


def test_each_field_is_the_tensor_of_its_name(tmp_path: Path) -> None:
    """Two fields of one shape (the norms, k and v) must not be swapped."""
    folder = make(tmp_path / "m")
    stored, layer = load_file(folder / "model.safetensors"), load(folder).layers[2]
    names = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}
    names |= {f"{x}_w": f"self_attn.{x}_proj.weight" for x in "qkvo"} | {"router_w": "mlp.router.weight"}
    names |= {f"{x}_b": f"self_attn.{x}_proj.bias" for x in "qkvo"} | {"router_b": "mlp.router.bias"}
    names |= {f"{x}_{y}": f"mlp.experts.{x}_proj_{y}" for x in ("gate_up", "down") for y in ("blocks", "scales")}
    names |= {f"{x}_b": f"mlp.experts.{x}_proj_bias" for x in ("gate_up", "down")} | {"sinks": "self_attn.sinks"}
    assert names.keys() == {field.name for field in dataclasses.fields(LayerWeights)}
    for field, name in names.items():
        assert torch.equal(getattr(layer, field), stored[f"model.layers.2.{name}"]), field


def test_fused_qkv_is_cut_into_q_then_k_then_v(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", layout="original", heads=4, kv_heads=2, head_dim=32)
    stored, layer = load_file(folder / "model.safetensors"), load(folder).layers[1]
    for kind, parts in (("weight", (layer.q_w, layer.k_w, layer.v_w)), ("bias", (layer.q_b, layer.k_b, layer.v_b))):
        qkv = stored[f"block.1.attn.qkv.{kind}"]
        assert all(torch.equal(a, b) for a, b in zip(qkv.split([128, 64, 64]), parts, strict=True))


def test_layouts_and_shards_do_not_change_the_weights(tmp_path: Path) -> None:
    one = load(make(tmp_path / "one", seed=3))
    assert_same(one, load(make(tmp_path / "five", seed=3, shards=5)))
    assert_same(one, load(make(tmp_path / "original", seed=3, layout="original")))
    assert_same(one, load(make(tmp_path / "original7", seed=3, layout="original", shards=7)))
    assert one.num_bytes == sum(tensor.nbytes for tensor in tensors(one).values()) > 1_000_000


def test_shards_are_found_by_the_index_whatever_they_are_called(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", shards=3)
    want = load(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    renamed = {name: f"part{i}.safetensors" for i, name in enumerate(sorted(set(index["weight_map"].values())))}
    for old, new in renamed.items():
        (folder / old).rename(folder / new)
    index["weight_map"] = {tensor: renamed[name] for tensor, name in index["weight_map"].items()}
    write_json(folder / "model.safetensors.index.json", index)
    assert_same(want, load(folder))


def status(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


def test_loading_on_the_cpu_copies_nothing_and_lets_go(tmp_path: Path) -> None:
    """4 GB of shards (holes, so no disk is used) are mapped: memory of our own must not grow."""
    folder = make_hollow(tmp_path / "m", hf_config(4, 32), shards=3)
    before = status("RssAnon"), status("VmRSS")
    weights = load(folder)
    assert weights.num_bytes == 4_223_993_728
    assert status("RssAnon") - before[0] < 64 << 20
    assert status("VmRSS") - before[1] < 64 << 20
    assert str(folder) in Path("/proc/self/maps").read_text()
    del weights
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_writing_to_a_weight_does_not_reach_the_file(tmp_path: Path) -> None:
    """The kernels' order is made in place on some devices; the checkpoint must survive that."""
    folder = make(tmp_path / "m")
    before = (folder / "model.safetensors").read_bytes()
    load(folder).embed.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_no_progress_bar_outside_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "m")
    load_weights(folder, load_config(folder), progress=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
def test_weights_on_the_gpu_are_the_same_and_the_files_are_closed(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", shards=2, layout="original")
    weights = load_weights(folder, load_config(folder), device="cuda", progress=False)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    for name, tensor in tensors(load(folder)).items():
        assert torch.equal(tensors(weights)[name].cpu(), tensor), name


# --- damage ---

SHARD = "model-00000-of-00001.safetensors"
OTHER = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.layers.3.input_layernorm.weight"


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of the second shard, which has the last layer, and bring the index up to date."""
    stored = {name: tensor.clone() for name, tensor in load_file(folder / OTHER).items()}
    change(stored)
    save_file(stored, folder / OTHER)
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    places = {name: shard for name, shard in places.items() if shard != OTHER} | dict.fromkeys(stored, OTHER)
    write_json(folder / INDEX, {"weight_map": places})


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    write_json(folder / INDEX, index)


def edit_bytes(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def spoil_offsets(data: bytes) -> bytes:
    """Let two tensors of equal size overlap: the length of the file stays right."""
    found = re.search(rb'"model.layers.3.input_layernorm.weight":.*?\[(\d+),(\d+)\]', data)
    other = re.search(rb'"model.layers.3.post_attention_layernorm.weight":.*?\[(\d+),(\d+)\]', data)
    assert found and other and len(found[1]) == len(other[1])
    return data[: found.start(1)] + other[1] + b"," + other[2] + data[found.end(2) :]


DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing tensor": (lambda p: edit_tensors(p, lambda t: t.pop(NORM)), ["lacks", NORM, "download"]),
    "extra tensor": (
        lambda p: edit_tensors(p, lambda t: t.update({"model.layers.3.q_norm.weight": torch.ones(64)})),
        ["model.layers.3.q_norm.weight", "another architecture"],
    ),
    "wrong shape": (
        lambda p: edit_tensors(p, lambda t: t.update({NORM: t[NORM][:64].clone()})),
        [NORM, "[64]", "[128]", OTHER],
    ),
    "wrong dtype": (lambda p: edit_tensors(p, lambda t: t.update({NORM: t[NORM].float()})), [NORM, "F32", "BF16"]),
    "truncated shard": (lambda p: edit_bytes(p / SHARD, lambda b: b[:-1000]), [SHARD, "truncated", "download"]),
    "truncated header": (lambda p: edit_bytes(p / SHARD, lambda b: b[:1000]), [SHARD, "truncated"]),
    "empty shard": (lambda p: edit_bytes(p / SHARD, lambda b: b""), [SHARD, "truncated"]),
    "bytes after the end": (lambda p: edit_bytes(p / SHARD, lambda b: b + b"x"), [SHARD, "damaged"]),
    "header garbage": (lambda p: edit_bytes(p / SHARD, lambda b: b[:8] + b"\xff" * 16 + b[24:]), [SHARD, "garbage"]),
    "another file": (lambda p: edit_bytes(p / SHARD, lambda b: b"GGUF" * 100), [SHARD, "not a safetensors file"]),
    "overlapping offsets": (lambda p: edit_bytes(p / OTHER, spoil_offsets), [OTHER, "not a valid safetensors file"]),
    "Git LFS pointer": (
        lambda p: (p / OTHER).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"),
        [OTHER, "Git LFS pointer", "git lfs pull"],
    ),
    "missing shard": (lambda p: (p / SHARD).unlink(), [SHARD, "is missing", "model.embed_tokens.weight", "download"]),
    "missing index": (lambda p: (p / INDEX).unlink(), [INDEX, "is missing", "download"]),
    "index not JSON": (lambda p: (p / INDEX).write_text("{"), [INDEX, "not valid JSON"]),
    "index without a map": (lambda p: (p / INDEX).write_text("{}"), [INDEX, "weight_map"]),
    "index leads outside": (lambda p: edit_index(p, lambda m: m.update({NORM: "../x.safetensors"})), [INDEX, "../x"]),
    "index names the wrong shard": (lambda p: edit_index(p, lambda m: m.update({NORM: SHARD})), [NORM, SHARD, INDEX]),
    "index names an absent tensor": (lambda p: edit_index(p, lambda m: m.update(y=OTHER)), ["y", OTHER, INDEX]),
    "index leaves a tensor out": (lambda p: edit_index(p, lambda m: m.pop(NORM)), [NORM, OTHER, "does not list"]),
    "NaN scale": (
        lambda p: edit_tensors(p, lambda t: t["model.layers.3.mlp.experts.down_proj_scales"].view(-1)[7:8].fill_(255)),
        ["model.layers.3.mlp.experts.down_proj_scales", "NaN"],
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "m", shards=2)
    spoil, says = DAMAGE[name]
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for part in says:
        assert part in str(caught.value)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pickles only \(pytorch_model\.bin\): nothing is ever unpickled"):
        load(folder)


def test_a_missing_shard_of_the_original_layout_shows_in_its_tensors(tmp_path: Path) -> None:
    """There is no index to name the file."""
    folder = make(tmp_path / "m", layout="original", shards=3)
    (folder / "model--00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors: block\.2\..*, \.\.\.: download"):
        load(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor any other"):
        load(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """A stale shard beside a new one: which of the two counts must not depend on the order of the folder."""
    folder = make(tmp_path / "m", layout="original", shards=2)
    save_file({"norm.scale": torch.ones(128, dtype=torch.bfloat16)}, folder / "old.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.scale is both in .*model--0000.*old\.safetensors"):
        load(folder)


def test_the_config_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", layers=4)
    config = load_config(folder)
    for fewer in (3, 5):
        changed = dataclasses.replace(config, num_layers=fewer)
        with pytest.raises(CheckpointError, match=r"19 tensors: .*layers\.[34]"):
            load_weights(folder, changed, progress=False)


# --- the makers ---


def test_a_seed_fixes_the_bytes_and_another_changes_them(tmp_path: Path) -> None:
    a, b, c = (make(tmp_path / str(i), seed=seed) / "model.safetensors" for i, seed in enumerate((1, 1, 2)))
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()


def test_stress_options_do_what_they_say(tmp_path: Path) -> None:
    plain = load(make(tmp_path / "a")).layers
    stressed = load(make(tmp_path / "b", large_sinks=True, big_experts=True)).layers
    assert max(layer.sinks.abs().max().item() for layer in plain) < 4
    assert max(layer.sinks.max().item() for layer in stressed) > 6
    for a, b in zip(plain, stressed, strict=True):
        assert torch.equal(a.gate_up_scales + 3, b.gate_up_scales)
        assert torch.equal(a.down_scales - 3, b.down_scales)


def test_original_config_overrides_are_in_its_own_spelling(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", layout="original", tokenizer=tiny_tokenizer(), rope_ntk_alpha=2)
    config = load_config(folder)
    assert config.rope_beta_slow == 2 and config.eos_token_ids == (313, 312, 319)
    assert original_config(4, 8)["rope_ntk_alpha"] == 1


def test_the_builtin_checkpoint_is_official_in_form_and_small() -> None:
    weights, config = load(BUILTIN), load_config(BUILTIN)
    assert len(weights.layers) == 6 and config.group == 8 and config.experts_per_token == 4
    assert config.layer_types == ("sliding_attention", "full_attention") * 3
    assert config.hidden_size // 32 % 3 and config.head_dim == 64
    assert sum(file.stat().st_size for file in BUILTIN.iterdir()) < 8_000_000
