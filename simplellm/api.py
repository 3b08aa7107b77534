"""LLM: a model on a device, its engine in a thread, and the calls that generate with it. `docs/api.md` tells all of it."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from simplellm.arguments import (
    ChatSettings,
    Prompt,
    check_constrained,
    conversation_list,
    prompt_ids,
    prompt_list,
    sampling_list,
)
from simplellm.config import EngineConfig
from simplellm.engine.scheduler import Request
from simplellm.errors import RequestError
from simplellm.generation import Answer, Generation, Job, Reader, Stream
from simplellm.model.checkpoint import find_layout
from simplellm.request import Event, Sampling
from simplellm.text.grammar import Grammars, Rules
from simplellm.text.parser import Parser, stop_ids
from simplellm.text.reader import ChatReader, TextReader
from simplellm.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # it needs torch, which takes seconds to import: a server's front does without
    from simplellm.engine.start import Engine

Conversation = Sequence[Mapping[str, Any]]

BUILTIN = Path(__file__).parent / "builtin"
MANY = 16  # prompts from which a progress bar is shown


class Prepared(NamedTuple):
    """A prompt's ids, and what its answers are read and constrained with."""

    ids: tuple[int, ...]
    new_reader: Callable[[tuple[str, ...]], Reader]  # from stop strings
    rules: Rules | None = None


