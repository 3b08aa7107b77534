"""A client of any OpenAI-compatible server: a trace as streamed /v1/completions, one connection a request, in one event loop.

It reads as little as it must (a JSON of each chunk), for it must keep up with a server that sends tens of thousands a second.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httptools

from simplellm.bench.figures import Answer
from simplellm.bench.trace import Arrival
from simplellm.errors import EngineError, OptionError

PATIENCE_S = 300.0  # without a byte of an answer; then it counts as failed
KEY_VARIABLE = "OPENAI_API_KEY"


class Client:
    """Of the server at `url`, as "http://127.0.0.1:8000/v1". Raises OptionError, EngineError if nobody answers there."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host = None
        if parts.scheme != "http" or not host:
            raise OptionError(f"url: {url!r} is not like http://127.0.0.1:8000/v1")
        self.url, self.host, self.port, self.path = url, host, port, parts.path.rstrip("/")
        self._headers = {"Host": parts.netloc, "Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            self._headers["Authorization"] = f"Bearer {key}"
        try:
            self.model = str(json.loads(self.get(self.path + "/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise EngineError(f"{url}/models lists no model") from None

    def get(self, path: str) -> bytes:
        """A page of the server. Raises EngineError."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.url} does not answer ({error})") from None
        finally:
            connection.close()
        if response.status != 200:
            raise EngineError(f"{self.url}: {response.status} for {path}: {data[:200].decode(errors='replace')}")
        return data

    def request(self, arrival: Arrival, prompt: Sequence[int]) -> bytes:
        """Greedy, without an end token."""
        asked: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": arrival.new, "temperature": 0}
        asked |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(asked).encode()
        headers = self._headers | {"Content-Length": str(len(body)), "Connection": "close"}
        lines = [f"POST {self.path}/completions HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def run(self, trace: Sequence[Arrival], prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Ask each at its second; the answers, in the trace's order. None is lost: what fails says why."""
        many_files()
        requests = [self.request(arrival, prompt) for arrival, prompt in zip(trace, prompts, strict=True)]
        answers: list[Answer] = _runner()(self._run(trace, requests))
        return answers

    async def _run(self, trace: Sequence[Arrival], requests: Sequence[bytes]) -> list[Answer]:
        began, answers = time.perf_counter(), [Answer(arrival) for arrival in trace]
        tasks = []
        for answer, request in zip(answers, requests, strict=True):
            while (delay := began + answer.arrival.at - time.perf_counter()) > 0:  # uvloop's clock counts whole milliseconds
                await asyncio.sleep(delay)
            tasks.append(asyncio.ensure_future(self._ask(answer, request, began)))
        await asyncio.gather(*tasks)
        return answers

    async def _ask(self, answer: Answer, request: bytes, began: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, stream = await loop.create_connection(lambda: Stream(answer, request, began), self.host, self.port)
        except OSError as error:
            answer.error = f"no connection ({error.strerror})"
            return
        while not stream.ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, stream.patient_until - time.perf_counter())):
                    await stream.ended.wait()
            if time.perf_counter() >= stream.patient_until:
                stream.fail(f"nothing came for {PATIENCE_S:g} s")


class Stream(asyncio.Protocol):
    """One request's connection: sends it, and notes in `answer` when its tokens come."""

    def __init__(self, answer: Answer, request: bytes, began: float):
        self.answer, self.ended = answer, asyncio.Event()
        self._request, self._began = request, began
        self._parser = httptools.HttpResponseParser(self)
        self._now, self._rest, self._tokens, self._done = time.perf_counter(), b"", None, False
        self._transport: asyncio.Transport

    @property
    def patient_until(self) -> float:
        return self._now + PATIENCE_S

    def fail(self, why: str) -> None:
        """The first reason counts."""
        self.answer.error = self.answer.error or why
        self._end()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.answer.sent = time.perf_counter() - self._began
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:  # no HTTP, or (then that is the context) no JSON of an answer
            self.fail(f"not understood: {error.__context__ or error!r}")

    def on_body(self, body: bytes) -> None:
        """httptools' call: a piece of the body."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        if self._parser.get_status_code() != 200:
            self._rest = b"\n".join([*lines, self._rest])  # all of it is the reason
            return
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def on_message_complete(self) -> None:
        """httptools' call: the response's end."""
        if (status := self._parser.get_status_code()) != 200:
            self.fail(f"{status} {self._rest[:200].decode(errors='replace')}")
        elif not self._done:
            self.fail("the stream ended without [DONE]")
        else:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.is_set():
            self.fail("the connection ended before the answer")

    def _take(self, data: bytes) -> None:
        """A server-sent event: a chunk with tokens, the usage, an error, or the end."""
        if data == b"[DONE]":
            self._done = True
            return
        event = json.loads(data)
        if event.get("error"):
            self.answer.error = f"in the stream: {json.dumps(event['error'])[:200]}"
        if event.get("choices"):
            self.answer.times.append(self._now - self._began)
        if event.get("usage"):
            self._tokens = event["usage"]["completion_tokens"]

    def _end(self) -> None:
        if not self.ended.is_set():
            self.answer.end(len(self.answer.times) if self._tokens is None else self._tokens)
            self.ended.set()
            self._transport.close()


def many_files() -> None:
    """As many connections as the system allows, here and in processes that are started from here."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _runner() -> Any:
    """asyncio.run, on uvloop if it is there."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run
