"""Which device an option names, and how many KV pages its memory holds. GPUs are played by numbers."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from simplellm import kernels
from simplellm.config import EngineConfig, ModelConfig
from simplellm.engine import memory, start
from simplellm.errors import CheckpointError, OptionError
from simplellm.model.checkpoint import load_config
from simplellm.model.weights import load_weights

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU with 20 GB free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 10**9, 80 * 10**9))
    monkeypatch.setattr(kernels, "on_hopper", lambda device, dtype: device.type == "cuda" and dtype == torch.bfloat16)


@pytest.fixture
def config(tiny: Path) -> ModelConfig:
    return load_config(tiny)


def count(config: ModelConfig, device: torch.device, **options: object) -> int:
    many = EngineConfig(**{"max_running": 10**4, **options})  # so that memory is what limits
    return start.count_pages(config, many, device, 10**9, config.max_context)


def needed(config: ModelConfig, **options: object) -> int:
    """By the engine itself, on a GPU."""
    return sum(memory.needs(config, EngineConfig(**{"max_running": 10**4, **options}), config.max_context).values())


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


def test_pages_on_a_gpu_are_what_the_weights_and_the_engine_leave(one_gpu: None, config: ModelConfig) -> None:
    page = config.page_bytes()
    assert count(config, GPU) == (20 * 10**9 - needed(config)) // page  # the weights are there already
    assert count(config, GPU, memory_gb=10) == (9 * 10**9 - needed(config)) // page
    assert count(config, GPU, memory_gb=10, dtype="float32") == (9 * 10**9 - start.TWINS_SPARE) // (2 * page)
    assert count(config, CPU, memory_gb=10) == 9 * 10**9 // page
    assert count(config, CPU, memory_gb=10, dtype="float32") == 9 * 10**9 // (2 * page)


@pytest.mark.parametrize(
    "options",
    [{"prompt_budget": 10**5}, {"token_budget": 10**5}, {"max_running": 2 * 10**4}, {"penalty_slots": 10**5}],
    ids=str,
)
def test_an_option_that_takes_memory_leaves_fewer_pages(one_gpu: None, config: ModelConfig, options: dict[str, int]) -> None:
    more = needed(config, **options) - needed(config)
    assert more > 10**8 and count(config, GPU, **options) == (20 * 10**9 - needed(config) - more) // config.page_bytes()


def test_options_that_leave_no_pages_are_named(one_gpu: None, config: ModelConfig) -> None:
    with pytest.raises(OptionError, match=r"leave room for 0 KV pages.*at least 8") as told:
        count(config, GPU, penalty_slots=2 * 10**7)
    assert f"penalty_slots=20000000 takes {5 * config.vocab_size * 0.02:.1f} GB" in str(told.value)


def test_more_memory_than_the_gpu_has_free_is_refused_with_both_numbers(one_gpu: None, config: ModelConfig) -> None:
    """Else torch runs out of memory, in its own words."""
    with pytest.raises(OptionError, match=r"memory_gb: 60 GB would hold 5\d\.\d GB of KV pages .* has 20\.0 GB free, and "):
        count(config, GPU, memory_gb=60)


def large(tiny: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    """Start an engine of a model whose weights come to more than 20 GB; none may be read."""
    wide = dataclasses.replace(config, num_layers=36, num_experts=128, hidden_size=2880, intermediate_size=2880)
    monkeypatch.setattr(start, "load_config", lambda path: wide)
    monkeypatch.setattr(start, "load_weights", lambda *args: pytest.fail("read"))
    start._start(tiny, EngineConfig(**options), GPU, frozenset())


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    one_gpu: None, tiny: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = r"device: cuda:0 has 20\.0 of its 80\.0 GB free, which is not enough: weights take 6\d\.\d GB"
    with pytest.raises(OptionError, match=free + ", CUDA takes 2.1 GB, prompt_budget=.* 8 KV pages 0.0 GB; end what"):
        large(tiny, config, monkeypatch)
    with pytest.raises(OptionError, match=free + "; end what"):
        large(tiny, config, monkeypatch, num_pages=100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (140 * 10**9, 141 * 10**9))
    with pytest.raises(OptionError, match=r"memory_gb: 60 GB is not enough: weights take 6\d\.\d GB, CUDA takes 2.1 GB"):
        large(tiny, config, monkeypatch, memory_gb=60)
    with pytest.raises(pytest.fail.Exception, match="read"):
        large(tiny, config, monkeypatch)


@pytest.mark.parametrize("at", ["load_weights", "open_runner"])
def test_memory_that_runs_out_in_the_middle_is_told_with_numbers(
    at: str, one_gpu: None, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(start, "load_weights", lambda *args: load_weights(tiny, load_config(tiny), "cpu", False))
    monkeypatch.setattr(start, at, full)
    words = {
        "load_weights": "while loading the weights .*: end what else uses it",
        "open_runner": r"while making KV pages and graphs \(20\.0 of .*: 1000 KV pages take 0\.\d GB, .*; lower num_pages",
    }
    with pytest.raises(OptionError, match=words[at]):
        start._start(tiny, EngineConfig(num_pages=1000), GPU, frozenset())


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
