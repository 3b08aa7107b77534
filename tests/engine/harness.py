"""An engine without threads on a real (tiny) model, whose free pages always hold NaN: every schedule runs step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from simplellm.config import EngineConfig
from simplellm.engine.loop import Loop
from simplellm.engine.runner import Runner
from simplellm.engine.scheduler import Request, Scheduler
from simplellm.model.gpt_oss import GptOss
from simplellm.request import Event, Logprob


class PoisonedFree(list):
    """The pool's free list; a page that enters it forgets what it held."""

    def __init__(self, pages: Iterable[int], kv: torch.Tensor):
        super().__init__(pages)
        self.kv = kv

    def append(self, page: int) -> None:
        self.kv[:, :, page] = torch.nan
        super().append(page)


class Harness:
    """Collects every request's events; audits the books after each step."""

    def __init__(self, model: GptOss, num_pages: int = 200, max_context: int = 1024, eos: Iterable[int] = (), **options):
        config = EngineConfig(**{"token_budget": 512, "max_running": 64, "penalty_slots": 4, **options})
        self.scheduler = Scheduler(
            config,
            num_pages=num_pages,
            max_context=max_context,
            sliding_window=model.config.sliding_window,
            eos_ids=frozenset(eos),
        )
        self.runner = Runner(model, num_pages, config.max_running, max_context, config.penalty_slots)
        self.runner.kv.fill_(torch.nan)
        pool = self.scheduler.pool
        pool.free = PoisonedFree(pool.free, self.runner.kv)
        self.loop = Loop(self.scheduler, self.runner, config.lag)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Logprob]] = {}
        self.prompt_logprobs: dict[int, list[Logprob]] = {}
        self.reasons: dict[int, str] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.tokens[request.rid], self.logprobs[request.rid] = [], []
            self.prompt_logprobs[request.rid] = []
            self.scheduler.add(request)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            assert event.rid not in self.reasons, "an event after the end"
            self.tokens[event.rid] += event.tokens
            self.logprobs[event.rid] += event.logprobs
            self.prompt_logprobs[event.rid] += event.prompt_logprobs
            if event.finish_reason is not None:
                self.reasons[event.rid] = event.finish_reason

    def run(self, between: Callable[[int], None] | None = None) -> Harness:
        """Step until idle. between(step) may add or abort."""
        step = 0
        while not self.loop.idle:
            if between is not None:
                between(step)
            self.take(self.loop.step())
            self.scheduler.audit()
            step += 1
            assert step < 20_000, "no progress"
        return self

    def answers(self) -> dict[int, tuple]:
        """All that a schedule must not change."""
        return {
            rid: (tokens, self.reasons.get(rid), self.logprobs[rid], self.prompt_logprobs[rid])
            for rid, tokens in self.tokens.items()
        }
