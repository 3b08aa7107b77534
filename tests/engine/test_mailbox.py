"""The GPU runner's host side on a device that lags: real loop, scheduler, runner and mailbox, graphs of a few integer sums.

The device does what it was told as late as it may, so a slot that is filled too early, a count that is off by one or a launch
in the wrong order gives other tokens. A row's next token is a function of its last token and position alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from simplellm.config import EngineConfig
from simplellm.engine.loop import Loop
from simplellm.engine.scheduler import Request, Scheduler
from simplellm.errors import EngineError
from simplellm.request import Plan, RowStart, Sampling, Span

pytest.importorskip("triton")
from simplellm.engine import gpu_runner  # noqa: E402
from simplellm.engine.gpu_rows import GpuRows  # noqa: E402
from simplellm.engine.gpu_runner import GpuRunner  # noqa: E402
from simplellm.engine.mailbox import HEADER, SLOTS, WRAP, Mailbox  # noqa: E402
from simplellm.engine.step import StepShape, draws_of  # noqa: E402

VOCAB, ROWS = 320, 8
EVEN = bytes([0b01010101]) * (VOCAB // 8)


def next_token(token: Any, position: Any) -> Any:
    return (31 * token + 7 * position + 3) % VOCAB


class Device:
    """Does what is launched in order, but a piece at a time and only while somebody asks whether it is done."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.launched: list[str] = []
        self.fault: Callable[[str], bool] = lambda name: False

    def launch(self, name: str, run: Callable[[], None]) -> None:
        if self.fault(f"before {name}"):
            raise RuntimeError("made up")
        self.launched.append(name)
        self.queue.append(run)
        if self.fault(f"after {name}"):
            raise RuntimeError("made up")

    def work(self) -> None:
        while self.queue:
            self.queue.popleft()()

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self.device, self.done = device, False

    def record(self) -> None:
        self.device.queue.append(partial(setattr, self, "done", True))

    def query(self) -> bool:
        if not self.done:
            self.device.queue.popleft()()
        return self.done


class FakeMailbox(Mailbox):
    """The kernels' part in torch; what waits for the device lets it work."""

    def __init__(self, device: Device, *args: Any):
        super().__init__(*args)
        self.device, self.num_waits = device, 0

    def receive(self, size: int) -> None:
        self.count.copy_((self.count + 1) % WRAP)
        self.step[:size] = self.plans[int(self.count) % SLOTS, :size]

    def send(self, tokens: torch.Tensor) -> None:
        slot = self.drawn[int(self.count) % SLOTS]
        slot[0], slot[HEADER : HEADER + len(tokens)] = self.count[0], tokens

    def _wait(self) -> int:
        self.num_waits += 1
        self.device.work()
        return super()._wait()


