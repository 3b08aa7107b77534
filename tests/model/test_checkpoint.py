"""config.json in all spellings, and every refusal with its message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplellm.config import FULL, WINDOW, ModelConfig
from simplellm.errors import CheckpointError
from simplellm.model.checkpoint import find_layout, find_tensors, load_config, read_header
from tests.checkpoints import make
from tools.make_checkpoint import encode_header, hf_config, original_config

OFFICIAL_20B = ModelConfig(
    num_layers=24,
    hidden_size=2880,
    intermediate_size=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    num_experts=32,
    experts_per_token=4,
    vocab_size=201088,
    layer_types=(WINDOW, FULL) * 12,
    sliding_window=128,
    max_context=131072,
    rms_norm_eps=1e-5,
    swiglu_limit=7.0,
    rope_theta=150000.0,
    rope_factor=32.0,
    rope_beta_fast=32.0,
    rope_beta_slow=1.0,
    rope_original_context=4096,
    rope_truncate=False,
    eos_token_ids=(200002, 199999, 200012),
)
GENERATION = {"eos_token_id": [200002, 199999, 200012]}
MISSING = object()


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def changed(config: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """The config with one field, "a.b" for one inside an object, replaced or removed."""
    config = json.loads(json.dumps(config))
    *outer, name = field.split(".")
    place = config
    for key in outer:
        place = place[key]
    place[name] = value
    if value is MISSING:
        del place[name]
    return config


def test_official_config(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "m", hf_config(24, 32), GENERATION)) == OFFICIAL_20B
    assert find_layout(tmp_path / "m") == "hf"


def test_rope_parameters_is_the_same_as_rope_scaling(tmp_path: Path) -> None:
    """transformers 5 saves the new spelling; reading only one of them loses YaRN (spec 7.2)."""
    config = hf_config(24, 32)
    config["rope_parameters"] = config.pop("rope_scaling") | {"rope_theta": config.pop("rope_theta")}
    assert load_config(write(tmp_path / "m", config, GENERATION)) == OFFICIAL_20B


def test_original_config_with_the_generation_config_of_the_folder_above(tmp_path: Path) -> None:
    """There beta_slow is called alpha and beta_fast beta, and the context is a product."""
    write(tmp_path, {}, GENERATION)
    folder = write(tmp_path / "original", original_config(24, 32))
    assert load_config(folder) == OFFICIAL_20B
    assert find_layout(folder) == "original"


def test_values_come_from_the_config_and_not_from_constants(tmp_path: Path) -> None:
    values = {"max_position_embeddings": 999, "rms_norm_eps": 1e-3, "swiglu_limit": 5, "sliding_window": 17}
    rope = {"rope_type": "yarn", "factor": 8, "beta_fast": 20, "beta_slow": 2, "original_max_position_embeddings": 64}
    config = hf_config(3, 5, **values, rope_scaling=rope, rope_theta=10, layer_types=[FULL, FULL, WINDOW])
    got = load_config(write(tmp_path / "m", config))
    assert (got.max_context, got.rms_norm_eps, got.swiglu_limit, got.sliding_window) == (999, 1e-3, 5.0, 17)
    assert (got.rope_factor, got.rope_beta_fast, got.rope_beta_slow, got.rope_original_context) == (8, 20, 2, 64)
    assert (got.rope_theta, got.layer_types, got.num_experts) == (10, (FULL, FULL, WINDOW), 5)


def test_truncate_left_out_is_true_as_in_transformers(tmp_path: Path) -> None:
    config = changed(hf_config(2, 8), "rope_scaling.truncate", MISSING)
    assert load_config(write(tmp_path / "m", config)).rope_truncate is True


@pytest.mark.parametrize(
    ("generation", "own", "want"),
    [
        (None, 7, (7,)),
        ({"eos_token_id": 3}, 7, (3, 7)),
        ({"eos_token_id": [3, 7, 9]}, 7, (3, 7, 9)),
        ({}, [5, 6], (5, 6)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_eos_ids_are_those_of_both_files(tmp_path: Path, generation: Any, own: Any, want: tuple[int, ...]) -> None:
    assert load_config(write(tmp_path / "m", hf_config(2, 8, eos_token_id=own), generation)).eos_token_ids == want


REFUSED = [
    ("model_type", "llama", "gpt_oss"),
    ("architectures", ["LlamaForCausalLM"], "GptOssForCausalLM"),
    ("quantization_config", MISSING, "MXFP4"),
    ("quantization_config", None, "MXFP4"),
    ("quantization_config.quant_method", "fp8", "mxfp4"),
    ("quantization_config.quant_method", MISSING, "is missing"),
    ("hidden_act", "gelu", "silu"),
    ("attention_bias", False, "true"),
    ("tie_word_embeddings", True, "false"),
    ("swiglu_alpha", 1.5, "1.702"),
    ("rope_scaling.rope_type", "linear", "yarn"),
    ("rope_scaling.attention_factor", 1.2, "none"),
    ("rope_scaling.partial_rotary_factor", 0.5, "1.0"),
    ("rope_scaling.truncate", 0, "true or false"),
    ("rope_scaling", [], "object"),
    ("sliding_window", 129, "1 to 128"),
    ("sliding_window", 0, "from 1"),
    ("sliding_window", None, "from 1"),
    ("layer_types", [WINDOW], "list of 4"),
    ("layer_types", [WINDOW, FULL, WINDOW, "chunked_attention"], "chunked_attention"),
    ("hidden_size", 2896, "multiples of 32"),
    ("intermediate_size", 100, "multiples of 32"),
    ("num_key_value_heads", 7, "num_attention_heads is 64"),
    ("head_dim", 63, "even"),
    ("num_experts_per_tok", 5, "experts_per_token"),
    ("num_local_experts", 3, "num_experts_per_tok is 4"),
    ("num_hidden_layers", "4", "whole number"),
    ("num_hidden_layers", True, "whole number"),
    ("hidden_size", 2880.0, "whole number"),
    ("rms_norm_eps", "1e-5", "a number"),
    ("rms_norm_eps", float("nan"), "a number"),
    ("rope_theta", 10**400, "at most 1e12"),
    ("eos_token_id", 201088, "below vocab_size"),
    ("eos_token_id", [1, "x"], "below vocab_size"),
]


@pytest.mark.parametrize(("field", "value", "says"), REFUSED)
def test_an_unsupported_value_is_refused_by_name(tmp_path: Path, field: str, value: Any, says: str) -> None:
    folder = write(tmp_path / "m", changed(hf_config(4, 8), field, value))
    with pytest.raises(CheckpointError, match=says) as caught:
        load_config(folder)
    assert str(folder / "config.json") in str(caught.value)


NEEDED = [
    *(
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("num_local_experts", "vocab_size", "layer_types", "sliding_window", "max_position_embeddings", "rms_norm_eps"),
    *("swiglu_limit", "rope_theta", "rope_scaling", "rope_scaling.rope_type", "rope_scaling.factor"),
    "rope_scaling.original_max_position_embeddings",
]


@pytest.mark.parametrize("field", NEEDED)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(CheckpointError, match=f"field {field} is missing"):
        load_config(write(tmp_path / "m", changed(hf_config(4, 8), field, MISSING)))


@pytest.mark.parametrize("field", sorted(original_config(4, 8)))
def test_a_missing_field_of_the_original_layout_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(CheckpointError, match=field):
        load_config(write(tmp_path / "m", changed(original_config(4, 8), field, MISSING)))


@pytest.mark.parametrize("make_config", [hf_config, original_config])
@pytest.mark.parametrize("value", [None, -1, 1.5, True, "x", [], {}, [[]], {"x": 1}, 10**400, float("inf")], ids=repr)
def test_odd_values_end_in_a_checkpoint_error_or_do_not_matter(tmp_path: Path, make_config: Any, value: Any) -> None:
    """No field may raise anything else, whatever JSON it holds."""
    for field in make_config(2, 8):
        try:
            load_config(write(tmp_path / "m", changed(make_config(2, 8), field, value)))
        except CheckpointError as error:
            assert field in str(error)


def test_one_name_of_experts_per_token_is_enough(tmp_path: Path) -> None:
    for name in ("experts_per_token", "num_experts_per_tok"):
        config = changed(hf_config(4, 8), name, MISSING)
        assert load_config(write(tmp_path / "m", config)).experts_per_token == 4


# --- folders ---


def test_a_hub_id_is_answered_with_the_download_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="hf download openai/gpt-oss-20b --local-dir gpt-oss-20b "):
        load_config(Path("openai/gpt-oss-20b"))
    with pytest.raises(CheckpointError, match="hf download openai/gpt-oss-120b --local-dir gpt-oss-120b "):
        load_config(Path("./gpt-oss-120b"))
    (tmp_path / "models").mkdir()
    with pytest.raises(CheckpointError, match="hf download openai/gpt-oss-20b --local-dir models/gpt-oss-20b "):
        load_config(Path("models/gpt-oss-20b"))


def test_paths_that_are_no_checkpoint_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    write(tmp_path / "other", {"dim": 4096})
    write(tmp_path / "list", [1])
    (tmp_path / "half").mkdir()
    write(tmp_path / "half" / "original", original_config(4, 8))
    for name, says in [
        ("empty", "is empty"),
        ("file", "is a file: pass the folder"),
        ("other", "neither model_type"),
        ("list", "no JSON object"),
        ("half", "pass .*original"),
    ]:
        with pytest.raises(CheckpointError, match=says):
            load_config(tmp_path / name)
    (tmp_path / "empty" / "README.md").write_text("x")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_config(tmp_path / "empty")


def test_the_hugging_face_layout_wins_where_both_are(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", shards=2)
    make(folder / "original", layout="original")
    assert find_layout(folder) == "hf"
    assert "lm_head.weight" in find_tensors(folder, "hf")
    assert find_layout(folder / "original") == "original"


# --- headers ---


@given(st.binary(max_size=64), st.booleans())
def test_any_bytes_are_a_header_or_a_checkpoint_error(tmp_path_factory: Any, data: bytes, framed: bool) -> None:
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(len(data).to_bytes(8, "little") + data if framed else data)
    with pytest.raises(CheckpointError, match=r"any\.safetensors"):
        read_header(file)


ENTRY = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    "header",
    [[], 3, {"a": 1}, {"a": {}}, {"a": ENTRY | {"shape": 2}}, {"a": ENTRY | {"data_offsets": [0]}}]
    + [{"a": ENTRY | {"shape": [float("inf")]}}, {"a": ENTRY | {"data_offsets": [0, "x"]}}],
    ids=repr,
)
def test_a_header_of_another_form_is_garbage(tmp_path: Path, header: Any) -> None:
    (tmp_path / "a.safetensors").write_bytes(encode_header(header) + b"ab")
    with pytest.raises(CheckpointError, match="header is garbage"):
        read_header(tmp_path / "a.safetensors")
