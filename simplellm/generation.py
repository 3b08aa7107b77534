"""What a caller holds while its requests run: a Generation (a future, also awaitable) or a Stream of Chunks.

Both fold the same events through one `Answer` per request, so streaming and not streaming cannot differ. Answers are fed
in the engine's thread; callers read finished values only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Lock
from typing import Any, Protocol

from simplellm.engine.scheduler import Request
from simplellm.errors import EngineError
from simplellm.request import Event, Logprob
from simplellm.text.parser import ContentDelta, Delta, Message, ReasoningDelta, ToolCall, fold


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request was submitted."""

    queued: float  # until it had a row
    first_token: float | None  # until its first token was known
    total: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as OpenAI's API counts them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    reasoning_tokens: int  # of the completion


class Reader(Protocol):
    """What an answer is read with: `text.reader.TextReader` or `ChatReader`."""

    @property
    def cut(self) -> bool: ...
    @property
    def complete(self) -> bool: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...
    @property
    def finish_kind(self) -> str | None: ...
    @property
    def repairs(self) -> Mapping[str, int]: ...
    def push(self, token: int) -> list[Delta]: ...
    def close(self) -> list[Delta]: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt."""

    index: int
    message: Message  # no control tokens; content is cut before a stop string
    token_ids: list[int]  # all generated, a stop token included; cut to the content at a stop string
    reasoning_tokens: int  # of token_ids
    finish_reason: str  # "stop" | "length" | "tool_calls"; "abort": its stream was closed before
    logprobs: list[Logprob] | None
    timings: Timings
    repairs: dict[str, int]  # of a chat answer: what departed from the format, by kind (docs/chat.md)

    @property
    def text(self) -> str:
        """The answer to a plain prompt; the content of a chat answer."""
        return self.message.content

    @property
    def content(self) -> str:
        return self.message.content

    @property
    def reasoning(self) -> str:
        return self.message.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.message.tool_calls


@dataclass(frozen=True, slots=True)
class Output:
    """A prompt's answers; the first one's fields stand on the output itself."""

    index: int  # of the prompt within the call
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    prompt_logprobs: list[Logprob | None] | None  # None for the first token: nothing precedes it
    choices: list[Choice]

    text = property(lambda self: self.choices[0].text)
    content = property(lambda self: self.choices[0].content)
    reasoning = property(lambda self: self.choices[0].reasoning)
    tool_calls = property(lambda self: self.choices[0].tool_calls)
    token_ids = property(lambda self: self.choices[0].token_ids)
    finish_reason = property(lambda self: self.choices[0].finish_reason)
    logprobs = property(lambda self: self.choices[0].logprobs)
    timings = property(lambda self: self.choices[0].timings)

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and of all its answers."""
        generated = sum(len(choice.token_ids) for choice in self.choices)
        reasoning = sum(choice.reasoning_tokens for choice in self.choices)
        return Usage(self.prompt_tokens, generated, self.prompt_tokens + generated, self.cached_tokens, reasoning)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one answer. A chat answer's `deltas` are typed: reasoning, content, a tool call's name, its arguments."""

    index: int  # of the prompt within the call
    choice: int
    deltas: list[Delta]
    token_ids: list[int]
    logprobs: list[Logprob] | None
    finish_reason: str | None = None  # set on an answer's last chunk

    @property
    def text(self) -> str:
        """What it adds to the answer's text, or to a chat answer's content."""
        return "".join(delta.text for delta in self.deltas if isinstance(delta, ContentDelta))

    @property
    def reasoning(self) -> str:
        """What it adds to a chat answer's reasoning."""
        return "".join(delta.text for delta in self.deltas if isinstance(delta, ReasoningDelta))


