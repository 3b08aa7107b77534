"""One request for answers, from its submission to its last byte: as a stream, or whole. It ends when its client leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from starlette.types import Receive, Scope, Send

from simplellm.errors import EngineError
from simplellm.generation import Chunk
from simplellm.server.answers import Answers, event
from simplellm.server.door import SEND, raw, refuse, respond
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
        self._sending, self._last = False, time.monotonic()  # whether something is on its way out, and since when
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, how = time.monotonic(), "failed"
        work: asyncio.Task[str] | None = None
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            self._front.submit(self._feed)
            work = asyncio.ensure_future(self._stream(send, scope.get(SEND, send)) if self._call.stream else self._whole(send))
            self._watch(work)
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            how = work.result() if work.done() and not work.cancelled() else "client left"
        except (ApiError, EngineError) as error:
            await self._tell(send, translate(error))
        except OSError:  # the connection broke
            how = "client left"
        except Exception as error:  # a mistake of ours: the client is told that much
            log.exception("request %s failed", self._answers.id)
            await self._tell(send, translate(error))
        finally:
            gone.cancel()
            if work is not None:
                work.cancel()
            if self._timer is not None:
                self._timer.cancel()
            self._front.close(self._feed)
            self._log(how, time.monotonic() - began)

    def _watch(self, work: asyncio.Task[str]) -> None:
        """Calls itself: gives up who reads nothing, and has a silent stream say something. So a token needs no timer."""
        settings, now = self._front.settings, time.monotonic()
        if self._sending:
            wait = self._last + settings.stalled_s - now
            if wait <= 0:
                work.cancel()
                return
        else:
            wait = self._last + settings.keep_alive_s - now
            if wait <= 0:
                self._feed.nudge()
                wait = settings.keep_alive_s
            wait = min(wait, settings.stalled_s)
        self._timer = asyncio.get_running_loop().call_later(wait, self._watch, work)

    async def _whole(self, send: Send) -> str:
        while await self._feed.take() is not None:
            pass
        assert self._feed.outputs is not None
        self._sending, self._last = True, time.monotonic()
        await respond(send, 200, self._answers.whole(self._feed.outputs))
        return "done"

    async def _stream(self, send: Send, send_part: Send) -> str:
        """Events; a comment where nothing comes for long, so that nobody on the way thinks that the connection is dead."""
        while (chunks := await self._feed.take()) is not None:
            parts = b"".join([self._answers.events(chunk, self._scores(chunk)) for chunk in chunks])
            await self._send(send_part if self._began else send, parts or b": keep-alive\n\n")
        assert self._feed.outputs is not None
        last = event(self._answers.usage_part(self._feed.outputs)) if self._call.include_usage else b""
        await self._send(send, last + b"data: [DONE]\n\n", more=False)
        return "done"

    def _scores(self, chunk: Chunk) -> list[Any] | None:
        """The prompt's log-probabilities, complete before the first token; nothing precedes the first one."""
        return [None, *self._feed.scores[chunk.index].prompt_logprobs] if self._call.prompt_logprobs else None

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        """Part of the stream. `_watch` ends it if the client leaves it unread for too long."""
        self._sending, self._last = True, time.monotonic()
        if not self._began:
            self._began = True
            await send({"type": "http.response.start", "status": 200, "headers": raw(STREAM)})
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending = False

    async def _tell(self, send: Send, error: ApiError) -> None:
        """An error as a response; after the first byte, as the stream's last event."""
        log.warning("request %s: %d %s", self._answers.id, error.status, error.message)
        with suppress(TimeoutError):  # it does not read this either
            async with asyncio.timeout(self._front.settings.stalled_s):
                if self._began:
                    await self._send(send, event(error.body()) + b"data: [DONE]\n\n", more=False)
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