class LLM:
    """gpt-oss from a checkpoint folder. Options: `EngineConfig`. Use `stop()`, or a `with` block, to free the device."""

    def __init__(self, path: str | Path | None = None, **options: Any):
        """path: a folder in the official layout; None: the small built-in model."""
        self.path = Path(path) if path is not None else BUILTIN
        self.options = EngineConfig.from_options(**options)
        find_layout(self.path)  # first what is known in a moment: is it a checkpoint, has it a tokenizer
        self.tokenizer = Tokenizer.from_file(tokenizer_file(self.path))
        self._engine = self._open(stop_ids(self.tokenizer))
        self.config = self._engine.model_config
        self._rids = itertools.count()
        self._grammars = Grammars(self.tokenizer, self.config.vocab_size)
        self._engine.worker.new_constraint = self._grammars.new

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, priority: int = 0, cache_salt: str = "", **sampling: Any
    ) -> Generation:
        """Generate for one prompt (text or token ids) or for many; returns at once.

        `sampling`: the fields of `Sampling`, each one value for all prompts or a list with one per prompt. The result is
        always a list of Outputs, in prompt order. Raises RequestError before anything is queued if a prompt or a setting
        is invalid, naming both.
        """
        return self._start(self._text_job(prompts, priority, cache_salt, sampling))

    def stream(self, prompts: Prompt | Sequence[Prompt], *, priority: int = 0, cache_salt: str = "", **sampling: Any) -> Stream:
        """The same as `generate`, in pieces as they come, for `for` and `async for`."""
        return self._start_stream(self._text_job(prompts, priority, cache_salt, sampling))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        answer_tokens: int | None = None,
        reasoning_effort: str | None = None,
        current_date: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Generation:
        """Answer one conversation (OpenAI's chat messages) or a list of them; docs/chat.md states how it is rendered.

        The outputs' `reasoning`, `content` and `tool_calls` hold the answer. `response_format` constrains the content,
        `tool_choice` may demand a call, `answer_tokens` keeps room for an answer after the reasoning. Everything else is
        as in `generate`; `stop` looks at the content only. A schema is compiled in the caller's thread, once.
        """
        chat = ChatSettings(
            tools, tool_choice, parallel_tool_calls, reasoning_effort, current_date, response_format, answer_tokens
        )
        return self._start(self._chat_job(messages, chat, priority, cache_salt, sampling))

    def chat_stream(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        answer_tokens: int | None = None,
        reasoning_effort: str | None = None,
        current_date: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Stream:
        """The same as `chat`, in chunks of typed deltas: reasoning, content, a tool call's name, its arguments."""
        chat = ChatSettings(
            tools, tool_choice, parallel_tool_calls, reasoning_effort, current_date, response_format, answer_tokens
        )
        return self._start_stream(self._chat_job(messages, chat, priority, cache_salt, sampling))

    def stop(self) -> None:
        """End the engine and free the device; what is pending fails with EngineError."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _open(self, end_ids: frozenset[int]) -> Engine:
        """The engine to use; tests put one in that needs no weights."""
        from simplellm.engine.start import start

        return start(self.path, self.options, end_ids)

    def _start(self, job: Job) -> Generation:
        many = self.options.progress and len(job.answers) >= MANY
        bar = tqdm(total=sum(map(len, job.answers)), unit=" answers", disable=None) if many else None
        generation = Generation(job, bar)
        self._submit(job, generation.on_event)
        return generation

    def _start_stream(self, job: Job) -> Stream:
        stream = Stream(job)
        self._submit(job, partial(_feed, weakref.ref(stream)))
        return stream

    def _submit(self, job: Job, sink: Callable[[Event], None]) -> None:
        self._engine.worker.submit([answer.request for row in job.answers for answer in row], sink)

    def _text_job(self, prompts: Any, priority: int, salt: str, sampling: Mapping[str, Any]) -> Job:
        listed = prompt_list(prompts)
        many = not (isinstance(prompts, str) or listed[0] is prompts)

        def prepare(prompt: Any) -> Prepared:
            ids = prompt_ids(prompt, self.tokenizer, self.config.vocab_size)
            return Prepared(ids, lambda stops: TextReader(self.tokenizer.decoder(), stops))

        return self._job(listed, many, prepare, priority, salt, sampling)

    def _chat_job(self, messages: Any, chat: ChatSettings, priority: int, salt: str, sampling: Mapping[str, Any]) -> Job:
        listed, many = conversation_list(messages)
        names = chat.check()
        rules = chat.rules()
        if rules is not None:
            self._grammars.check(rules)

        def prepare(conversation: Any) -> Prepared:
            ids = chat.render(conversation, self.tokenizer)
            new = partial(Parser, self.tokenizer, names, parallel_tool_calls=chat.parallel_tool_calls)
            return Prepared(tuple(ids), lambda stops: ChatReader(new(), stops), rules)

        return self._job(listed, many, prepare, priority, salt, sampling)

    def _job(
        self,
        prompts: Sequence[Any],
        many: bool,
        prepare: Callable[[Any], Prepared],
        priority: int,
        salt: str,
        sampling: Mapping[str, Any],
    ) -> Job:
        """Check everything, queue nothing."""
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError("priority", f"{priority!r} is not a whole number")
        if not isinstance(salt, str):
            raise RequestError("cache_salt", f"{salt!r} is not a string")
        settings = sampling_list(sampling, len(prompts))
        rows = []
        for index, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
            try:
                setting.check(self.config.vocab_size)
                prepared = prepare(prompt)
                self._engine.scheduler.check(len(prepared.ids))
                if prepared.rules is not None:
                    check_constrained(setting)
            except RequestError as error:
                raise error.at(index) if many else error from None
            rows.append(self._answers(index, prepared, setting, priority, salt))
        return Job(rows, self._engine.worker.abort)

    def _answers(self, index: int, prepared: Prepared, sampling: Sampling, priority: int, salt: str) -> list[Answer]:
        """One prompt's requests: n of them, sharing the prompt's pages."""
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        now, answers = time.monotonic(), []
        rids = [next(self._rids) for _ in range(sampling.n)]
        group = rids[0] if len(rids) > 1 else None
        for choice, rid in enumerate(rids):
            own = sampling if choice == 0 else dataclasses.replace(sampling, prompt_logprobs=None)
            request = Request(rid, prepared.ids, own, seed + choice, priority, salt, group, prepared.rules)
            answers.append(Answer(index, choice, request, prepared.new_reader(sampling.stop), now))
        return answers


def _feed(stream: weakref.ref[Stream], event: Event) -> None:
    """A stream that its reader dropped takes nothing in; its end cancels the requests."""
    if (alive := stream()) is not None:
        alive.on_event(event)


def tokenizer_file(path: Path) -> Path:
    """The checkpoint's tokenizer.json; OpenAI's `original/` folder has it one level up."""
    inside, above = path / "tokenizer.json", path.parent / "tokenizer.json"
    return above if path.is_dir() and not inside.exists() and above.exists() else inside
