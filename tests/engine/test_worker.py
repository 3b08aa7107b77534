"""The engine's thread on a runner that answers at once: whatever fails, stops or leaves, nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import pytest

from simplellm.bench.host import HostResults, results_of
from simplellm.config import EngineConfig
from simplellm.engine.loop import Loop
from simplellm.engine.scheduler import Request, Scheduler
from simplellm.engine.worker import Worker
from simplellm.errors import EngineError
from simplellm.request import Event, Plan, Sampling

ENDLESS = 10**9


class Runner:
    """Draws token 1 for ever; `before` is called in each step."""

    def __init__(self, before: Callable[[], None] = lambda: None):
        self.before = before

    def body(self, plan: Plan) -> Plan:
        self.before()
        return plan

    def head(self, pending: Plan, masks: Mapping[int, Any], skip: Set[int]) -> None:
        pass

    def results(self, pending: Plan) -> HostResults:
        return results_of(pending)

    def close(self) -> None:
        pass


class Caller:
    """A sink that keeps its events; `act` is called with each."""

    def __init__(self, act: Callable[[Event], None] = lambda event: None):
        self.act, self.events, self.ended = act, [], threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event.finish_reason is not None:
            self.ended.set()
        self.act(event)

    def last(self) -> Event:
        assert self.ended.wait(10), "it waits for ever"
        return self.events[-1]


Start = Callable[[Runner], Worker]


@pytest.fixture
def start() -> Iterator[Start]:
    workers = []

    def new(runner: Runner) -> Worker:
        config = EngineConfig(max_running=8, prefix_cache=False)
        scheduler = Scheduler(config, num_pages=1000, max_context=4096, sliding_window=128, eos_ids=frozenset({0}))
        workers.append(Worker(Loop(scheduler, runner, 1)))
        return workers[-1]

    yield new
    for worker in workers:
        worker.close()


def request(rid: int, max_tokens: int = ENDLESS) -> Request:
    return Request(rid, (5, 6, 7), Sampling(max_tokens=max_tokens))


@pytest.mark.parametrize("error", [ValueError("a sink's fault"), SystemExit(3)])
def test_a_sink_that_raises_ends_the_engine_and_the_others_are_told(start: Start, error: BaseException) -> None:
    """It raises when it is told of the end, too; and sys.exit() in a callback must not end the thread in silence."""

    def fail(event: Event) -> None:
        raise error

    worker, first, second = start(Runner()), Caller(fail), Caller()
    worker.submit([request(0), request(1)], first)
    worker.submit([request(2)], second)
    event = second.last()
    assert event.finish_reason == "error" and type(error).__name__ in event.error
    with pytest.raises(EngineError, match=type(error).__name__):
        worker.submit([request(3)], second)


def test_what_is_queued_while_a_step_fails_is_told(start: Start) -> None:
    """Also where the scheduler is of no use any more: an abort that is queued behind must not matter."""
    reached, go = threading.Event(), threading.Event()

    def fail() -> None:
        reached.set()
        go.wait(10)
        worker.loop.scheduler.running.clear()  # what a failure in the middle of a plan may leave behind
        raise RuntimeError("the device fell over")

    worker, first, second = start(Runner(fail)), Caller(), Caller()
    worker.submit([request(0)], first)
    assert reached.wait(10)
    worker.submit([request(1)], second)
    worker.abort([0])
    go.set()
    assert "fell over" in first.last().error and "fell over" in second.last().error


def test_a_sink_may_stop_the_engine(start: Start) -> None:
    """In the engine's own thread, which cannot wait for itself. No step runs afterwards: the device may be gone."""
    steps: list[bool] = []
    worker = start(Runner(lambda: steps.append(worker.failure is not None)))
    first, second = Caller(lambda event: worker.close()), Caller()
    worker.submit([request(0)], second)
    worker.submit([request(1)], first)
    assert "stopped" in first.last().error and "stopped" in second.last().error
    assert steps and not any(steps)


def test_a_sink_may_submit(start: Start) -> None:
    second = Caller()
    worker = start(Runner())
    first = Caller(lambda event: worker.submit([request(1, 2)], second) if event.finish_reason else None)
    worker.submit([request(0, 2)], first)
    assert first.last().finish_reason == second.last().finish_reason == "length"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_the_interpreter_ends_quietly_while_requests_run() -> None:
    """A daemon thread inside torch when the interpreter is taken down aborted the process, nearly always."""
    ended = run_python(
        "from simplellm import LLM\n"
        "stream = LLM(progress=False, device='cpu').stream('hello', max_tokens=100_000, ignore_eos=True)\n"
        "next(stream)\n"
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_is_told_that_it_has_no_engine() -> None:
    """Threads do not survive a fork: a child that waited for the engine's waited for ever."""
    code = (
        "import os, warnings\n"
        "warnings.simplefilter('ignore')  # of the fork\n"
        "from tests.engine.test_worker import *\n"
        "scheduler = Scheduler(EngineConfig(), num_pages=99, max_context=99, sliding_window=128, eos_ids=frozenset())\n"
        "worker = Worker(Loop(scheduler, Runner(), 1))\n"
        "if os.fork() == 0:\n"
        "    try: worker.submit([request(0)], Caller())\n"
        "    except EngineError as error: print(error)\n"
        "else: os.wait()\n"
    )
    ended = run_python(code)
    assert "not in a fork of it" in ended.stdout, ended.stderr
