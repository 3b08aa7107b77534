"""`simplellm info`: the published numbers of both sizes, and the engine's accounting of pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplellm.config import ModelConfig
from simplellm.errors import CheckpointError
from simplellm.info import count_bytes, count_pages, count_parameters, count_requests, count_spare, describe
from simplellm.model.checkpoint import load_config
from tests.checkpoints import make, make_hollow
from tools.make_checkpoint import hf_config, write_json


def official(folder: Path, layers: int, experts: int) -> ModelConfig:
    write_json(folder / "config.json", hf_config(layers, experts))
    return load_config(folder)


def test_published_parameter_counts(tmp_path: Path) -> None:
    small, large = official(tmp_path, 24, 32), official(tmp_path, 36, 128)
    assert count_parameters(small) == (20_914_757_184, 3_608_307_264)
    assert count_parameters(large) == (116_829_156_672, 5_132_849_472)
    assert (count_bytes(small), count_bytes(large)) == (13_761_264_768, 65_248_815_744)


def test_pages_fill_what_weights_and_headroom_leave(tmp_path: Path) -> None:
    config = official(tmp_path, 36, 128)
    num_pages = count_pages(config, 80)
    assert 4e9 < count_spare(config) < 5e9  # of which 1.7 GB are the activations of 16,384 tokens
    used = 65_248_815_744 + count_spare(config) + num_pages * 4_718_592
    assert used <= 80e9 < used + 4_718_592
    assert count_pages(config, 60) < 0


def test_a_request_takes_a_page_for_128_tokens_and_two_for_its_window(tmp_path: Path) -> None:
    config = official(tmp_path, 36, 128)
    room = 2048 // 128 + 1 - 2  # window pages of the chunk that one request runs
    assert count_requests(config, 34 + room, 4096) == 1
    assert count_requests(config, 34 + room - 1, 4096) == 0
    assert count_requests(config, 35 * 10 + room, 4097) == 10
    assert count_requests(config, 10**9, 4096) == 1024  # max_running
    assert count_requests(config, 3, 4096) == 0


def test_describe_needs_no_weights(tmp_path: Path) -> None:
    """The shards of a 120b are 65 GB of holes here: the headers say it all."""
    text = describe(make_hollow(tmp_path / "m", hf_config(36, 128), shards=15), memory_gb=80)
    for part in ("687 tensors in 15 file(s)", "116,829,156,672", "65,248,815,744", "36: 18 see 128", "4,718,592"):
        assert part in text
    assert "80 GB" in text and "141 GB" not in text and "1024 + 2 pages" in text


def test_describe_says_what_does_not_fit(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    assert "In 80 GB" in describe(folder) and "In 141 GB" in describe(folder)
    assert "does not fit" in describe(folder, memory_gb=0.001)


def test_describe_refuses_a_broken_checkpoint(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", shards=2)
    (folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        describe(folder)
