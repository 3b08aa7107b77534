"""What a caller holds, fed with events by hand: futures that are cancelled in every way, or fail."""

from __future__ import annotations

import asyncio
import concurrent.futures

import pytest

from simplellm.engine.scheduler import Request
from simplellm.errors import EngineError
from simplellm.generation import Answer, Generation, Job
from simplellm.request import Event, Sampling
from simplellm.text.reader import TextReader


class Letters:
    """A decoder: a token is a letter."""

    def push(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def flush(self) -> str:
        return ""


def new_job(num: int = 1, stop: tuple[str, ...] = ()) -> tuple[Job, list[tuple[list[int], str]]]:
    """A job of `num` prompts with rids from 0, and what it aborts."""
    aborted: list[tuple[list[int], str]] = []
    requests = [Request(rid, (1, 2), Sampling(stop=stop)) for rid in range(num)]
    answers = [[Answer(rid, 0, request, TextReader(Letters(), stop), 0.0)] for rid, request in enumerate(requests)]
    return Job(answers, lambda rids, reason: aborted.append((rids, reason))), aborted


def event(rid: int, text: str = "", reason: str | None = None) -> Event:
    return Event(rid, tuple(map(ord, text)), finish_reason=reason, error="it broke" if reason == "error" else None)


def test_cancelling_again_and_in_a_callback_changes_nothing() -> None:
    """A second cancel raised RuntimeError: so did asyncio, which cancels what it finds cancelled once more."""
    job, aborted = new_job(2)
    future = Generation(job)
    future.add_done_callback(lambda f: f.cancel())
    assert future.cancel() and future.cancel() and future.cancelled()
    assert aborted == [([0, 1], "abort")]
    assert concurrent.futures.wait([future], timeout=5).done == {future}
    future.on_event(event(0, "a", "abort"))  # what still comes in
    future.on_event(event(1, reason="error"))
    assert future.cancelled()


def test_cancelling_a_future_that_a_task_awaits(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        future = Generation(new_job()[0])
        task = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not caplog.records


def test_an_error_fails_the_call_even_if_the_text_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's last word does not pass through what may have been at fault."""
    job, _ = new_job()
    monkeypatch.setattr(job.answers[0][0].reader, "close", lambda: 1 / 0)
    future = Generation(job)
    future.on_event(event(0, reason="error"))
    with pytest.raises(EngineError, match="it broke"):
        future.result(timeout=0)


class ClosedBar:
    """A progress bar whose terminal is gone."""

    n, total = 0, 1

    def update(self) -> None:
        raise ValueError("I/O operation on closed file")


def test_a_bar_that_cannot_be_drawn_costs_no_answer() -> None:
    future = Generation(new_job()[0], ClosedBar())
    future.on_event(event(0, "abc", "length"))
    assert future.result(timeout=0)[0].text == "abc"


class Bar:
    n, total, closed = 0, 2, False

    def update(self) -> None:
        assert not self.closed
        self.n += 1

    def close(self) -> None:
        self.closed = True


def test_the_bar_is_closed_after_the_last_answer() -> None:
    """An answer that a stop string ended counts when the engine has let go of it."""
    bar = Bar()
    future = Generation(new_job(2, stop=("x",))[0], bar)
    future.on_event(event(0, "abxc"))
    future.on_event(event(1, "abx"))
    assert future.done() and not bar.closed
    future.on_event(event(0, reason="stop"))
    future.on_event(event(1, reason="stop"))
    assert bar.closed and bar.n == 2
