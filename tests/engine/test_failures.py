"""Steps that fail, on a real (tiny) model: whoever is not to blame gets the answer of an undisturbed engine, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import pytest
import torch

from simplellm.engine import loop
from simplellm.engine.scheduler import Request
from simplellm.errors import EngineError
from simplellm.model.gpt_oss import GptOss
from simplellm.request import Plan
from tests.checkpoints import make
from tests.conftest import load_model
from tests.engine.harness import Harness
from tests.engine.test_schedules import EOS, VOCAB, requests

NUM = 16

Fault = Callable[[str, Plan], bool]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GptOss:
    path = make(tmp_path_factory.mktemp("m"), layers=2, experts=4, hidden=64, heads=2, head_dim=32, vocab=VOCAB)
    return load_model(Path(path), torch.float32)


@pytest.fixture(scope="module")
def undisturbed(model: GptOss) -> dict[int, tuple]:
    return made(model).run().answers()


class Faulty:
    """The real runner, which fails where `fault` says: before or after a body or a head, or instead of the results."""

    def __init__(self, runner: Any, fault: Fault):
        self.runner, self.fault, self.num_faults = runner, fault, 0

    def check(self, where: str, plan: Plan) -> None:
        if self.fault(where, plan):
            self.num_faults += 1
            raise RuntimeError(f"made up, {where}")

    def body(self, plan: Plan) -> Any:
        self.check("before body", plan)
        pending = plan, self.runner.body(plan)
        self.check("after body", plan)
        return pending

    def head(self, pending: Any, masks: Mapping[int, bytes], skip: Set[int]) -> None:
        self.runner.head(pending[1], masks, skip)
        self.check("after head", pending[0])

    def results(self, pending: Any) -> Any:
        self.check("results", pending[0])
        return self.runner.results(pending[1])


def made(model: GptOss, fault: Fault | None = None, **options: Any) -> Harness:
    """Sixteen requests, every third of which has a mask that comes late now and then."""
    harness, rng = Harness(model, eos=EOS, **options), random.Random(3)
    if fault is not None:
        harness.loop.runner = Faulty(harness.runner, fault)
    harness.add(*requests(NUM))
    even = bytes(0b01010101 for _ in range(VOCAB // 8))
    for rid in range(0, NUM, 3):
        harness.loop.masks[rid] = lambda _: None if fault is not None and rng.random() < 0.3 else even
    return harness


PLACES = ("before body", "after body", "after head")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("options", [{}, {"token_budget": 70, "max_running": 5}, {"num_pages": 12}], ids=str)
def test_a_passing_failure_costs_nobody_anything(
    model: GptOss, undisturbed: dict[int, tuple], lag: int, options: dict[str, Any]
) -> None:
    """Wherever in body or head, whatever of the step was already done: penalties are not counted twice, no token is lost."""
    rng = random.Random(lag)
    seen: set[int] = set()

    def fault(where: str, plan: Plan) -> bool:
        new = plan.step not in seen  # once per step
        if new and where in PLACES and rng.random() < 0.15:
            seen.add(plan.step)
            return True
        return False

    harness = made(model, fault, lag=lag, **options).run()
    assert harness.loop.runner.num_faults > 5
    assert harness.answers() == undisturbed
    assert harness.scheduler.pool.num_available == harness.scheduler.pool.num_usable


@pytest.mark.parametrize("where", PLACES)
def test_a_request_that_fails_ends_alone(model: GptOss, undisturbed: dict[int, tuple], where: str) -> None:
    """It fails at its third token, or while its long prompt is read; its tokens so far stand. Its pages are found by nobody."""
    guilty = {4: 3, 9: 3, 11: 0}  # by rid: from which token on

    def fault(at: str, plan: Plan) -> bool:
        return at == where and any(
            span.rid in guilty and span.end >= num_prompt[span.rid] + guilty[span.rid] for span in plan.spans
        )

    num_prompt = {request.rid: len(request.prompt) for request in requests(NUM)}
    harness = made(model, fault, lag=1).run()
    answers = harness.answers()
    for rid in range(NUM):
        if rid in guilty and harness.reasons[rid] == "error":
            tokens, wanted = answers[rid][0], undisturbed[rid][0]
            assert tokens == wanted[: len(tokens)] and len(tokens) <= guilty[rid]
        else:
            assert answers[rid] == undisturbed[rid], rid
    assert harness.reasons[11] == "error"
    again = [Request(NUM + rid, r.prompt, r.sampling, r.seed) for rid, r in enumerate(requests(NUM))]
    harness.loop.runner = harness.runner
    harness.add(*again)
    harness.run()
    for rid in set(range(NUM)) - set(range(0, NUM, 3)):  # these have no mask
        assert harness.tokens[NUM + rid] == undisturbed[rid][0], "a page of a failed step was taken for a good one"


def test_where_results_do_not_come_the_steps_in_flight_are_lost(model: GptOss) -> None:
    """Too late to run anything again: these requests end, those that wait are not touched."""
    failed: list[int] = []

    def fault(where: str, plan: Plan) -> bool:
        if where == "results" and plan.step == 6:
            failed.extend(span.rid for span in plan.spans)
            return True
        return False

    harness = made(model, fault, lag=1, max_running=4).run()
    ended = {rid for rid, why in harness.reasons.items() if why == "error"}
    assert failed and set(failed) <= ended and len(ended) <= 5
    assert {harness.reasons[rid] for rid in range(NUM) if rid not in ended} <= {"stop", "length"}
    assert harness.scheduler.pool.num_available == harness.scheduler.pool.num_usable


def test_failures_in_a_row_end_the_engine(model: GptOss) -> None:
    harness = made(model, lambda where, plan: where == "before body", max_running=4)
    for _ in range(loop.MAX_FAILURES - 1):
        assert {event.finish_reason for event in harness.loop.step()} == {"error"}
        harness.scheduler.audit()
    with pytest.raises(RuntimeError, match="made up"):
        harness.loop.step()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (type("AcceleratorError", (RuntimeError,), {})("unspecified launch failure"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (EngineError("the GPU has not finished a step in 120 s"), True),
        (ValueError("x"), False),
    ],
)
def test_a_lost_device_ends_the_engine_at_once(model: GptOss, error: Exception, lost: bool) -> None:
    assert loop.is_lost(error) is lost
    harness = made(model)
    harness.loop.runner.body = lambda plan: (_ for _ in ()).throw(error)
    if lost:
        with pytest.raises(type(error)):
            harness.loop.step()
    else:
        assert harness.loop.step()
