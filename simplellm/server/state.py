"""The front's state: loading, ready, draining or failed; the requests that are open; what the engine last said."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simplellm import __version__
from simplellm.errors import EngineError
from simplellm.server.errors import RETRY, ApiError, unavailable
from simplellm.server.metrics import Metrics
from simplellm.server.protocol import Call
from simplellm.server.settings import Settings

if TYPE_CHECKING:  # these take seconds to import: the port must open before
    from simplellm.server.remote import Feed, FrontLLM, RemoteEngine

log = logging.getLogger("simplellm.server")


class Front:
    """One per process. The link feeds it, by `hear`; routes ask it. `send` says something to the engine's process."""

    send: Callable[[list[Any]], None]

    def __init__(self, settings: Settings):
        self.settings = settings
        self.metrics = Metrics(settings.names[0])
        self.failure: str | None = None
        self.draining = False
        self.created = int(time.time())
        self.feeds: set[Feed] = set()
        self.llm: FrontLLM | None = None
        self.engine: RemoteEngine | None = None
        self.asked_to_drain = asyncio.Event()
        self.idle = asyncio.Event()
        self._opening = 0  # requests between their admission and their submission
        self._last_beat = time.monotonic()

    @property
    def model(self) -> str:
        return self.settings.names[0]

    @property
    def fingerprint(self) -> str:
        return f"simplellm-{__version__}"

    @property
    def status(self) -> str:
        if self.failure is not None:
            return "failed"
        return "draining" if self.draining else "loading" if self.llm is None else "ready"

    @property
    def healthy(self) -> bool:
        """The process is alive, and so is the engine, once it is loaded."""
        fresh = time.monotonic() - self._last_beat < self.settings.stale_s
        return self.failure is None and (fresh or self.llm is None)

    @property
    def num_open(self) -> int:
        """Requests at the engine or on their way to it."""
        return self._opening + (0 if self.engine is None else self.engine.worker.num_open)

    def ready_llm(self) -> FrontLLM:
        """The LLM, or the reason why there is none. Raises ApiError."""
        if self.failure is not None:
            raise ApiError(500, self.failure, code="engine_error")
        if self.draining:
            raise unavailable("the server is shutting down")
        if self.llm is None:
            raise unavailable("the model is still loading")
        return self.llm

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.names:
            known = ", ".join(self.settings.names)
            raise ApiError(
                404, f"the model {name[:80]!r} does not exist; this server has {known}", param="model", code="model_not_found"
            )

    async def open(self, call: Call) -> Feed:
        """A request, checked, counted and not yet submitted. Raises ApiError, RequestError.

        A quick one is made in the loop's thread: many at once, each in a thread, would take the interpreter from the loop and
        from one another, 5 ms at a time.
        """
        self.check_model(call.model)
        llm, engine = self.ready_llm(), self.engine
        assert engine is not None
        most = engine.max_running + self.settings.max_queue
        if self.num_open >= most:
            raise ApiError(
                429,
                f"the limit is {most} open requests: try again later",
                code="queue_full",
                headers=RETRY,
            )
        self._opening += 1
        try:
            if call.quick:
                feed = llm.feed(call.kind, call.prompt, call.settings)
            else:
                feed = await asyncio.to_thread(llm.feed, call.kind, call.prompt, call.settings)
        finally:
            self._opening -= 1
        if len(feed.answers) > most:
            raise ApiError(400, f"{len(feed.answers)} answers in one request, the limit is {most}: send fewer prompts")
        if self.num_open + len(feed.answers) > most:
            raise ApiError(429, f"the limit is {most} open requests: try again later", code="queue_full", headers=RETRY)
        self.ready_llm()  # it may be draining by now
        return feed

    def submit(self, feed: Feed) -> None:
        """Raises EngineError."""
        llm = self.ready_llm()
        self.metrics.watch(feed)
        self.feeds.add(feed)
        llm.submit(feed)

    def close(self, feed: Feed) -> None:
        """Its response is over, or its client is gone."""
        feed.close()
        self.feeds.discard(feed)
        if not self.feeds:
            self.idle.set()

    def hear(self, messages: list[Any]) -> None:
        """What the engine's process says: all that has come since the last turn of the loop, events merged by request."""
        if self.engine is not None:
            self.engine.worker.deliver([squeezed for squeezed, _, _ in messages], [admitted for _, admitted, _ in messages])
        for message in itertools.chain.from_iterable(said for _, _, said in messages):
            self._heed(message)

    def lose(self) -> None:
        """The link's other end is gone."""
        self._fail("the engine's process ended")

    async def drain(self, seconds: float) -> None:
        """Refuse what is new, let what runs end; after `seconds`, end it with an error."""
        self.draining = True
        if self.feeds:
            self.idle.clear()
            log.info("draining: %d responses are open", len(self.feeds))
            try:
                async with asyncio.timeout(seconds):
                    await self.idle.wait()
            except TimeoutError:
                self.hurry()

    def hurry(self) -> None:
        """End what still runs now, with an error."""
        for feed in list(self.feeds):
            feed.fail(EngineError("the server is shutting down"))

    def ask_to_drain(self) -> None:
        """Asked again, it does not wait."""
        if self.asked_to_drain.is_set():
            self.hurry()
        self.asked_to_drain.set()

    def _heed(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("beat", stats):
                self._last_beat = time.monotonic()
                self.metrics.beat(stats)
            case ("ready", *shape):
                self._loading = asyncio.ensure_future(self._load(shape))
            case ("drain",):
                self.ask_to_drain()
            case ("failed", text):
                self._fail(text)

    async def _load(self, shape: list[Any]) -> None:
        """The engine is ready: so is the front, once it has read the tokenizer."""
        try:
            engine, llm = await asyncio.to_thread(_make, self.settings, shape, self.send)
        except Exception as error:
            return self._fail(f"the front could not load: {error}")
        self._last_beat = time.monotonic()
        self.engine, self.llm = engine, llm
        self.send([("serving",)])
        log.info("ready: model %s, %d tokens of context", self.model, engine.max_context)

    def _fail(self, text: str) -> None:
        self.failure = self.failure or text
        if self.engine is not None:
            self.engine.worker.fail(EngineError(text))
        self.asked_to_drain.set()


def _make(settings: Settings, shape: list[Any], send: Callable[[list[Any]], None]) -> tuple[RemoteEngine, FrontLLM]:
    from simplellm.server.remote import FrontLLM, RemoteEngine, RemoteWorker

    model_config, max_context, max_length, max_running = shape
    engine = RemoteEngine(model_config, max_context, max_length, max_running, RemoteWorker(send))
    llm = FrontLLM(settings.path, engine)
    llm.warm_up()
    return engine, llm
