"""From a checkpoint folder to a running engine: device, weights, how many KV pages fit, the thread.

On a GPU pages get what weights and the engine's own needs (memory.py) leave; what cannot fit is refused before it is loaded.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock

import torch

from simplellm import kernels
from simplellm.config import PAGE, EngineConfig, ModelConfig
from simplellm.engine import memory
from simplellm.engine.loop import Loop, PlanRunner
from simplellm.engine.runner import Runner
from simplellm.engine.scheduler import Scheduler
from simplellm.engine.worker import Worker
from simplellm.errors import CheckpointError, OptionError
from simplellm.model.checkpoint import load_config
from simplellm.model.gpt_oss import GptOss
from simplellm.model.layers import arrange
from simplellm.model.weights import list_sources, load_weights

log = logging.getLogger("simplellm")

CPU_SHARE = 8  # without memory_gb, KV pages on a CPU take at most this part of the machine's memory
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroups v2, v1
TWINS_SPARE = 4 << 30  # bytes for activations and CUDA where the twins run on a GPU, whose float64 nobody counts
LEAST_PAGES = 8
PROMPT_BUDGET = 16384  # tokens of a step on a GPU while prompts come first: wide tiles, few launches
SMALL = 512  # hidden size up to which one CPU core is as fast as two, and ten times faster when another process wants one


@dataclass(slots=True)
class Engine:
    """A started engine."""

    model_config: ModelConfig
    scheduler: Scheduler
    runner: PlanRunner
    worker: Worker
    _closed: Lock = field(default_factory=Lock)  # taken by the first `close`, for good

    def close(self) -> None:
        """Stop the thread and let go of weights and pages. Safe to call again and from any thread."""
        self.worker.close()
        if self._closed.acquire(blocking=False):
            self.runner.close()


def start(path: Path, options: EngineConfig, end_ids: frozenset[int]) -> Engine:
    """Load the checkpoint in `path` and start its engine. Raises CheckpointError, OptionError.

    end_ids: tokens that end an answer, besides those that the checkpoint's configuration names.
    """
    device = pick_device(options.device)
    # Streams, events and Triton's launches go to the current device, whichever the tensors are on.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _start(path, options, device, end_ids)


def _start(path: Path, options: EngineConfig, device: torch.device, end_ids: frozenset[int]) -> Engine:
    began = time.perf_counter()
    config = load_config(path)
    max_context = config.max_context if options.max_context is None else options.max_context
    if max_context > config.max_context:
        raise OptionError(f"max_context: {max_context} is above the model's {config.max_context}")
    dtype: torch.dtype = getattr(torch, options.dtype)
    if kernels.on_hopper(device, dtype):
        check_shapes(config)
        options = with_prompt_budget(options, max_context)
    if device.type == "cuda":
        check_room(config, options, device, max_context)
    with memory.explained(device, "loading the weights", "end what else uses it"):
        weights = load_weights(path, config, device, options.progress, partial(arrange, dtype=dtype))
        model = GptOss(config, weights, dtype, max_context)
    loaded = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left over is room for pages
    num_pages = options.num_pages or count_pages(config, options, device, weights.num_bytes, max_context)
    with memory.explained(device, "making KV pages and graphs", lower(config, options, device, max_context, num_pages)):
        runner = open_runner(model, num_pages, options, max_context)
    done = time.perf_counter()
    phases = (done - began, loaded - began, done - loaded)
    log.info("%s on %s, %d KV pages, ready in %.1f s: weights %.1f s, the rest %.1f s", path.name, device, num_pages, *phases)
    if device.type == "cuda":
        log.info("%.2f GB of the GPU's memory are free", torch.cuda.mem_get_info(device)[0] / 1e9)
    alone = device.type == "cpu" and config.hidden_size <= SMALL
    prepare = partial(torch.set_num_threads, 1) if alone else None
    if device.type == "cuda":
        prepare = partial(torch.cuda.set_device, device)
    return assemble(config, options, runner, num_pages, max_context, end_ids, prepare)


def with_prompt_budget(options: EngineConfig, max_context: int) -> EngineConfig:
    """The options with a GPU's prompt_budget, unless they have one."""
    if options.prompt_budget is not None:
        return options
    return replace(options, prompt_budget=min(PROMPT_BUDGET, max(max_context, options.token_budget)))


def check_shapes(config: ModelConfig) -> None:
    """Raise CheckpointError for a model whose shapes the Hopper kernels are not made for."""
    fixed = {"head_dim": (config.head_dim, 64), "experts_per_token": (config.experts_per_token, 4)}
    fixed["query heads per KV head"] = config.group, 8
    whole = {"hidden_size": (config.hidden_size, 64), "intermediate_size": (config.intermediate_size, 64)}
    whole["vocab_size"] = config.vocab_size, 32
    problems = [f"{name} is {has}, not {need}" for name, (has, need) in fixed.items() if has != need]
    problems += [f"{name} is {has}, no multiple of {unit}" for name, (has, unit) in whole.items() if has % unit]
    if problems:
        raise CheckpointError(
            f"the GPU kernels are not made for this model ({'; '.join(problems)}): use dtype='float32' or device='cpu'"
        )


