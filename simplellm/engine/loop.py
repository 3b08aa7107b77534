"""The loop: plan, run, commit. With lag 1 the device always has a next step while the host reads the last one.

Body and head of a step are launched apart: where a row has a mask (a grammar), the host reads the previous step's tokens
and computes the masks while the body runs. A row whose mask is not ready sits out that head; the others lose nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Any, Protocol

from simplellm.engine.scheduler import Scheduler
from simplellm.request import Event, Plan, Span

Mask = Any  # what the runner's head takes for one row: a bool tensor [V] for the real one
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
            self.runner.head(pending, *self._ready(masked))
            self._flying.append((plan, pending))
        while len(self._flying) > (self.lag if plan is not None else 0):
            events += self._commit()
        return events

    def _ready(self, masked: list[Span]) -> tuple[dict[int, Mask], set[int]]:
        """Masks by rid, and the rids that must wait for theirs."""
        masks: dict[int, Mask] = {}
        waiting: set[int] = set()
        for span in masked:
            if span.rid not in self.masks:  # ended at the commit just now
                continue
            mask = self.masks[span.rid](span.rid)
            if mask is None:
                self.scheduler.defer(span.rid)
                waiting.add(span.rid)
            else:
                masks[span.rid] = mask
        return masks, waiting

    def _commit(self) -> list[Event]:
        plan, pending = self._flying.popleft()
        events = self.scheduler.commit(plan, self.runner.results(pending))
        for event in events:
            if event.finish_reason is not None:
                self.masks.pop(event.rid, None)
        return events
