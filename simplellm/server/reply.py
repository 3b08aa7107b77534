"""One request for answers, from its submission to its last byte: as a stream, or whole. It ends when its client leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.types import Receive, Scope, Send

from simplellm.errors import EngineError
from simplellm.generation import Chunk
from simplellm.server.answers import Answers
from simplellm.server.door import encode, raw, refuse, respond
from simplellm.server.errors import ApiError, translate
from simplellm.server.protocol import Call
from simplellm.server.remote import Feed
from simplellm.server.state import Front

log = logging.getLogger("simplellm.server")

STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Reply:
    """An ASGI response. Made of a checked feed, which it submits, and closes whatever happens."""

    def __init__(self, front: Front, call: Call, feed: Feed, answers: Answers):
        self._front, self._call, self._feed, self._answers = front, call, feed, answers
        self._began = False  # the status has gone out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, how = time.monotonic(), "failed"
        work: asyncio.Task[str] | None = None
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            self._front.submit(self._feed)
            work = asyncio.ensure_future(self._stream(send) if self._call.stream else self._whole(send))
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            how = work.result() if work.done() else "client left"
        except (ApiError, EngineError) as error:
            await self._tell(send, translate(error))
        except OSError:  # the connection broke, or nobody read it (TimeoutError)
            how = "client left"
        except Exception as error:  # a mistake of ours: the client is told that much
            log.exception("request %s failed", self._answers.id)
            await self._tell(send, translate(error))
        finally:
            gone.cancel()
            if work is not None:
                work.cancel()
            self._front.close(self._feed)
            self._log(how, time.monotonic() - began)

    async def _whole(self, send: Send) -> str:
        while await self._feed.take(3600) is not None:
            pass
        assert self._feed.outputs is not None
        async with asyncio.timeout(self._front.settings.stalled_s):
            await respond(send, 200, self._answers.whole(self._feed.outputs))
        return "done"

    async def _stream(self, send: Send) -> str:
        """Events; a comment where nothing comes for long, so that nobody on the way thinks that the connection is dead."""
        while (chunks := await self._feed.take(self._front.settings.keep_alive_s)) is not None:
            parts = [part for chunk in chunks for part in self._answers.parts(chunk, self._scores(chunk))]
            await self._send(send, b"".join(map(_event, parts)) or b": keep-alive\n\n")
        assert self._feed.outputs is not None
        last = _event(self._answers.usage_part(self._feed.outputs)) if self._call.include_usage else b""
        await self._send(send, last + b"data: [DONE]\n\n", more=False)
        return "done"

    def _scores(self, chunk: Chunk) -> list[Any] | None:
        """The prompt's log-probabilities, complete before the first token; nothing precedes the first one."""
        return [None, *self._feed.scores[chunk.index].prompt_logprobs] if self._call.prompt_logprobs else None

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        """Part of the stream. TimeoutError if the client leaves it unread for too long: then its answer ends, too."""
        async with asyncio.timeout(self._front.settings.stalled_s):
            if not self._began:
                self._began = True
                await send({"type": "http.response.start", "status": 200, "headers": raw(STREAM)})
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _tell(self, send: Send, error: ApiError) -> None:
        """An error as a response; after the first byte, as the stream's last event."""
        log.warning("request %s: %d %s", self._answers.id, error.status, error.message)
        if self._began:
            await self._send(send, _event(error.body()) + b"data: [DONE]\n\n", more=False)
        else:
            await refuse(send, error)

    def _log(self, how: str, seconds: float) -> None:
        """What happened, without a word of what was said."""
        prompt = sum(map(len, self._feed.prompts))
        generated = sum(len(answer.token_ids) for answer in self._feed.answers)
        log.info(
            "request=%s kind=%s stream=%d prompt_tokens=%d completion_tokens=%d end=%r seconds=%.3f",
            *(self._answers.id, self._call.kind, self._call.stream, prompt, generated, how, seconds),
        )


def _event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