class FakeRunner(GpuRunner):
    """The graphs' part in torch: "hidden states" are the next tokens; of a masked row the even one below."""

    def __init__(self, device: Device):
        self.device_queue, self.device, self.max_running = device, torch.device("cpu"), ROWS
        self.max_outputs, self.sizes = 2 * ROWS, {False: [1, 2, 4, 6, ROWS], True: [16, 64]}
        self.rows = GpuRows(ROWS, 2, VOCAB, self.device)
        self.samplings = [Sampling()] * ROWS
        self.newest, self.tokens, self.hidden = (torch.zeros(n, dtype=torch.int32) for n in (ROWS, ROWS, 2 * ROWS))
        self.mailbox = FakeMailbox(device, self._shape(64, True).size, ROWS, self.device)
        shapes = [self._shape(n, chunks) for chunks, sizes in self.sizes.items() for n in sizes]
        launch = lambda name, run, *args: partial(device.launch, name, partial(run, *args))  # noqa: E731
        self.bodies = {(s.tokens, s.tiles > 0): (s, launch(f"body {s.tokens}", self._run_body, s)) for s in shapes}
        self.heads = {
            (n, full): launch(f"head {n}{' full' * full}", self._run_head, n, full)
            for n in self.sizes[False]
            for full in (False, True)
        }
        self.wholes = {
            s.tokens: launch(f"whole {s.tokens}", self._run_whole, s) for s in shapes if not s.tiles and s.tokens < ROWS
        }

    def _run_layers(self, shape: StepShape) -> torch.Tensor:
        _, _, tokens, rows, positions, outputs, _, _ = shape.parts(self.mailbox.step)
        return next_token(torch.where(tokens < 0, self.newest[rows], tokens), positions)[outputs]

    def _run_draw(self, hidden: torch.Tensor, draws: torch.Tensor, part: slice, full: bool) -> None:
        for i, (row, _) in enumerate(draws.tolist()):
            if row >= 0:
                masked = full and bool(self.rows.tables.masked[row])
                self.newest[row] = self.tokens[i] = hidden[i] - hidden[i] % 2 if masked else hidden[i]

    def _run_head(self, num_rows: int, full: bool) -> None:
        self._run_draw(self.hidden, draws_of(self.mailbox.step, num_rows), slice(num_rows), full)
        self.mailbox.send(self.tokens[:num_rows])

    def _run_whole(self, shape: StepShape) -> None:
        self.mailbox.receive(shape.size)
        self._run_draw(self._run_layers(shape), draws_of(self.mailbox.step, shape.tokens), slice(shape.tokens), False)
        self.mailbox.send(self.tokens[: shape.tokens])

    def _update_pages(self, updates: object) -> None:
        pass

    def _send(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        self.device_queue.work()  # copies are in the order of the launches
        return torch.tensor(values, dtype=dtype)

    def _draw(self, pending: Any, masks: Any) -> None:
        self.device_queue.work()
        super()._draw(pending, masks)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.device_queue.work()
        return tensor.clone()


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    device = Device()
    monkeypatch.setattr(gpu_runner.torch.cuda, "Event", device.event)
    return FakeRunner(device)


def serve(runner: FakeRunner, lag: int) -> None:
    """A hundred requests of several kinds, some from a grammar whose mask is late now and then: each gets its own answer."""
    config = EngineConfig(lag=lag, max_running=ROWS, token_budget=64, prompt_budget=64, penalty_slots=2)
    loop = Loop(Scheduler(config, num_pages=64, max_context=512, sliding_window=128, eos_ids=frozenset()), runner, lag)
    rng, answers, wanted = random.Random(lag), {}, {}
    for rid in range(100):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 5, 50, 150])))
        masked, biased = rid % 16 == 5, rid % 16 == 1
        num = rng.choice([1, 20]) if masked or biased else rng.choice([1, 60, 250])
        sampling = Sampling(temperature=0.0, max_tokens=num, logit_bias={3: 1.0} if biased else {})
        loop.add(Request(rid, prompt, sampling))
        if masked:
            loop.masks[rid] = lambda _: None if rng.random() < 0.2 else EVEN
        answers[rid], tokens = [], list(prompt)
        while len(tokens) < len(prompt) + sampling.max_tokens:
            token = next_token(tokens[-1], len(tokens) - 1)
            tokens.append(token - token % 2 if masked else token)
        wanted[rid] = tokens[len(prompt) :]
    while not loop.idle:
        for event in loop.step():
            assert event.error is None
            answers[event.rid] += event.tokens
    assert answers == wanted


@pytest.mark.parametrize("lag", [0, 1])
def test_everybody_gets_their_own_tokens(runner: FakeRunner, lag: int) -> None:
    serve(runner, lag)
    kinds = [name.split()[0] for name in runner.device_queue.launched]
    assert runner.mailbox.num_waits == 0, "the host never stops for the device, but for tokens"
    assert kinds.count("whole") > 100 and kinds.count("head") > 50 and kinds.count("body") > 50, "every path, slots many times"


