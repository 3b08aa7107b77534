"""A workload of token ids through a running engine, timed at the engine's events; and what a record says of the machine."""

from __future__ import annotations

import platform
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from simplellm import __version__
from simplellm.bench.trace import TEXT_IDS
from simplellm.engine.scheduler import Request
from simplellm.engine.start import Engine, pick_device
from simplellm.errors import EngineError, OptionError
from simplellm.request import Event, Sampling


@dataclass(frozen=True)
class Work:
    """`num` sequences of `prompt` tokens that generate `new` each."""

    num: int
    prompt: int
    new: int

    @classmethod
    def parse(cls, text: str) -> Work:
        """From "64x1024x512". Raises OptionError."""
        try:
            num, prompt, new = (int(part) for part in text.split("x"))
        except ValueError:
            raise OptionError(f"work: {text!r} is not SEQUENCESxPROMPTxNEW, as 64x1024x512") from None
        if min(num, prompt, new) < 1:
            raise OptionError(f"work: {text!r} has a part below 1")
        return cls(num, prompt, new)

    def __str__(self) -> str:
        return f"{self.num}x{self.prompt}x{self.new}"


@dataclass(frozen=True)
class Timing:
    """One pass. Seconds from the submission; tokens per second over all sequences."""

    first: float  # the first sequence's first token
    last_first: float  # the last one's
    end: float
    steady: float  # tokens after every sequence has its first, per second
    decode: float  # sequences x (tokens - 1) / (last token - first token): the seed's formula
    overall: float

    def agrees(self, other: Timing) -> bool:
        """Within 3 per cent where it counts."""
        return all(
            abs(getattr(self, name) - getattr(other, name)) <= 0.03 * getattr(other, name) for name in ("overall", "last_first")
        )


class Meter:
    """Runs workloads on an engine, one after another."""

    def __init__(self, engine: Engine):
        self.engine, self._rid = engine, 0

    def run(self, work: Work, seed: int) -> Timing:
        """One pass: greedy, no end token, distinct random prompts. Raises EngineError if a sequence fails."""
        requests = self.requests(draw_ids(work.num, work.prompt, self.engine.model_config.vocab_size, seed), work.new)
        seen: dict[int, list[float]] = {request.rid: [] for request in requests}
        failed: list[Event] = []
        left, done = work.num, threading.Event()

        def take(event: Event) -> None:
            nonlocal left
            now = time.perf_counter()
            seen[event.rid] += [now] * len(event.tokens)
            if event.finish_reason is not None:
                failed.extend([event] if event.finish_reason == "error" else [])
                left -= 1
                if left == 0:
                    done.set()

        began = time.perf_counter()
        self.engine.worker.submit(requests, take)
        done.wait()
        if failed:
            raise EngineError(f"{work}: {failed[0].error}")
        assert all(len(times) == work.new for times in seen.values()), "a sequence is short of tokens"
        return summarise(work, began, list(seen.values()))

    def requests(self, prompts: Sequence[Sequence[int]], new: int) -> list[Request]:
        """Greedy ones without end tokens, `new` tokens each."""
        sampling = Sampling(temperature=0.0, max_tokens=new, ignore_eos=True)
        first, self._rid = self._rid, self._rid + len(prompts)
        return [Request(rid, tuple(ids), sampling) for rid, ids in enumerate(prompts, first)]

    def repeat(self, work: Work, most: int = 5) -> list[Timing]:
        """Passes until two in a row agree within 3 %, at most `most`: the last is the result."""
        passes = [self.run(work, seed=1)]
        while len(passes) < most:
            passes.append(self.run(work, seed=1 + len(passes)))
            if passes[-1].agrees(passes[-2]):
                break
        return passes


def draw_ids(num: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """`num` prompts of random text tokens: the same for every engine."""
    random = Random(seed)
    return [random.choices(range(min(vocab, TEXT_IDS)), k=length) for _ in range(num)]


def summarise(work: Work, began: float, seen: list[list[float]]) -> Timing:
    """From the moment at which each sequence's tokens came."""
    first, last_first = min(times[0] for times in seen), max(times[0] for times in seen)
    end = max(times[-1] for times in seen)
    late = sum(moment > last_first for times in seen for moment in times)
    return Timing(
        first=first - began,
        last_first=last_first - began,
        end=end - began,
        steady=late / (end - last_first) if late else 0.0,
        decode=work.num * (work.new - 1) / (end - first) if work.new > 1 else 0.0,
        overall=work.num * work.new / (end - began),
    )


def machine(device: str = "auto") -> dict[str, Any]:
    """Card (the one that an engine's option names), driver, versions and commit, as far as they can be known."""
    import torch

    facts: dict[str, Any] = {"version": __version__, "python": platform.python_version(), "torch": torch.__version__}
    root = Path(__file__).resolve().parent.parent.parent
    facts["commit"] = _said("git", "-C", str(root), "rev-parse", "--short", "HEAD") or None
    gpu = pick_device(device)
    if gpu.type == "cuda":
        import triton

        facts |= {"card": torch.cuda.get_device_name(gpu), "triton": triton.__version__, "cuda": torch.version.cuda}
        facts["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    return facts


def about(engine: Engine) -> dict[str, Any]:
    """Its machine, and all of its options as they came to be."""
    scheduler = engine.scheduler
    options = asdict(scheduler.config) | {"num_pages": scheduler.pool.num_usable + 1, "max_context": scheduler.max_context}
    return {**machine(scheduler.config.device), "options": options}


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def rounded(timing: Timing) -> dict[str, float]:
    """For a record."""
    return {name: round(value, 5 if value < 100 else 1) for name, value in asdict(timing).items()}