@dataclass(slots=True)
class Answer:
    """Collects one request's events into deltas, ids and log-probabilities."""

    index: int
    choice: int
    request: Request
    reader: Reader
    submitted: float
    deltas: list[Delta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    shown: int = 0  # tokens that chunks gave out
    finish_reason: str | None = None
    first_token: float | None = None
    ended: float = 0.0

    def feed(self, event: Event) -> Chunk | None:
        """Take an event in; the piece it adds, if any. The answer may end here before the engine knows of it."""
        if self.finish_reason is not None:
            return None
        now = time.monotonic()
        if event.tokens and self.first_token is None:
            self.first_token = now
        deltas: list[Delta] = []
        reader = self.reader
        for i, token in enumerate(event.tokens):
            deltas += reader.push(token)
            self.token_ids.append(token)
            self.logprobs.extend(event.logprobs[i : i + 1])
            if self._complete:
                break
        self.prompt_logprobs.extend(event.prompt_logprobs)
        self.finish_reason = self._finish_reason(event)
        if self.finish_reason is not None:
            deltas += reader.close()
            self.finish_reason = self._finish_reason(event)  # a stop string may have been among the rest
            del self.token_ids[reader.num_tokens :], self.logprobs[reader.num_tokens :]
            self.ended = now
        self.deltas += deltas
        new, self.shown = slice(self.shown, reader.num_tokens), reader.num_tokens
        if not deltas and new.start == new.stop and self.finish_reason is None:
            return None
        logprobs = self.logprobs[new] if self.request.sampling.logprobs else None
        return Chunk(self.index, self.choice, deltas, self.token_ids[new], logprobs, self.finish_reason)

    @property
    def _complete(self) -> bool:
        """No further token belongs to the answer, whether or not the engine knows."""
        return self.reader.cut or (self.reader.complete and not self.request.sampling.ignore_eos)

    def _finish_reason(self, event: Event) -> str | None:
        """A stop string's, else the engine's, told apart by what the answer holds; a complete answer ends by itself."""
        if self._complete or event.finish_reason == "stop":
            return self.reader.finish_kind or "stop"
        return event.finish_reason

    def finished(self) -> Choice:
        """The whole answer."""
        assert self.finish_reason is not None
        since = [None if at is None else at - self.submitted for at in (self.request.admitted_at, self.first_token)]
        return Choice(
            index=self.choice,
            message=fold(self.deltas),
            token_ids=self.token_ids,
            reasoning_tokens=self.reader.reasoning_tokens,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs if self.request.sampling.logprobs else None,
            timings=Timings(since[0] or 0.0, since[1], self.ended - self.submitted),
            repairs=dict(self.reader.repairs),
        )


class Job:
    """The requests of one call: routes events to answers, ends requests whose text met a stop string."""

    def __init__(self, answers: Sequence[Sequence[Answer]], abort: Callable[[list[int], str], None]):
        self.answers = answers  # by prompt, then choice
        self._by_rid = {answer.request.rid: answer for row in answers for answer in row}
        self._open = set(self._by_rid)
        self._abort = abort
        self.failure: EngineError | None = None

    def feed(self, event: Event) -> Chunk | None:
        """Take an event in. `done` or `failure` may be set afterwards."""
        if event.finish_reason == "error":
            if event.rid in self._open:
                self._open.discard(event.rid)
                self.failure = EngineError(event.error or "the engine failed")
                self.cancel()  # the call has failed: nobody will read the rest
            return None
        answer = self._by_rid[event.rid]
        chunk = answer.feed(event)
        if answer.finish_reason is not None:
            self._open.discard(event.rid)
            if event.finish_reason is None:  # a stop string: the engine does not know yet
                self._abort([event.rid], "stop")
        return chunk

    @property
    def done(self) -> bool:
        return not self._open

    def cancel(self) -> None:
        """End what still runs."""
        if self._open:
            self._abort(sorted(self._open), "abort")

    def outputs(self) -> list[Output]:
        """All answers, in prompt order."""
        return [self._output(row) for row in self.answers]

    @staticmethod
    def _output(row: Sequence[Answer]) -> Output:
        first = row[0]
        request = first.request
        scored = request.sampling.prompt_logprobs is not None
        prompt_logprobs: list[Logprob | None] | None = [None, *first.prompt_logprobs] if scored else None
        choices = [answer.finished() for answer in row]
        return Output(first.index, len(request.prompt), request.cached_tokens, prompt_logprobs, choices)


class Generation(Future[list[Output]]):
    """All outputs of a call, in prompt order: `result(timeout)`, `await`, callbacks; `cancel()` works while it runs."""

    def __init__(self, job: Job, progress: Any = None):
        super().__init__()
        self._job, self._progress = job, progress
        self._cancelled = Lock()  # taken by the first `cancel`, for good

    def cancel(self) -> bool:
        """End the requests; False if they were done already."""
        if not super().cancel():
            return False
        if self._cancelled.acquire(blocking=False):  # asyncio cancels what it finds cancelled once more
            self.set_running_or_notify_cancel()
            self._job.cancel()
        return True

    def __await__(self) -> Generator[Any, None, list[Output]]:
        return asyncio.wrap_future(self).__await__()

    def on_event(self, event: Event) -> None:
        """The engine's side."""
        self._job.feed(event)
        with suppress(InvalidStateError):  # cancelled meanwhile
            if self._job.failure is not None:
                self.set_exception(self._job.failure)
            elif self._job.done:
                self.set_result(self._job.outputs())
        if event.finish_reason is not None and self._progress is not None:
            with suppress(OSError, ValueError):  # there is nowhere to draw it any more
                self._progress.update()
                if self._progress.n == self._progress.total:
                    self._progress.close()


def _set(loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
    """Wake a coroutine from another thread, if its loop still runs."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(ready.set)


class Stream:
    """Chunks as they come, by `for` or `async for`. Closing it, or dropping it, ends what still runs.

    `outputs` holds the outputs once the stream is exhausted; if it was closed before, soon after, with reason "abort".
    """

    def __init__(self, job: Job):
        self._job = job
        self._chunks: deque[Chunk] = deque()
        self._changed = Condition()
        self._ended = False
        self._waiting: list[Callable[[], None]] = []  # coroutines to wake
        self.outputs: list[Output] | None = None

    def on_event(self, event: Event) -> None:
        """The engine's side."""
        with self._changed:
            chunk = self._job.feed(event)
            if chunk is not None and not self._ended:
                self._chunks.append(chunk)
            if self._job.failure is None and self._job.done:
                self.outputs = self._job.outputs()
            self._ended = self._ended or self._job.done or self._job.failure is not None
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        for wake in waiting:
            wake()

    def close(self) -> None:
        """End what still runs; iteration stops."""
        with self._changed:
            self._ended = True
            self._chunks.clear()
            self._changed.notify_all()
        self._job.cancel()

    def _next(self) -> Chunk | None:
        """A chunk that is there, or None to wait; StopIteration at the end. Under the lock."""
        if self._chunks:
            return self._chunks.popleft()
        if self._job.failure is not None:
            raise self._job.failure
        if self._ended:
            raise StopIteration
        return None

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        with self._changed:
            while (chunk := self._next()) is None:
                self._changed.wait()
            return chunk

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            with self._changed:
                try:
                    if (chunk := self._next()) is not None:
                        return chunk
                except StopIteration:
                    raise StopAsyncIteration from None
                ready = asyncio.Event()
                self._waiting.append(partial(_set, asyncio.get_running_loop(), ready))
            try:
                await ready.wait()
            except asyncio.CancelledError:
                self.close()
                raise

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._job.cancel()