@pytest.mark.parametrize("lag", [0, 1])
def test_counts_stay_equal_when_launches_fail(runner: FakeRunner, lag: int) -> None:
    rng, faults, calm = random.Random(3), [], 0

    def fault(name: str) -> bool:
        nonlocal calm
        calm += 1
        if calm < 60 or rng.random() < 0.9:  # while a failed step's requests run one by one nothing fails
            return False
        faults.append(name.rsplit(" ", 1 + name.endswith("full"))[0])
        calm = 0
        return True

    runner.device_queue.fault = fault
    serve(runner, lag)
    assert set(faults) == {f"{when} {what}" for when in ("before", "after") for what in ("body", "head", "whole")}


def test_a_slot_filled_too_early_would_be_seen(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without lag's second slot: the step on its way is overwritten."""
    monkeypatch.setattr(runner.mailbox, "_slot", lambda number: runner.mailbox._slots[0])
    with pytest.raises((AssertionError, EngineError)):
        serve(runner, 1)


def decodes(step: int, *rows: int, started: bool = False) -> Plan:
    starts = tuple(RowStart(row, Sampling(temperature=0.0), 0, 1, (), None, frozenset()) for row in rows if started)
    return Plan(step, tuple(Span(10 + row, row, step, (row,), True) for row in rows), starts)


def test_one_launch_where_nothing_comes_between(runner: FakeRunner) -> None:
    """A row that had a mask once has its body launched at once, until another request takes the row."""
    launched = runner.device_queue.launched

    def run(
        plan: Plan, masks: dict[int, bytes] | None = None, skip: frozenset[int] = frozenset()
    ) -> tuple[list[str], list[str]]:
        launched.clear()
        pending = runner.body(plan)
        at_body = launched[:]
        runner.head(pending, masks, skip)
        assert runner.results(pending).tokens.keys() == {span.rid for span in plan.spans} - skip
        return at_body, launched[len(at_body) :]

    assert run(decodes(0, 1, 2, 3)) == ([], ["whole 4"])
    assert run(decodes(1, 1, 2), skip=frozenset([11])) == ([], ["body 2", "head 2"])
    assert run(decodes(2, 1, 2), {12: EVEN}) == ([], ["body 2", "head 2 full"])
    assert run(decodes(3, 1, 2)) == (["body 2"], ["head 2 full"])
    assert run(decodes(4, 1, 3)) == ([], ["whole 2"])
    assert run(decodes(5, 1, 2, started=True)) == ([], ["whole 2"])
    assert run(decodes(6, *range(ROWS))) == ([f"body {ROWS}"], [f"head {ROWS}"]), "above the largest graph of both"
    chunk = Plan(7, (*decodes(7, 1).spans, Span(12, 2, 0, (5, 6), True)))
    assert run(chunk) == (["body 16"], ["head 2"])


def test_results_that_nobody_reads(runner: FakeRunner) -> None:
    """A slot is not filled before the device is done with it, even if nobody asked for its tokens."""
    pendings = [runner.body(decodes(0, 1))]
    runner.head(pendings[0])
    for step in range(1, 6):
        pendings.append(runner.body(decodes(step, 1)))
        runner.head(pendings[-1])
        assert len([run for run in runner.device_queue.queue if isinstance(run, partial) and run.func is not setattr]) <= SLOTS
    assert runner.results(pendings[-1]).tokens == {11: next_token(1, 5)}
    with pytest.raises(EngineError, match="in the place of the tokens of step"):
        runner.results(pendings[0])


def test_a_body_left_behind_is_replaced(runner: FakeRunner) -> None:
    """Its head never came, launched or not: the next step has its own array."""
    for left in (decodes(0, 4), Plan(1, (Span(14, 4, 0, (8, 9), True),))):
        runner.body(left)
        pending = runner.body(decodes(2, 1, 2))
        runner.head(pending)
        assert runner.results(pending).tokens == {11: next_token(1, 2), 12: next_token(2, 2)}
