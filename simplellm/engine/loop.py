"""The loop: plan, run, commit. With lag 1 the device always has a next step while the host reads the last one.

Body and head of a step are launched apart: where a row has a mask (a grammar), the host reads the previous step's tokens
and computes the masks while the body runs. A row whose mask is not ready sits out that head; the others lose nothing.

A step that fails is run again, one request at a time: whose part fails again ends with an error, the others lose nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from simplellm.engine.scheduler import Request, Results, Scheduler
from simplellm.errors import EngineError
from simplellm.request import ON_DEVICE, Constraint, Event, Logprob, Plan, Span

MAX_FAILURES = 3  # steps in a row of which nothing could be saved; then the device is taken for broken
LOST = ("CUDA error", "[CUDA]", "AcceleratorError")  # in what PyTorch and Triton raise: no later call will work either
FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # unless it says this

Mask = bytes  # bit i % 8 of byte i // 8: token i may be drawn
MaskSource = Callable[[int], "Mask | None"]  # rid -> the mask for its next token, or None: not ready

log = logging.getLogger("simplellm")


class PlanRunner(Protocol):
    """What an engine needs of a runner; `engine.runner.Runner` on a device, fakes in tests.

    EngineError says that it cannot go on. Whatever else it raises, it must take further plans; of one whose body or head
    raised, parts come again, each with the page updates of the whole and the RowStart of its row.
    """

    def body(self, plan: Plan) -> Any: ...
    def head(self, pending: Any, masks: Mapping[int, Mask], skip: Set[int]) -> None: ...
    def results(self, pending: Any) -> Any: ...
    def close(self) -> None: ...


class StepError(Exception):
    """The runner failed."""

    def __init__(self, error: Exception):
        self.error = error


@dataclass(slots=True)
class Saved:
    """Results of the parts of a failed step."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    scores: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)
    num_parts: int = 0

    def add(self, part: Results) -> None:
        self.tokens.update(part.tokens)
        self.logprobs.update(part.logprobs)
        self.scores.update(part.scores)
        self.num_parts += 1


