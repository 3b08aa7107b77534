"""Which device an option names, and how many KV pages its memory holds. GPUs are played by numbers."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from simplellm.config import EngineConfig, ModelConfig
from simplellm.engine import start
from simplellm.errors import CheckpointError, OptionError
from simplellm.model.checkpoint import load_config

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 20 GB free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 10**9, 80 * 10**9))


@pytest.fixture
def config(tiny: Path) -> ModelConfig:
    return load_config(tiny)


def count(config: ModelConfig, device: torch.device, **options: object) -> int:
    many = EngineConfig(max_running=10**6, **options)  # so that memory is what limits
    return start.count_pages(config, many, device, 10**9, config.max_context)


@pytest.mark.parametrize(
    ("name", "words"),
    [("cuda:1", "there are 1 GPUs, counted from 0"), ("cuda:x", "'cuda:x' is not auto"), ("cuda:", "is not auto")],
)
def test_a_gpu_that_is_not_there_is_refused_by_name(one_gpu: None, name: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        start.pick_device(name)


def test_auto_is_the_gpu_where_there_is_one(one_gpu: None) -> None:
    assert start.pick_device("auto") == GPU and start.pick_device("cuda:0") == torch.device("cuda:0")


def test_without_a_gpu_cuda_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert start.pick_device("auto") == CPU
    with pytest.raises(OptionError, match="finds no CUDA GPU"):
        start.pick_device("cuda:0")


def test_pages_on_a_gpu_are_what_the_weights_and_the_headroom_leave(one_gpu: None, config: ModelConfig) -> None:
    page = config.page_bytes()
    assert count(config, GPU) == (20 * 10**9 - start.GPU_SPARE) // page  # the weights are there already
    assert count(config, GPU, memory_gb=10) == (9 * 10**9 - start.GPU_SPARE) // page
    assert count(config, CPU, memory_gb=10) == 9 * 10**9 // page
    assert count(config, CPU, memory_gb=10, dtype="float32") == 9 * 10**9 // (2 * page)


def test_more_memory_than_the_gpu_has_free_is_refused_with_both_numbers(one_gpu: None, config: ModelConfig) -> None:
    """Else torch runs out of memory, in its own words."""
    with pytest.raises(OptionError, match=r"memory_gb: 60 GB would hold 54\.\d GB of KV pages .* has 20\.0 GB free"):
        count(config, GPU, memory_gb=60)


def test_a_container_counts_as_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    """Pages for a share of a large host's memory would end a small container on it."""
    limit, none = tmp_path / "memory.max", tmp_path / "none"
    limit.write_text("1000000000\n")
    none.write_text("max\n")
    monkeypatch.setattr(start, "CONTAINER_LIMITS", (str(none), str(tmp_path / "missing")))
    assert start.machine_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(start, "CONTAINER_LIMITS", (str(none), str(limit)))
    assert start.machine_bytes() == 10**9 and count(config, CPU) == 10**9 // start.CPU_SHARE // config.page_bytes()


def test_a_model_that_the_kernels_are_not_made_for_is_refused_by_its_shapes(config: ModelConfig) -> None:
    start.check_shapes(config)
    other = dataclasses.replace(config, head_dim=32, vocab_size=1500)
    with pytest.raises(CheckpointError, match="head_dim is 32, not 64; vocab_size is 1500, no multiple of 32.*dtype='float32'"):
        start.check_shapes(other)
