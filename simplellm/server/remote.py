"""The front's half of the link: an LLM whose engine is in the other process, and feeds of its answers.

Everything here but the making of jobs happens in the event loop's thread: no locks, and no wake-up per token and stream.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from simplellm.api import LLM
from simplellm.config import ModelConfig
from simplellm.engine.scheduler import Request
from simplellm.errors import EngineError
from simplellm.generation import Answer, Chunk, Job, Stream
from simplellm.request import Event
from simplellm.server.errors import ContextLengthError
from simplellm.server.link import Squeezed, merged
from simplellm.text.parser import Delta
from simplellm.text.reader import ChatReader

if TYPE_CHECKING:
    from simplellm.engine.start import Engine

log = logging.getLogger("simplellm.server")

TOGETHER = 8  # requests, or aborts, that one message holds at most


class RemoteWorker:
    """What `engine.worker.Worker` is, at the other end of the link. `send` gets what one turn of the loop says together."""

    def __init__(self, send: Callable[[list[Any]], None]):
        self.failure: EngineError | None = None
        self.new_constraint: Any = None  # rules are sent as they are: the engine's process makes constraints of them
        self._send, self._outbox = send, list[Any]()
        self._open: dict[int, tuple[Request, Callable[[Event], None]]] = {}

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def submit(self, requests: Sequence[Request], sink: Callable[[Event], None]) -> None:
        if self.failure is not None:
            raise self.failure
        self._open.update((request.rid, (request, sink)) for request in requests)
        self._post(("submit", [fields(request) for request in requests]))

    def abort(self, rids: Sequence[int], reason: str = "abort") -> None:
        if self.failure is None:
            self._post(("abort", list(rids), reason))

    def deliver(self, batch: Iterable[Squeezed], admitted: Iterable[Mapping[int, tuple[float, int]]]) -> None:
        """Events, of one step or of several. admitted: when requests were first admitted and how much of them was cached."""
        for told in admitted:
            for rid, (at, cached) in told.items():
                if rid in self._open:
                    request = self._open[rid][0]
                    request.admitted_at, request.cached_tokens = at, cached
        for event in merged(batch):
            ended = event.finish_reason is not None
            entry = self._open.pop(event.rid, None) if ended else self._open.get(event.rid)
            if entry is not None:
                entry[1](event)

    def fail(self, failure: EngineError) -> None:
        """The engine is gone: everybody is told."""
        self.failure = self.failure or failure
        rids = list(self._open)
        self.deliver([(rids, [Event(rid, finish_reason="error", error=str(self.failure)) for rid in rids])], ())

    def _post(self, message: Any) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)
        if len(self._outbox) == TOGETHER:  # of hundreds that come at once, the first ones begin while the others are read
            self._flush()

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages:
            self._send(messages)


def fields(request: Request) -> tuple[Any, ...]:
    """What the caller filled in of a request: the engine's process makes it anew."""
    sampling, priority = request.sampling, request.priority
    return request.rid, request.prompt, sampling, request.seed, priority, request.cache_salt, request.group, request.rules


@dataclass
class RemoteEngine:
    """What `engine.start.Engine` is to an LLM."""

    model_config: ModelConfig
    max_context: int
    max_length: int  # tokens of prompt and answer that the pool of pages has room for
    max_running: int
    worker: RemoteWorker

    @property
    def scheduler(self) -> RemoteEngine:
        """Of it, only `check` is used."""
        return self

    @property
    def limit(self) -> int:
        """Tokens of the longest prompt."""
        return min(self.max_context, self.max_length) - 1

    def check(self, num_prompt: int) -> None:
        """As `Scheduler.check`, in the words of the API."""
        if num_prompt > self.limit:
            raise ContextLengthError(
                "prompt",
                f"the prompt length of {num_prompt} tokens is above the limit of {self.limit}: shorten it (the context is "
                f"{self.max_context} tokens, memory has room for {self.max_length}, and an answer needs one)",
            )

    def close(self) -> None:
        """The other process closes itself."""