class Loop:
    """Drives one scheduler and one runner. `step` returns what became known."""

    def __init__(self, scheduler: Scheduler, runner: PlanRunner, lag: int):
        self.scheduler, self.runner, self.lag = scheduler, runner, lag
        self.masks: dict[int, MaskSource] = {}  # by rid
        self._flying: deque[tuple[Plan, Any]] = deque()  # launched, not committed
        self._failures = 0  # steps that were lost since the last good one

    @property
    def idle(self) -> bool:
        """Nothing to plan and nothing on its way."""
        return not self._flying and not self.scheduler.busy

    def add(self, request: Request, constraint: Constraint | None = None) -> None:
        """Queue a request. Raises RequestError before anything changes."""
        self.scheduler.add(request)
        if constraint is not None:
            self.masks[request.rid] = partial(next_mask, request, constraint)

    def abort(self, rid: int, reason: str = "abort") -> Event | None:
        """End a request in any state; None if it is unknown or has ended."""
        self.masks.pop(rid, None)
        return self.scheduler.abort(rid, reason)

    def step(self) -> list[Event]:
        """Launch the next plan, if there is one; commit the oldest once `lag` newer ones are on their way.

        Raises what the runner raised once the device is lost, or after MAX_FAILURES.
        """
        events: list[Event] = []
        plan = self.scheduler.plan()
        try:
            if plan is not None:
                self._launch(plan, events)
            while len(self._flying) > (self.lag if plan is not None else 0):
                self._commit(events)
        except StepError as failed:
            try:
                self._recover(plan, failed.error, events)
            except Exception as second:  # what came first is what is told
                raise failed.error from (None if second is failed.error else second)
        return events

    def _launch(self, plan: Plan, events: list[Event]) -> None:
        with running():
            pending = self.runner.body(plan)
        masked = [span for span in plan.spans if span.sample and span.rid in self.masks] if self.masks else []
        if masked:
            while self._flying:  # a mask depends on the tokens before it
                self._commit(events)
        masks, waiting = self._ready(masked, events)
        with running():
            self.runner.head(pending, masks, waiting)
        self._flying.append((plan, pending))

    def _ready(self, masked: Sequence[Span], events: list[Event]) -> tuple[dict[int, Mask], set[int]]:
        """Masks by rid, and the rids that draw nothing in this step. A request whose constraint fails ends alone."""
        masks: dict[int, Mask] = {}
        waiting: set[int] = set()
        for span in masked:
            if span.rid not in self.masks:  # ended at the commit just now
                continue
            try:
                mask = self.masks[span.rid](span.rid)
            except EngineError as error:
                self._fail(span.rid, str(error), events)
                waiting.add(span.rid)
                continue
            if mask is None:
                self.scheduler.defer(span.rid)
                waiting.add(span.rid)
            else:
                masks[span.rid] = mask
        return masks, waiting

    def _commit(self, events: list[Event]) -> None:
        plan, pending = self._flying[0]
        with running():
            results = self.runner.results(pending)
        self._flying.popleft()
        self._take(plan, results, events)
        self._failures = 0

    def _take(self, plan: Plan, results: Results, events: list[Event]) -> None:
        broken = [rid for rid, token in results.tokens.items() if token < 0]
        for rid in broken:
            self._fail(rid, "no logit of the model's output is a number", events)
        if broken:  # nor may what it computed be found again
            self.scheduler.forget_written(0)
        new = self.scheduler.commit(plan, results)
        for event in new:
            if event.finish_reason is not None:
                self.masks.pop(event.rid, None)
        events += new

    def _recover(self, plan: Plan | None, error: Exception, events: list[Event]) -> None:
        """Save what can be saved of the plans that are not committed, the last of which may be `plan`; fail the rest."""
        if is_lost(error):
            raise error
        log.error("a step failed; its requests run again, one by one", exc_info=error)
        try:
            if plan is not None and (not self._flying or self._flying[-1][0] is not plan):
                while self._flying:
                    self._commit(events)
                self._redo(plan, error, events)
            else:  # the results of an older one do not come: too late to run it again
                self._give_up([flown for flown, _ in self._flying], error, events)
        except StepError as another:
            assert plan is not None
            self._give_up([flown for flown, _ in self._flying] + [plan], another.error, events)

    def _redo(self, plan: Plan, error: Exception, events: list[Event]) -> None:
        """Run the spans of a plan whose body or head failed one by one, then commit what came of them."""
        saved = Saved()
        for span in plan.spans:
            if span.rid not in self.scheduler.requests:  # it ended meanwhile
                continue
            try:
                saved.add(self._run_alone(plan, span, events))
            except StepError as failed:
                error = failed.error
                if is_lost(error):
                    raise error from None
                self._fail(span.rid, reason(error), events)
        if not saved.num_parts:
            return self._give_up([plan], error, events)
        self._failures = 0
        self.scheduler.forget_written(plan.step)
        self._take(plan, saved, events)

    def _run_alone(self, plan: Plan, span: Span, events: list[Event]) -> Results:
        """One span's results. What the device may have seen of it, it sees again: settings, counts, pages, tokens."""
        request = self.scheduler.requests[span.rid]
        if ON_DEVICE in span.tokens:  # the row's newest token may be one that the failed step drew
            span = span._replace(tokens=(request.tokens[span.start],))
        taken = {other.row for other in plan.spans}
        starts = tuple(start for start in plan.row_starts if start.row not in taken)
        starts += (self.scheduler.row_start(request),)
        masks: dict[int, Mask] = {}
        waiting = {span.rid} if request.deferred else set()
        if span.sample and not waiting and span.rid in self.masks:
            masks, waiting = self._ready([span], events)
        with running():
            pending = self.runner.body(Plan(plan.step, (span,), starts, plan.page_updates))
            self.runner.head(pending, masks, waiting)
            return self.runner.results(pending)  # type: ignore[no-any-return]

    def _give_up(self, plans: Sequence[Plan], error: Exception, events: list[Event]) -> None:
        """Fail every request of these plans, the last that were made, and forget that they were."""
        self._failures += 1
        if is_lost(error) or self._failures >= MAX_FAILURES:
            raise error
        rows = {start.row for plan in plans for start in plan.row_starts}
        rids = [span.rid for plan in plans for span in plan.spans]
        rids += [request.rid for request in self.scheduler.running if request.row in rows]
        for rid in rids:
            self._fail(rid, reason(error), events)
        self._flying.clear()
        self.scheduler.forget_written(plans[0].step)
        for plan in plans:
            self._take(plan, Saved(), events)

    def _fail(self, rid: int, problem: str, events: list[Event]) -> None:
        event = self.abort(rid, "error")
        events += [] if event is None else [event._replace(error=problem)]


@contextmanager
def running() -> Iterator[None]:
    """Tells the runner's errors from mistakes in the books, after which nothing can go on."""
    try:
        yield
    except Exception as error:
        raise StepError(error) from error


def is_lost(error: Exception) -> bool:
    """Whether the device itself failed, and not one call to it. Without memory it lives on."""
    told = f"{type(error).__name__}: {error}"
    return isinstance(error, EngineError) or (any(sign in told for sign in LOST) and not ran_out(error))


def ran_out(error: Exception) -> bool:
    """Whether a call to the device found no memory."""
    return any(sign in str(error) for sign in FULL)


def reason(error: Exception) -> str:
    """What the requests of a failed step are told."""
    return f"a step of the engine failed: {type(error).__name__}: {error}"


def next_mask(request: Request, constraint: Constraint, rid: int) -> Mask | None:
    """The mask after all that is known of the answer: preempted or put off, the request keeps its tokens."""
    known = request.tokens
    constraint.advance(known[len(request.prompt) + constraint.num_tokens :])
    return constraint.mask(request.limit - len(known))
