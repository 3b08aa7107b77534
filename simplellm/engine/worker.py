"""The engine's thread: takes requests in, drives the loop, hands events out. Works in a script, in Jupyter, under asyncio.

One thread owns scheduler and runner; callers touch only the inbox. A failing step costs the requests that cannot be run
again (`loop.py`). What it cannot get over ends the engine and fails every request, once: nobody waits for ever.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from simplellm.engine.loop import Loop
from simplellm.engine.scheduler import Request
from simplellm.errors import EngineError
from simplellm.request import Constraint, Event

Sink = Callable[[Event], None]  # called in the engine's thread

log = logging.getLogger("simplellm")


class Worker:
    """Runs a loop in a daemon thread until `close`. `prepare` is called in that thread first."""

    def __init__(self, loop: Loop, prepare: Callable[[], None] | None = None):
        self.loop, self._prepare = loop, prepare
        self.failure: EngineError | None = None
        self.new_constraint: Callable[[Any], Constraint] | None = None  # from a request's rules
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._sinks: dict[int, Sink] = {}
        self._thread = threading.Thread(target=self._run, name="simplellm-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that is inside torch when the interpreter ends aborts the process

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Queue requests together; their events go to `sink`. Raises EngineError once the engine has ended."""

        constraints = [self._constraint(request) for request in requests]

        def add() -> None:
            for request, constraint in zip(requests, constraints, strict=True):
                self.loop.add(request, constraint)

        with self._wake:
            self._post(add)
            self._sinks.update((request.rid, sink) for request in requests)  # known at once: a failing engine tells them

    def abort(self, rids: Sequence[int], reason: str = "abort") -> None:
        """End requests in whatever state they are; each gets a last event with this reason, unless it has ended."""

        def drop() -> None:
            for rid in rids:
                event = self.loop.abort(rid, reason)
                if event is not None:
                    self._deliver([event])

        with suppress(EngineError):  # which failed them already
            self._post(drop)

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` in the engine's thread, between two steps. Raises EngineError once the engine has ended."""
        self._post(action)

    def close(self) -> None:
        """Stop the thread; what is pending fails with EngineError. Safe to call twice and from the engine's thread."""
        self._end(EngineError("the engine was stopped"))
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _constraint(self, request: Request) -> Constraint | None:
        if request.rules is None:
            return None
        assert self.new_constraint is not None, "rules, but nobody to make a constraint of them"
        return self.new_constraint(request.rules)

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            if self.failure is not None:
                raise self.failure
            if not self._thread.is_alive():  # threads do not survive a fork
                raise EngineError("the engine runs in the process that started it, not in a fork of it: start an LLM here")
            self._inbox.append(action)
            self._wake.notify()

    def _end(self, failure: EngineError) -> None:
        with self._wake:
            self.failure = self.failure or failure
            self._wake.notify()

    def _run(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
            while self._next_actions():
                self._deliver(self.loop.step())
        except BaseException as error:  # sys.exit() in a caller's callback, too
            log.exception("the engine failed")
            self._end(EngineError(f"the engine failed: {type(error).__name__}: {error}"))
        for rid in list(self._sinks):
            try:
                self._deliver([Event(rid, finish_reason="error", error=str(self.failure))])
            except BaseException:  # the others must be told all the same
                log.exception("request %d could not be told that the engine ended", rid)

    def _next_actions(self) -> bool:
        """Wait for something to do, take the inbox in; False once the engine ends."""
        with self._wake:
            while not self._inbox and self.loop.idle and self.failure is None:
                self._wake.wait()
            actions, self._inbox = self._inbox, deque()
        if self.failure is None:
            for action in actions:
                action()
        return self.failure is None  # an action may have called a sink that stopped the engine

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            ended = event.finish_reason is not None
            sink = self._sinks.pop(event.rid, None) if ended else self._sinks.get(event.rid)
            if sink is not None:
                sink(event)
