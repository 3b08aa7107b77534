"""The formulas of engine/memory.py against what the model's own calls hold at once, and the words for too little memory.

Nothing runs and nothing compiles: tensors are on the "meta" device, and every storage is watched as it comes and goes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simplellm.api import BUILTIN
from simplellm.config import EngineConfig, ModelConfig
from simplellm.engine import memory, start
from simplellm.engine.loop import is_lost
from simplellm.errors import OptionError
from simplellm.model.checkpoint import load_config
from simplellm.model.weights import list_sources
from tools.make_checkpoint import hf_config, write_json

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
SIZES = {"20b": (24, 32), "120b": (36, 128)}


def official(folder: Path, size: str) -> ModelConfig:
    write_json(folder / "config.json", hf_config(*SIZES[size]))
    return load_config(folder)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made meanwhile hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._alive = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return out


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A runner of a size and options whose launches are not even compiled, built under a Peak that is read at each call."""
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    from simplellm.engine import gpu_runner
    from simplellm.engine.compiling import hollow_weights
    from simplellm.kernels.hopper.launch import compiling
    from simplellm.model.gpt_oss import GptOss

    nothing = SimpleNamespace(metadata=SimpleNamespace(shared=0), asm={"cubin": b""})
    monkeypatch.setattr(JITFunction, "warmup", lambda *args, **kwargs: nothing)

    def build(config: ModelConfig, options: EngineConfig, max_context: int, num_pages: int) -> tuple[int, int]:
        """Bytes that stay, but for the pages; and the most that a step or a head had beside them."""
        weights = hollow_weights(config)
        with compiling(), Peak() as peak:
            runner = gpu_runner.GpuRunner(GptOss(config, weights, torch.bfloat16, max_context), num_pages, options, max_context)
        stays = sum(size for ref, size in peak._alive.values() if not ref.expired()) - runner.kv.untyped_storage().nbytes()
        return stays, peak.most - stays - runner.kv.untyped_storage().nbytes()

    return build


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("budget", [2048, 16384, 65536])
def test_a_step_holds_what_the_formula_says(size: str, budget: int, tmp_path: Path, watched: Callable[..., Any]) -> None:
    config = official(tmp_path, size)
    _, most = watched(config, EngineConfig(max_running=64, prompt_budget=budget), 4096, 64)
    assert most <= memory.step_bytes(config, budget) <= 1.3 * most


@pytest.mark.parametrize("options", [{}, {"max_running": 4096}, {"penalty_slots": 2000}, {"max_context": 8192}], ids=str)
def test_what_stays_is_within_what_is_needed(options: dict[str, int], tmp_path: Path, watched: Callable[..., Any]) -> None:
    config = official(tmp_path, "20b")
    options, max_context = dict(options), options.get("max_context", config.max_context)
    chosen = EngineConfig(**options)
    needed = memory.needs(config, chosen, max_context)
    stays, most = watched(config, chosen, max_context, 64)
    rows = needed["max_running"] - memory.needs(config, EngineConfig(max_running=1), max_context)["max_running"]
    assert stays <= needed["penalty_slots"] + needed["max_context"] + rows
    assert stays + most <= sum(needed.values()) - memory.FIXED


def test_the_constants_are_the_runners() -> None:
    gpu_runner = pytest.importorskip("simplellm.engine.gpu_runner")
    assert (gpu_runner.MIXED_SIZES[-1], gpu_runner.HEAD_ROWS) == (memory.GRAPH_TOKENS, memory.HEAD_ROWS)


@pytest.mark.gpu
def test_an_engine_takes_no_more_than_its_options_say() -> None:
    """Of the built-in model, whose tensors are small: so this is about FIXED. It prints what was taken."""
    config, options = load_config(BUILTIN), EngineConfig(num_pages=64, progress=False)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(0)[0]
    engine = start.start(BUILTIN, options, frozenset())
    try:
        taken = before - torch.cuda.mem_get_info(0)[0]
    finally:
        engine.close()
    needed = memory.needs(config, start.with_prompt_budget(options, config.max_context), config.max_context)
    weights = sum(source.num_bytes for source in list_sources(config))
    print(f"taken {taken / 1e9:.3f} GB, FIXED {memory.FIXED / 1e9:.3f}, the rest {sum(needed.values()) - memory.FIXED:,} bytes")
    assert taken <= weights + 64 * config.page_bytes() + sum(needed.values())


def test_every_option_that_costs_memory_is_named_with_its_gigabytes(tmp_path: Path) -> None:
    config = official(tmp_path, "20b")
    options = EngineConfig(prompt_budget=131072, penalty_slots=5000, max_running=100_000)
    told = memory.tell(memory.needs(config, options, 131072), options)
    assert told.startswith("max_running=100000 takes 22.4 GB, prompt_budget=131072 takes 13.3 GB")
    assert "penalty_slots=5000 takes 5.0 GB, CUDA takes 2.1 GB" in told and "max_context" not in told
    small = EngineConfig(token_budget=8192, prompt_budget=4096)
    assert "token_budget=8192 takes" in memory.tell(memory.needs(config, small, 131072), small)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        type("AcceleratorError", (RuntimeError,), {})("CUDA error: out of memory"),
    ],
)
def test_no_memory_is_told_in_words_and_loses_no_device(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**8, 80 * 10**9))
    words = r"cuda:0 ran out of memory while reading \(0\.1 of its 80\.0 GB are free\): eat less"
    with pytest.raises(OptionError, match=words), memory.explained(GPU, "reading", "eat less"):
        raise error
    with pytest.raises(type(error)), memory.explained(CPU, "reading", "eat less"):
        raise error
    assert not is_lost(error)


def test_other_errors_pass_as_they_are() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"), memory.explained(GPU, "reading", "eat less"):
        raise error
    assert is_lost(error)
