"""A step of the GPU that does not end is an error that says so, and the end of the engine."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from simplellm.engine import gpu_runner
from simplellm.engine.gpu_runner import GpuRunner, Pending
from simplellm.errors import EngineError
from simplellm.request import Plan, Span


class Never:
    def query(self) -> bool:
        return False


def test_a_hung_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runner, "STEP_TIMEOUT", 0.01)
    pending = Pending(Plan(0, (Span(1, 0, 0, (5, 6), True),)), [], [], cast(Any, Never()))
    runner = cast(GpuRunner, SimpleNamespace(hung=False))
    with pytest.raises(EngineError, match="has not finished a step of 2 tokens in 0 s"):
        GpuRunner.results(runner, pending)
    assert runner.hung
    GpuRunner.close(runner)  # does not wait for it
