"""An LLM that answers with given token ids: scheduler, loop, worker and API are the real ones, only the runner draws by script.

It has the real o200k vocabulary and needs no weights. In place of an id a script may hold an exception, which is raised in the
step that would draw it: an error in the middle of a step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simplellm import LLM
from simplellm.engine.start import Engine, assemble
from simplellm.model.checkpoint import load_config
from simplellm.request import Logprob, Plan, RowStart, Span
from tests import vocab
from tools.make_checkpoint import hf_config, write_json

NUM_PAGES = 2100  # one full context of 131,072 tokens fits twice over
END_OF_TEXT = 199999

Script = Sequence["int | Exception"]


@dataclass
class Drawn:
    """A plan on its way, and its results."""

    plan: Plan
    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    scores: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)


class ScriptedRunner:
    """Draws each request's script; after its end, `<|endoftext|>`. Requests count from 0 as they are submitted.

    The log-probability of a token at position p is -p / 1000, and its alternatives are the ids after it, at half that.
    """

    def __init__(self, scripts: Sequence[Script]):
        self.num_steps = 0
        self._rows: dict[int, RowStart] = {}
        self._by_rid: dict[int, Script] = {}
        self.play(0, scripts)

    def play(self, first: int, scripts: Sequence[Script]) -> None:
        """Request `first` and those after it draw these; when there are no more, the last one again."""
        self._scripts = (first, scripts)

    def body(self, plan: Plan) -> Drawn:
        self.num_steps += 1
        self._rows.update({start.row: start for start in plan.row_starts})
        return Drawn(plan)

    def head(self, pending: Drawn, masks: Mapping[int, Any], skip: Set[int]) -> None:
        for span in pending.plan.spans:
            if span.targets:
                pending.scores[span.rid] = tuple(_logprob(token, span.start + i + 1) for i, token in enumerate(span.targets))
            if span.sample and span.rid not in skip:
                self._draw(span, pending)

    def results(self, pending: Drawn) -> Drawn:
        return pending

    def close(self) -> None:
        self._scripts = (0, [])

    def _draw(self, span: Span, pending: Drawn) -> None:
        start, script = self._rows[span.row], self._script(span.rid)
        at = span.end - start.num_prompt
        drawn = script[at] if at < len(script) else END_OF_TEXT
        if isinstance(drawn, Exception):
            raise drawn
        pending.tokens[span.rid] = drawn
        if start.sampling.logprobs:
            pending.logprobs[span.rid] = _logprob(drawn, span.end, start.sampling.top_logprobs)

    def _script(self, rid: int) -> Script:
        if rid not in self._by_rid:
            first, scripts = self._scripts
            self._by_rid[rid] = scripts[min(rid - first, len(scripts) - 1)]
        return self._by_rid[rid]


class ScriptedLLM(LLM):
    """An LLM whose requests draw these scripts, in the order in which they are submitted."""

    def __init__(self, *scripts: Script, **options: Any):
        self.runner = ScriptedRunner(scripts)
        super().__init__(model_folder(), **({"num_pages": NUM_PAGES, "progress": False} | options))

    def play(self, *scripts: Script) -> None:
        """The next requests draw these; those after them, the last. An answer to n choices is n requests."""
        self.runner.play(next(self._rids) + 1, scripts)

    def _open(self, end_ids: frozenset[int]) -> Engine:
        config, options = load_config(self.path), self.options
        assert options.num_pages is not None
        max_context = options.max_context or config.max_context
        return assemble(config, options, self.runner, options.num_pages, max_context, end_ids)


def scripted_llm(*scripts: Script, **options: Any) -> ScriptedLLM:
    """`scripted_llm(ids)` answers every request with ids; `scripted_llm(a, b)` the first with a, the others with b."""
    return ScriptedLLM(*scripts, **options)


def model_folder() -> Path:
    """A folder without weights whose tokenizer.json is the real one, in the folder above it, as for OpenAI's `original/`."""
    folder = vocab.tokenizer_json().parent / "scripted"
    folder.mkdir(exist_ok=True)
    part = folder / f"config.{os.getpid()}.part"  # several test processes may write at once
    write_json(part, hf_config(2, 8))
    part.replace(folder / "config.json")
    return folder


def _logprob(token: int, position: int, num_top: int = 0) -> Logprob:
    top = tuple((token + 1 + i, -position / 2000) for i in range(num_top))
    return Logprob(token, -position / 1000, top)
