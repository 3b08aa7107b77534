"""How prompts and decodes get on: sequences that decode all the time, while prompts arrive at a fixed rate.

Every engine gets the same prompts at the same moments after its sequences decode. As long as it keeps up (`prompts` is about
the rate), engines are compared at equal throughput, by the time between two tokens of the running sequences.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from simplellm.bench.work import Meter, draw_ids
from simplellm.errors import EngineError, OptionError
from simplellm.request import Event

WARM = 8  # tokens of each running sequence before the first prompt arrives
POLL_S = 0.002


@dataclass(frozen=True)
class Inter:
    """`num` sequences of `prompt` tokens decode while `count` prompts of `arriving` tokens come, `rate` a second."""

    num: int
    prompt: int
    count: int
    arriving: int
    rate: float

    @classmethod
    def parse(cls, text: str) -> Inter:
        """From "32x1024+40x8192@2.5". Raises OptionError."""
        found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)x(\d+)@(\d+\.?\d*)", text)
        if found is None or min(map(float, found.groups())) <= 0:
            raise OptionError(f"inter: {text!r} is not SEQUENCESxPROMPT+COUNTxPROMPT@RATE, as 32x1024+40x8192@2.5")
        num, prompt, count, arriving = map(int, found.groups()[:4])
        return cls(num, prompt, count, arriving, float(found[5]))

    def __str__(self) -> str:
        return f"{self.num}x{self.prompt}+{self.count}x{self.arriving}@{self.rate:g}"

    def draw(self, vocab: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts of the running sequences, and those that arrive."""
        return draw_ids(self.num, self.prompt, vocab, seed), draw_ids(self.count, self.arriving, vocab, -1 - seed)

    def due(self, i: int) -> float:
        """Seconds from the first arrival to that of prompt i."""
        return i / self.rate


def run(meter: Meter, inter: Inter, seed: int) -> dict[str, float]:
    """One pass on an engine in this process: `summarise`'s figures. Raises EngineError, OptionError."""
    engine = meter.engine
    running, arriving = inter.draw(engine.model_config.vocab_size, seed)
    room = engine.scheduler.max_length - max(inter.prompt, inter.arriving)
    if room < 1:
        raise OptionError(f"inter: {inter} leaves no room for tokens below max_context, {engine.scheduler.max_length}")
    decodes, prompts = meter.requests(running, room), meter.requests(arriving, 1)
    seen: dict[int, list[float]] = {request.rid: [] for request in decodes + prompts}
    ended: dict[int, Event] = {}

    def take(event: Event) -> None:
        seen[event.rid] += [time.perf_counter()] * len(event.tokens)
        if event.finish_reason is not None:
            ended[event.rid] = event

    def wait(done: Callable[[], bool]) -> None:
        while not done():
            for event in list(ended.values()):
                if event.finish_reason == "error" or event.rid in rids:
                    raise EngineError(f"{inter}: a sequence ended too early: {event.error or event.finish_reason}")
            time.sleep(POLL_S)

    rids = [request.rid for request in decodes]
    engine.worker.submit(decodes, take)
    try:
        wait(lambda: all(len(seen[rid]) >= WARM for rid in rids))
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            time.sleep(max(0.0, began + inter.due(i) - time.perf_counter()))
            engine.worker.submit([prompt], take)
        wait(lambda: all(prompt.rid in ended for prompt in prompts))
    finally:
        engine.worker.abort([request.rid for request in decodes + prompts])
    while not engine.worker.loop.idle:
        time.sleep(POLL_S)
    return summarise(inter, began, [seen[rid] for rid in rids], [seen[prompt.rid][0] for prompt in prompts])


def summarise(inter: Inter, began: float, decodes: Sequence[Sequence[float]], firsts: Sequence[float]) -> dict[str, float]:
    """From the moments of the running sequences' tokens, and of the first token of each prompt that arrived.

    Of the time from the first arrival, at `began`, to the last first token: between_*: seconds between two deliveries of a
    running sequence; decode: their tokens per second; prompts: done per second. first_*: seconds from a prompt's arrival.
    """
    end = max(firsts)
    gaps: list[float] = []
    tokens = 0
    for times in decodes:
        within = [moment for moment in times if began <= moment <= end]
        gaps += np.diff(np.unique(within)).tolist()
        tokens += len(within)
    waits = [first - began - inter.due(i) for i, first in enumerate(firsts)]
    if not gaps:
        raise EngineError(f"{inter}: no sequence had two tokens while prompts arrived: more of them, or a lower rate")
    figures = {f"between_p{p}": float(np.percentile(gaps, p)) for p in (50, 99)} | {"between_max": max(gaps)}
    figures |= {f"first_p{p}": float(np.percentile(waits, p)) for p in (50, 99)}
    figures |= {"decode": tokens / (end - began), "prompts": inter.count / (end - began)}
    return {name: round(value, 6) for name, value in figures.items()}
