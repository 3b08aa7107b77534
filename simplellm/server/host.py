"""The engine's half of the link: takes requests from the front, sends back events, a heartbeat, and what a reader must know.

A step's events wait together in a queue for a sender thread, so the engine never waits for the front, and wakes that thread
once a step: they go out as one message, several steps' where the front is behind.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from simplellm.api import LLM
from simplellm.engine.scheduler import Request
from simplellm.engine.start import Engine
from simplellm.engine.worker import Worker
from simplellm.errors import EngineError, SimpleLLMError
from simplellm.request import Event
from simplellm.server import link

log = logging.getLogger("simplellm.server")

BEAT_S = 0.5  # seconds between heartbeats; each says what the gauges show


class Host:
    """Serves one front over `sock`."""

    def __init__(self, sock: socket.socket, on_serving: Callable[[], None] = lambda: None):
        """on_serving: called once the front takes requests."""
        self._sock, self._on_serving = sock, on_serving
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()  # lists of events; tuples: what else there is to say
        self._step: list[Event] = []  # events of the step that is being handed out, in the engine's thread
        self._requests: dict[int, Request] = {}  # not yet reported as admitted
        self._slow = ThreadPoolExecutor(2, "simplellm-grammar")
        self._preparing: dict[int, str | None] = {}  # requests whose grammar is being compiled, and why they ended meanwhile
        self._lock = threading.Lock()
        self._beaten = threading.Event()
        self._stopped = threading.Event()
        self._engine: Engine | None = None
        threading.Thread(target=self._send, name="simplellm-link", daemon=True).start()

    def say(self, *message: Any) -> None:
        """Send something; also from a signal handler."""
        self._out.put(message)

    def run(self, llm: LLM) -> None:
        """Serve until the front is gone. The LLM must be started; it is not stopped."""
        engine = self._engine = llm._engine
        scheduler = engine.scheduler
        config = scheduler.config
        self._warm = self._slow.submit(llm._grammars.warm_up)  # while the front does the same
        self.say("ready", engine.model_config, scheduler.max_context, scheduler.max_length, config.max_running)
        threading.Thread(target=self._beat, args=(engine,), name="simplellm-heartbeat", daemon=True).start()
        while (messages := link.receive(self._sock)) is not None:
            for message in messages:
                self._take(engine, message)
        self._stopped.set()
        self._out.put(None)

    def _take(self, engine: Engine, message: Any) -> None:
        match message:
            case ("submit", listed):
                requests = [Request(*given) for given in listed]
                self._requests.update((request.rid, request) for request in requests)
                if all(request.rules is None for request in requests):
                    self._submit(engine, requests)
                else:  # compiling takes a while, and others must not wait for it
                    self._preparing.update((request.rid, None) for request in requests)
                    self._slow.submit(self._submit_slowly, engine, requests)
            case ("serving",):  # the first message: what follows finds the grammars' tables made
                self._warm.result()
                self._on_serving()
            case ("abort", rids, reason):
                with self._lock:
                    self._preparing.update((rid, reason) for rid in rids if rid in self._preparing)
                    engine.worker.abort(rids, reason)
            case _:
                raise AssertionError(f"the front said {message[0]!r}")

    def _submit(self, engine: Engine, requests: list[Request]) -> None:
        try:
            engine.worker.submit(requests, partial(self._collect, engine.worker))
        except SimpleLLMError as error:
            self._out.put([Event(request.rid, finish_reason="error", error=str(error)) for request in requests])

    def _collect(self, worker: Worker, event: Event) -> None:
        """An event, in the engine's thread. The first of a step asks to be called back behind the last."""
        self._step.append(event)
        if len(self._step) > 1 and worker.failure is None:
            return
        try:
            worker.call(self._hand_over)
        except EngineError:  # there is no next step
            self._hand_over()

    def _hand_over(self) -> None:
        events, self._step = self._step, []
        self._out.put(events)

    def _submit_slowly(self, engine: Engine, requests: list[Request]) -> None:
        """Compile first; then submit those that nobody ended meanwhile, and end the others."""
        if (compiled := engine.worker.new_constraint) is not None:
            for request in requests:
                with suppress(SimpleLLMError):  # told by the submission, which finds the rules compiled
                    compiled(request.rules)
        with self._lock:
            ended = {request.rid: self._preparing.pop(request.rid) for request in requests}
            self._submit(engine, [request for request in requests if ended[request.rid] is None])
            for rid, reason in ended.items():
                if reason is not None:
                    self._out.put([Event(rid, finish_reason=reason)])

    def _send(self) -> None:
        """The sender's thread: everything that waits, as one message."""
        while (first := self._out.get()) is not None:
            waiting = [first]
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._out.get_nowait())
            ended = waiting[-1] is None
            events = [event for item in waiting if isinstance(item, list) for event in item]
            said = [item for item in waiting if isinstance(item, tuple)]
            try:
                self._sock.sendall(link.pack((link.squeeze(events), self._admitted(events), said)))
            except OSError:  # the front is gone, as `run` finds out
                return
            if ended:
                return

    def _admitted(self, events: list[Event]) -> dict[int, tuple[float, int]]:
        """Of requests with their first event: when they were admitted, and how many tokens were cached."""
        told: dict[int, tuple[float, int]] = {}
        for event in events if self._requests else ():
            request = self._requests.get(event.rid)
            if request is not None and request.admitted_at is not None:
                told[event.rid] = (request.admitted_at, request.cached_tokens)
            if request is not None and (request.admitted_at is not None or event.finish_reason is not None):
                del self._requests[event.rid]
        return told

    def _beat(self, engine: Engine) -> None:
        """A heartbeat is an action that the engine's own thread has run: one that hangs has none."""
        while not self._stopped.wait(BEAT_S):
            self._beaten.clear()
            try:
                engine.worker.call(lambda: self._tell(engine))
            except EngineError as error:
                self.say("failed", str(error))
                return
            while not self._beaten.wait(BEAT_S):
                if engine.worker.failure is not None or self._stopped.is_set():
                    break

    def _tell(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        pool, cache = scheduler.pool, scheduler.cache
        stats = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(scheduler.parked),
            "pages": pool.num_usable,
            "pages_held": pool.num_usable - pool.num_available,
            "preemptions": scheduler.num_preemptions,
            "cache_queries": cache.num_queried,
            "cache_hits": cache.num_hit,
        }
        self.say("beat", stats)
        self._beaten.set()
