"""LLM: a model on a device, its engine in a thread, and the calls that generate with it. `docs/api.md` tells all of it."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from simplellm.config import EngineConfig, suggest
from simplellm.engine.scheduler import Request
from simplellm.engine.start import Engine, start
from simplellm.errors import RequestError
from simplellm.generation import Answer, Generation, Job, Reader, Stream
from simplellm.model.checkpoint import find_layout
from simplellm.request import Event, Sampling
from simplellm.text.harmony import declared_tools, render
from simplellm.text.parser import Parser
from simplellm.text.reader import ChatReader, TextReader
from simplellm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
Prepared = tuple[tuple[int, ...], Callable[[tuple[str, ...]], Reader]]

BUILTIN = Path(__file__).parent / "builtin"
END_TOKENS = ("<|return|>", "<|call|>", "<|endoftext|>")  # old downloads' generation_config.json lacks <|call|>
MANY = 16  # prompts from which a progress bar is shown

_SAMPLING = tuple(f.name for f in dataclasses.fields(Sampling))


class LLM:
    """gpt-oss from a checkpoint folder. Options: `EngineConfig`. Use `stop()`, or a `with` block, to free the device."""

    def __init__(self, path: str | Path | None = None, **options: Any):
        """path: a folder in the official layout; None: the small built-in model."""
        self.path = Path(path) if path is not None else BUILTIN
        self.options = EngineConfig.from_options(**options)
        find_layout(self.path)  # first what is known in a moment: is it a checkpoint, has it a tokenizer
        self.tokenizer = Tokenizer.from_file(tokenizer_file(self.path))
        ends = {self.tokenizer.special[name] for name in END_TOKENS if name in self.tokenizer.special}
        self._engine = self._open(frozenset(ends))
        self.config = self._engine.model_config
        self._rids = itertools.count()

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
        reasoning_effort: str | None = None,
        current_date: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Generation:
        """Answer one conversation (OpenAI's chat messages) or a list of them; docs/chat.md states how it is rendered.

        The outputs' `reasoning`, `content` and `tool_calls` hold the answer. `tool_choice`: "auto" or "none".
        Everything else is as in `generate`; `stop` looks at the content only.
        """
        chat = ChatSettings(tools, tool_choice, parallel_tool_calls, reasoning_effort, current_date)
        return self._start(self._chat_job(messages, chat, priority, cache_salt, sampling))

    def chat_stream(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        current_date: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Stream:
        """The same as `chat`, in chunks of typed deltas: reasoning, content, a tool call's name, its arguments."""
        chat = ChatSettings(tools, tool_choice, parallel_tool_calls, reasoning_effort, current_date)
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
            return ids, lambda stops: TextReader(self.tokenizer.decoder(), stops)

        return self._job(listed, many, prepare, priority, salt, sampling)

    def _chat_job(self, messages: Any, chat: ChatSettings, priority: int, salt: str, sampling: Mapping[str, Any]) -> Job:
        listed, many = conversation_list(messages)
        names = chat.check()

        def prepare(conversation: Any) -> Prepared:
            ids = chat.render(conversation, self.tokenizer)
            new = partial(Parser, self.tokenizer, names, parallel_tool_calls=chat.parallel_tool_calls)
            return tuple(ids), lambda stops: ChatReader(new(), stops)

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
        """Check everything, queue nothing. `prepare` turns a prompt into its ids and a maker of readers."""
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError("priority", f"{priority!r} is not a whole number")
        if not isinstance(salt, str):
            raise RequestError("cache_salt", f"{salt!r} is not a string")
        settings = sampling_list(sampling, len(prompts))
        rows = []
        for index, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
            try:
                setting.check(self.config.vocab_size)
                ids, new_reader = prepare(prompt)
                self._engine.scheduler.check(len(ids))
            except RequestError as error:
                raise error.at(index) if many else error from None
            rows.append(self._answers(index, ids, new_reader, setting, priority, salt))
        return Job(rows, self._engine.worker.abort)

    def _answers(
        self,
        index: int,
        ids: tuple[int, ...],
        new_reader: Callable[[tuple[str, ...]], Reader],
        sampling: Sampling,
        priority: int,
        salt: str,
    ) -> list[Answer]:
        """One prompt's requests: n of them, sharing the prompt's pages."""
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        now, answers = time.monotonic(), []
        rids = [next(self._rids) for _ in range(sampling.n)]
        group = rids[0] if len(rids) > 1 else None
        for choice, rid in enumerate(rids):
            own = sampling if choice == 0 else dataclasses.replace(sampling, prompt_logprobs=None)
            request = Request(rid, ids, own, seed + choice, priority=priority, cache_salt=salt, group=group)
            answers.append(Answer(index, choice, request, new_reader(sampling.stop), now))
        return answers


def _feed(stream: weakref.ref[Stream], event: Event) -> None:
    """A stream that its reader dropped takes nothing in; its end cancels the requests."""
    if (alive := stream()) is not None:
        alive.on_event(event)


def tokenizer_file(path: Path) -> Path:
    """The checkpoint's tokenizer.json; OpenAI's `original/` folder has it one level up."""
    inside, above = path / "tokenizer.json", path.parent / "tokenizer.json"
    return above if path.is_dir() and not inside.exists() and above.exists() else inside


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What a chat request says besides its messages."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Any
    parallel_tool_calls: bool
    reasoning_effort: str | None
    current_date: str | None

    def check(self) -> set[str]:
        """Names that the model may call. Raises RequestError."""
        if not isinstance(self.parallel_tool_calls, bool):
            raise RequestError("parallel_tool_calls", f"{self.parallel_tool_calls!r} is neither true nor false")
        if self.tool_choice == "required" or isinstance(self.tool_choice, Mapping):
            raise RequestError("tool_choice", "forcing a call needs grammars, which are not there yet: use 'auto' or 'none'")
        if self.tool_choice not in (None, "auto", "none"):
            raise RequestError("tool_choice", f"{self.tool_choice!r} is neither 'auto' nor 'none'")
        declared = declared_tools(self.tools)
        return {tool.name for tool in declared} if self.tool_choice != "none" else set()

    def render(self, conversation: Any, tokenizer: Tokenizer) -> list[int]:
        """Prompt ids. With tool_choice "none" the model is not told of the tools."""
        tools = None if self.tool_choice == "none" else self.tools
        return render(
            conversation,
            tokenizer,
            tools=tools,
            reasoning_effort=self.reasoning_effort,
            current_date=self.current_date,
        )


def conversation_list(messages: Any) -> tuple[list[Any], bool]:
    """One conversation or a list of them -> a list, and whether there were many."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError("messages", f"{type(messages).__name__} is no list of messages")
    if not messages:
        raise RequestError("messages", "an empty list")
    if all(isinstance(item, Sequence) and not isinstance(item, (str, bytes)) for item in messages):
        return list(messages), True
    return [messages], False


def prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt (a string, or a list of ids) or a list of them -> a list of prompts, at least one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError("prompts", f"{type(prompts).__name__} is neither text, token ids nor a list of such")
    if not prompts:
        raise RequestError("prompts", "an empty list")
    if all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def prompt_ids(prompt: Any, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a prompt, text or ids, checked."""
    if isinstance(prompt, str):
        ids = tuple(tokenizer.encode(prompt))
    elif isinstance(prompt, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        ids = tuple(prompt)
    else:
        raise RequestError("prompt", f"{type(prompt).__name__} is neither text nor a list of token ids")
    if not ids:
        raise RequestError("prompt", "is empty: at least 1 token is needed")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError("prompt", f"token id {token} is outside the vocabulary of {vocab_size}")
    return ids


def sampling_list(sampling: Mapping[str, Any], num_prompts: int) -> list[Sampling]:
    """One Sampling per prompt from keywords whose values are one for all or a list of one per prompt."""
    for name in sampling:
        if name not in _SAMPLING:
            raise RequestError(name, f"no such setting; {suggest(name, _SAMPLING)}")
    columns = {name: _column(name, value, num_prompts) for name, value in sampling.items()}
    return [Sampling(**{name: column[i] for name, column in columns.items()}) for i in range(num_prompts)]


def _column(name: str, value: Any, num_prompts: int) -> list[Any]:
    """`value` for each prompt. A list of strings (stop) or of ids (stop_token_ids) is itself one value."""
    single = {"stop": str, "stop_token_ids": int}.get(name)
    listed = isinstance(value, list) and not (single and all(isinstance(item, single) for item in value))
    if not listed:
        return [_one(name, value)] * num_prompts
    if len(value) != num_prompts:
        raise RequestError(name, f"a list of {len(value)} values for {num_prompts} prompts")
    return [_one(name, item) for item in value]


def _one(name: str, value: Any) -> Any:
    if name in ("stop", "stop_token_ids"):
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else value
    return {} if name == "logit_bias" and value is None else value