def open_runner(model: GptOss, num_pages: int, options: EngineConfig, max_context: int) -> PlanRunner:
    """Graphs of kernels on a Hopper GPU, the twins elsewhere."""
    if kernels.on_hopper(model.weights.embed.device, model.dtype):
        from simplellm.engine.gpu_runner import GpuRunner

        return GpuRunner(model, num_pages, options, max_context)
    return Runner(model, num_pages, options.max_running, max_context, options.penalty_slots)


def assemble(
    config: ModelConfig,
    options: EngineConfig,
    runner: PlanRunner,
    num_pages: int,
    max_context: int,
    end_ids: frozenset[int],
    prepare: Callable[[], None] | None = None,
) -> Engine:
    """An engine around a runner: the model's, or a test's. `prepare` is called in the engine's thread first."""
    scheduler = Scheduler(
        options,
        num_pages=num_pages,
        max_context=max_context,
        sliding_window=config.sliding_window,
        eos_ids=end_ids | frozenset(config.eos_token_ids),
    )
    return Engine(config, scheduler, runner, Worker(Loop(scheduler, runner, options.lag), prepare))


def pick_device(name: str) -> torch.device:
    """The device an option names; "auto" is the first GPU if there is one."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError(f"device: {name!r}, but PyTorch finds no CUDA GPU (try device='cpu')")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"device: {name!r} is not auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda:0")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise OptionError(f"device: {name!r}, but there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def spare(config: ModelConfig, options: EngineConfig, device: torch.device, max_context: int) -> dict[str, int]:
    """Bytes on a GPU beside weights and pages, by the option that decides about them."""
    if kernels.on_hopper(device, getattr(torch, options.dtype)):
        return memory.needs(config, options, max_context)
    return {memory.CUDA: TWINS_SPARE}


def lower(config: ModelConfig, options: EngineConfig, device: torch.device, max_context: int, num_pages: int) -> str:
    """What to do where `num_pages` leave too little."""
    if device.type != "cuda":
        return ""
    pages = num_pages * config.page_bytes(getattr(torch, options.dtype).itemsize)
    name = "memory_gb" if options.num_pages is None else "num_pages"
    told = memory.tell(spare(config, options, device, max_context), options)
    return f"{num_pages} KV pages take {pages / 1e9:.1f} GB, {told}; lower {name} or the largest of these"


def check_room(config: ModelConfig, options: EngineConfig, device: torch.device, max_context: int) -> None:
    """Raise OptionError, before anything is loaded, if the weights and the least beside them are more than the GPU has.

    With num_pages that is room for loading; else also what the options need and LEAST_PAGES.
    """
    torch.cuda.empty_cache()  # what an engine before this one left
    free, total = torch.cuda.mem_get_info(device)
    sources = list_sources(config)
    weights = sum(source.num_bytes for source in sources)
    loading = 2 * sum(source.num_bytes for source in sources if source.layer == 0)  # a layer as it is read, and as it was
    needed = spare(config, options, device, max_context) if options.num_pages is None else {}
    pages = LEAST_PAGES * config.page_bytes(getattr(torch, options.dtype).itemsize) if needed else 0
    beside = sum(needed.values()) + pages
    told = f"weights take {weights / 1e9:.1f} GB"
    told += f", {memory.tell(needed, options)}, {LEAST_PAGES} KV pages {pages / 1e9:.1f} GB" if needed else ""
    if needed and options.memory_gb is not None and weights + beside > options.memory_gb * 1e9:
        raise OptionError(f"memory_gb: {options.memory_gb} GB is not enough: {told}")
    if weights + max(beside, loading) > free:
        raise OptionError(
            f"device: {device} has {free / 1e9:.1f} of its {total / 1e9:.1f} GB free, which is not enough: {told}; "
            "end what else uses it, or lower these options"
        )


def count_pages(config: ModelConfig, options: EngineConfig, device: torch.device, weight_bytes: int, max_context: int) -> int:
    """KV pages that memory allows, at most what `max_running` full contexts can use. On a GPU the weights are there already."""
    itemsize = getattr(torch, options.dtype).itemsize
    page = config.page_bytes(itemsize)
    on_gpu = device.type == "cuda"
    needed = spare(config, options, device, max_context) if on_gpu else {}
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else machine_bytes()
    if options.memory_gb is not None:
        room = int(options.memory_gb * 1e9) - weight_bytes - sum(needed.values())
    else:
        room = free - sum(needed.values()) if on_gpu else free // CPU_SHARE
    most = 1 + options.max_running * ((max_context + PAGE - 1) // PAGE + 2 + options.idle_budget // PAGE)
    num_pages = min(room // page, most)
    if num_pages < LEAST_PAGES:
        beside = f", and {memory.tell(needed, options)}," if needed else ""
        raise OptionError(
            f"memory_gb: weights of {weight_bytes / 1e9:.1f} GB{beside} leave room for {max(num_pages, 0)} KV pages "
            f"of {page / 1e6:.1f} MB; at least {LEAST_PAGES} are needed"
        )
    if on_gpu and num_pages * page + sum(needed.values()) > free:
        raise OptionError(
            f"memory_gb: {options.memory_gb} GB would hold {num_pages * page / 1e9:.1f} GB of KV pages beside the weights, "
            f"but the GPU has {free / 1e9:.1f} GB free, and {memory.tell(needed, options)}"
        )
    return num_pages


def machine_bytes() -> int:
    """Memory of this machine, or of the container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # there is none, or it says "max"
            total = min(total, int(Path(file).read_text()))
    return total
