"""The loop: plan, run, commit. With lag 1 the device always has a next step while the host reads the last one.

Body and head of a step are launched apart: where a row has a mask (a grammar), the host reads the previous step's tokens
and computes the masks while the body runs. A row whose mask is not ready sits out that head; the others lose nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any, Protocol

from simplellm.engine.scheduler import Request, Scheduler
from simplellm.errors import EngineError
from simplellm.request import Constraint, Event, Plan, Span

Mask = bytes  # bit i % 8 of byte i // 8: token i may be drawn
MaskSource = Callable[[int], "Mask | None"]  # rid -> the mask for its next token, or None: not ready


class PlanRunner(Protocol):
    """What an engine needs of a runner; `engine.runner.Runner` on a device, fakes in tests."""

    def body(self, plan: Plan) -> Any: ...
    def head(self, pending: Any, masks: Mapping[int, Mask], skip: Set[int]) -> None: ...
    def results(self, pending: Any) -> Any: ...
    def close(self) -> None: ...


class Loop:
    """Drives one scheduler and one runner. `step` returns what became known."""

    def __init__(self, scheduler: Scheduler, runner: PlanRunner, lag: int):
        self.scheduler, self.runner, self.lag = scheduler, runner, lag
        self.masks: dict[int, MaskSource] = {}  # by rid
        self._flying: deque[tuple[Plan, Any]] = deque()  # launched, not committed

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
        """Launch the next plan, if there is one; commit the oldest once `lag` newer ones are on their way."""
        events: list[Event] = []
        plan = self.scheduler.plan()
        if plan is not None:
            pending = self.runner.body(plan)
            masked = [span for span in plan.spans if span.sample and span.rid in self.masks] if self.masks else []
            if masked:
                while self._flying:  # a mask depends on the tokens before it
                    events += self._commit()
            masks, waiting, failed = self._ready(masked)
            events += failed
            self.runner.head(pending, masks, waiting)
            self._flying.append((plan, pending))
        while len(self._flying) > (self.lag if plan is not None else 0):
            events += self._commit()
        return events

    def _ready(self, masked: list[Span]) -> tuple[dict[int, Mask], set[int], list[Event]]:
        """Masks by rid, the rids that draw nothing in this step, and the ends of those whose constraint failed."""
        masks: dict[int, Mask] = {}
        waiting: set[int] = set()
        failed: list[Event] = []
        for span in masked:
            if span.rid not in self.masks:  # ended at the commit just now
                continue
            try:
                mask = self.masks[span.rid](span.rid)
            except EngineError as error:
                event = self.abort(span.rid, "error")
                failed += [] if event is None else [event._replace(error=str(error))]
                waiting.add(span.rid)
                continue
            if mask is None:
                self.scheduler.defer(span.rid)
                waiting.add(span.rid)
            else:
                masks[span.rid] = mask
        return masks, waiting, failed

    def _commit(self) -> list[Event]:
        plan, pending = self._flying.popleft()
        events = self.scheduler.commit(plan, self.runner.results(pending))
        for event in events:
            if event.finish_reason is not None:
                self.masks.pop(event.rid, None)
        return events


def next_mask(request: Request, constraint: Constraint, rid: int) -> Mask | None:
    """The mask after all that is known of the answer: preempted or put off, the request keeps its tokens."""
    known = request.tokens
    constraint.advance(known[len(request.prompt) + constraint.num_tokens :])
    return constraint.mask(request.limit - len(known))
