"""The model against transformers' gpt-oss in float32, and against our own cache-free oracle, on tiny random checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from simplellm.kernels.rope import inverse_frequencies
from simplellm.model.gpt_oss import GptOss
from tests.checkpoints import make
from tests.oracle import Oracle
from tests.paged import Sequences

SHAPES = {
    "default": {},
    "two kv heads, odd layer count": {"layers": 3, "heads": 6, "kv_heads": 2, "hidden": 192, "experts": 4},
    "wide group, many experts": {"heads": 16, "hidden": 64, "intermediate": 192, "experts": 24, "experts_per_token": 6},
    "large sinks": {"large_sinks": True},
    "experts past the clamp": {"big_experts": True},
    "short window, small head": {"window": 5, "head_dim": 32},
    "other constants": {"swiglu_limit": 3.0, "rms_norm_eps": 1e-3, "rope_theta": 10000},
}
Load = Callable[..., GptOss]


def random_ids(num: int, vocab: int = 320, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def transformers_logits(path: Path, ids: list[int]) -> torch.Tensor:
    from transformers import GptOssForCausalLM, Mxfp4Config

    model = GptOssForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def our_logits(model: GptOss, ids: list[int], chunk: int | None = None) -> torch.Tensor:
    sequences = Sequences(model, 1, len(ids))
    step = chunk or len(ids)
    return torch.cat([sequences.run([(0, ids[at : at + step])])[0] for at in range(0, len(ids), step)])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_transformers(tmp_path: Path, load: Load, shape: dict) -> None:
    path, ids = make(tmp_path, **shape), random_ids(290)
    want = transformers_logits(path, ids)
    assert (our_logits(load(path), ids) - want).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_oracle(tmp_path: Path, load: Load, shape: dict) -> None:
    path, ids = make(tmp_path, **shape), random_ids(140)
    want = Oracle(path).logits(ids)
    assert (our_logits(load(path), ids) - want).abs().max() < 2e-5 * want.abs().max()


def test_beyond_the_base_context(tmp_path: Path, load: Load) -> None:
    """Pitfall 2: YaRN skipped, or its ramp wrong, shows only on positions past 4,096."""
    path, ids = make(tmp_path, layers=2, heads=2, hidden=64), random_ids(4200)
    want = transformers_logits(path, ids)[-64:]
    got = our_logits(load(path, max_context=8192), ids, chunk=1400)[-64:]
    assert (got - want).abs().max() < 5e-5 * want.abs().max()


@pytest.mark.parametrize("num", [1, 127, 128, 129, 255, 256, 257])
def test_window_edges(tmp_path: Path, load: Load, num: int) -> None:
    """Pitfall 4: 128 keys with the query itself, in one prompt, in chunks and token by token; to the bit."""
    path, ids = make(tmp_path), random_ids(num + 3)
    model = load(path)
    whole = our_logits(model, ids)
    want = transformers_logits(path, ids)
    assert (whole - want).abs().max() < 2e-5 * want.abs().max()
    sequences = Sequences(model, 1, num + 3)
    parts = [sequences.run([(0, ids[:num])])[0]] + [sequences.run([(0, [token])])[0] for token in ids[num:]]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("chunk", [1, 3, 64, 100, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_matter(tmp_path: Path, load: Load, chunk: int, dtype: torch.dtype) -> None:
    """However a prompt is cut, the logits are the same bits."""
    model, ids = load(make(tmp_path), dtype), random_ids(200)
    assert torch.equal(our_logits(model, ids, chunk), our_logits(model, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_do_not_matter(tmp_path: Path, load: Load, dtype: torch.dtype) -> None:
    """Pitfall 15: a batch that mixes prompts, chunks and decodes gives each sequence what it gets alone, to the bit."""
    model = load(make(tmp_path), dtype)
    prompts = [random_ids(num, seed=num) for num in (1, 50, 130, 200)]
    alone = [our_logits(model, ids) for ids in prompts]
    together = Sequences(model, len(prompts), 256)
    got: list[list[torch.Tensor]] = [[] for _ in prompts]
    cuts = [(0, 0, 1), (1, 0, 49), (2, 0, 100), (3, 0, 7)], [(3, 7, 150), (1, 49, 50), (2, 100, 130)], [(3, 150, 200)]
    for step in cuts:
        spans = [(s, prompts[s][begin:end]) for s, begin, end in step]
        for (s, _), logits in zip(spans, together.run(spans), strict=True):
            got[s].append(logits)
    for own, want in zip(got, alone, strict=True):
        assert torch.equal(torch.cat(own), want)


def test_bfloat16_is_as_close_as_transformers(tmp_path: Path, load: Load) -> None:
    """With rounding where the model rounds, the error to float32 is no worse than transformers' own bfloat16 run."""
    from transformers import GptOssForCausalLM, Mxfp4Config

    path, ids = make(tmp_path), random_ids(200)
    exact = Oracle(path).logits(ids)
    theirs = GptOssForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    with torch.inference_mode():
        their_error = (theirs(torch.tensor([ids])).logits[0] - exact).square().mean().sqrt()
    our_error = (our_logits(load(path, torch.bfloat16), ids) - exact).square().mean().sqrt()
    assert our_error < 1.1 * their_error


def test_original_layout_is_the_same_model(tmp_path: Path, load: Load) -> None:
    ids = random_ids(150)
    hf, original = make(tmp_path / "hf"), make(tmp_path / "original", layout="original")
    assert torch.equal(our_logits(load(hf), ids), our_logits(load(original), ids))


def test_inverse_frequencies_equal_transformers(tmp_path: Path, load: Load) -> None:
    """Pitfall 1, to the bit, with bounds kept as they are and with bounds rounded (YaRN's default)."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    for truncate in (False, True):
        rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
        rope |= {"original_max_position_embeddings": 4096, "truncate": truncate}
        path = make(tmp_path / str(truncate), layers=2, rope_scaling=rope)
        theirs = GptOssRotaryEmbedding(GptOssConfig.from_pretrained(path))
        assert torch.equal(inverse_frequencies(load(path).config), theirs.inv_freq)
