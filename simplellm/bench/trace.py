"""What a server is asked and when: a trace, drawn from distributions or read from a file, the same for all who are measured.

A file holds one request a line: {"arrival_s": 0.25, "prompt_tokens": 1024, "new_tokens": 256}, seconds since the start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from simplellm.errors import OptionError

TEXT_IDS = 199_000  # ids below are text in gpt-oss's vocabulary

Draw = Callable[[Random], int]


@dataclass(frozen=True)
class Arrival:
    """A request: its second, the tokens of its prompt, and how many it generates."""

    at: float
    prompt: int
    new: int


def parse_lengths(text: str) -> Draw:
    """A distribution of lengths in tokens. Raises OptionError.

    "1024": always; "512-2048": uniform, both ends included; "lognormal:1024:0.8": with that median, and that standard
    deviation of the logarithm; "lognormal:1024:0.8:8192": the same, what is above 8192 cut to it.
    """
    kind, *parts = text.split(":")
    try:
        if kind == "lognormal":
            median, sigma, most = float(parts[0]), float(parts[1]), int(parts[2]) if len(parts) == 3 else None
            if len(parts) <= 3 and 1 <= median < math.inf and 0 <= sigma < math.inf and (most is None or most >= 1):
                return lambda random: _within(random.lognormvariate(math.log(median), sigma), most)
        elif not parts:
            low, _, high = text.partition("-")
            ends = int(low), int(high or low)
            if 1 <= ends[0] <= ends[1]:
                return lambda random: random.randint(*ends)
    except (ValueError, IndexError):
        pass
    raise OptionError(f"length: {text!r} is not TOKENS, LOW-HIGH or lognormal:MEDIAN:SIGMA[:MOST], each at least 1")


def _within(value: float, most: int | None) -> int:
    return max(1, round(value if most is None else min(value, most)))


def draw_trace(num: int, rate: float | None, prompt: Draw, new: Draw, seed: int) -> list[Arrival]:
    """`num` requests: all at once, or with exponential gaps, `rate` of them per second (Poisson). Raises OptionError."""
    if num < 1:
        raise OptionError(f"num: {num} is below 1")
    if rate is not None and not 0 < rate < math.inf:
        raise OptionError(f"rate: {rate} is not above 0")
    random, at, trace = Random(seed), 0.0, []
    for i in range(num):
        at += random.expovariate(rate) if rate is not None and i else 0.0
        trace.append(Arrival(at, prompt(random), new(random)))
    return trace


def save_trace(path: Path, trace: Sequence[Arrival]) -> None:
    """Raises OptionError where it cannot be written."""
    lines = [json.dumps({"arrival_s": one.at, "prompt_tokens": one.prompt, "new_tokens": one.new}) + "\n" for one in trace]
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"save_trace: cannot write {path} ({error.strerror})") from None


def load_trace(path: Path) -> list[Arrival]:
    """By arrival. Raises OptionError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"trace: cannot read {path} ({error})") from None
    trace = [_read(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not trace:
        raise OptionError(f"trace: {path} holds no request")
    return sorted(trace, key=lambda one: one.at)


def _read(line: str, where: str) -> Arrival:
    try:
        told = json.loads(line)
        one = Arrival(float(told["arrival_s"]), int(told["prompt_tokens"]), int(told["new_tokens"]))
    except (ValueError, TypeError, KeyError, OverflowError):
        raise OptionError(f"trace: {where} is not an object with arrival_s, prompt_tokens and new_tokens") from None
    if not (0 <= one.at < math.inf and one.prompt >= 1 and one.new >= 1):
        raise OptionError(f"trace: {where}: arrival_s must be at least 0, prompt_tokens and new_tokens at least 1")
    return one


def draw_prompts(trace: Sequence[Arrival], vocab: int, seed: int) -> list[list[int]]:
    """Random token ids, other ones for another seed: no prefix cache knows them."""
    random, ids = Random(seed), range(min(vocab, TEXT_IDS))
    return [random.choices(ids, k=one.prompt) for one in trace]