class Feed(Stream):
    """A stream for one reader in the event loop, who takes all there is at once: a slow one gets fewer, larger pieces."""

    def __init__(self, job: Job):
        super().__init__(job)
        self._pieces: list[Chunk] = []
        self._reader: asyncio.Future[None] | None = None  # who waits for pieces
        self.failure: EngineError | None = None
        self.on_tokens: Callable[[int, int], None] = lambda rid, num_tokens: None
        self.on_end: Callable[[], None] = lambda: None
        self.submitted = time.monotonic()

    @property
    def answers(self) -> list[Answer]:
        """By prompt, then choice."""
        return [answer for row in self._job.answers for answer in row]

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [row[0].request.prompt for row in self._job.answers]

    @property
    def scores(self) -> list[Answer]:
        """The answer that holds each prompt's log-probabilities."""
        return [row[0] for row in self._job.answers]

    def on_event(self, event: Event) -> None:
        try:
            chunk = self._job.feed(event)
            if self._job.failure is None and self._job.done and not self._ended:
                self.outputs = self._job.outputs()
        except Exception as error:  # this request alone is lost
            log.exception("request %d could not be read", event.rid)
            return self.fail(EngineError(f"the answer could not be read: {type(error).__name__}"))
        if event.tokens:
            self.on_tokens(event.rid, len(event.tokens))
        if self._job.failure is not None:
            return self.fail(self._job.failure)
        if chunk is not None and not self._ended:
            self._pieces.append(chunk)
            self._wake()
        if self._job.done and not self._ended:
            self._end()

    def fail(self, failure: EngineError) -> None:
        """End it with an error, which the reader gets after the pieces that are there."""
        if not self._ended:
            self.failure = failure
            self._job.cancel()
            self._end()

    async def take(self) -> list[Chunk] | None:
        """What came since the last call, a chunk per answer; [] if a nudge came first; None at the end.

        Raises EngineError once what came before it has been taken.
        """
        if not self._pieces and not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        pieces, self._pieces = self._pieces, []
        if pieces or not self._ended:
            return merge(pieces)
        if self.failure is not None:
            raise self.failure
        return None

    def nudge(self) -> None:
        """Have a `take` that waits return, though there is nothing."""
        self._wake()

    def close(self) -> None:
        """The reader is gone: end what still runs."""
        if not self._ended:
            self._job.cancel()
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._wake()
        self.on_end()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __del__(self) -> None:
        """Whoever opens a feed closes it."""


def merge(chunks: Sequence[Chunk]) -> list[Chunk]:
    """One chunk per answer, in the order in which they begin."""
    if len(chunks) == 1:
        return list(chunks)
    by_answer: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        by_answer.setdefault((chunk.index, chunk.choice), []).append(chunk)
    return [_joined(run) for run in by_answer.values()]


def _joined(run: Sequence[Chunk]) -> Chunk:
    first, last = run[0], run[-1]
    deltas = list(itertools.chain.from_iterable(chunk.deltas for chunk in run))
    ids = list(itertools.chain.from_iterable(chunk.token_ids for chunk in run))
    logprobs = None if first.logprobs is None else [entry for chunk in run for entry in chunk.logprobs or ()]
    return Chunk(first.index, first.choice, deltas, ids, logprobs, last.finish_reason)


class ContentMarks:
    """A chat answer's reader that notes of every token whether its text is content."""

    def __init__(self, reader: ChatReader, marks: list[bool]):
        self._reader, self._marks = reader, marks

    def push(self, token: int) -> list[Delta]:
        before = self._reader.parser.content_tokens
        deltas = self._reader.push(token)
        self._marks.append(self._reader.parser.content_tokens > before)
        return deltas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class FrontLLM(LLM):
    """LLM's upper half over a remote engine. Its streams are Feeds, not yet submitted."""

    def __init__(self, path: Path, remote: RemoteEngine):
        self._remote = remote
        super().__init__(path, progress=False)

    def warm_up(self) -> None:
        """Do what the first request with a grammar would wait for."""
        self._grammars.warm_up()

    def feed(self, kind: str, prompt: Any, settings: Mapping[str, Any]) -> Feed:
        """A checked request. Raises RequestError. Takes a while: tokenising, perhaps a grammar; safe in any thread."""
        open_stream = self.chat_stream if kind == "chat" else self.stream
        return cast(Feed, open_stream(prompt, **settings))

    def submit(self, feed: Feed) -> None:
        """In the event loop's thread. Raises EngineError."""
        feed.submitted = time.monotonic()
        self._remote.worker.submit([answer.request for answer in feed.answers], feed.on_event)

    def mark_content(self, feed: Feed) -> dict[int, list[bool]]:
        """Lists, by answer, that will say of every token whether it is content."""
        marks: dict[int, list[bool]] = {}
        for number, answer in enumerate(feed.answers):
            marks[number] = []
            answer.reader = ContentMarks(cast(ChatReader, answer.reader), marks[number])
        return marks

    def _open(self, end_ids: frozenset[int]) -> Engine:
        return cast("Engine", self._remote)

    def _start_stream(self, job: Job) -> Stream:
        return Feed(job)

    def stop(self) -> None:
        """The other process stops the engine."""
