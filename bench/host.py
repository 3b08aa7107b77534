"""The host's own cost: microseconds of plan + commit per decode step, on a runner that answers at once.

The ceiling is the device's step: about 1,500 us for the 20b on an H200. The aim is 500 us at 1,000 running requests.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field

from simplellm.config import EngineConfig
from simplellm.engine.scheduler import Request, Scheduler
from simplellm.request import Logprob, Plan, Sampling

NUM_RUNNING = (1, 64, 256, 1000)


@dataclass
class HostResults:
    """What a runner's results have: here tokens alone."""

    tokens: dict[int, int]
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    scores: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)


def results_of(plan: Plan) -> HostResults:
    return HostResults({span.rid: 1 for span in plan.spans if span.sample})


def run(num_running: int, num_steps: int = 512) -> float:
    """Median microseconds per step of `num_running` decoding requests, one step planned ahead.

    Prompts have 100 tokens and more, so that page borders fall on different steps.
    """
    config = EngineConfig(max_running=num_running, token_budget=1 << 20)
    scheduler = Scheduler(
        config, num_pages=16 * num_running + 8, max_context=131072, sliding_window=128, eos_ids=frozenset({0})
    )
    for rid in range(num_running):
        scheduler.add(Request(rid, tuple(range(100 + rid % 128)), Sampling(ignore_eos=True), cache_salt=str(rid)))
    flying, costs = scheduler.plan(), []
    assert flying is not None and len(flying.spans) == num_running
    for _ in range(num_steps):
        results = results_of(flying)
        began = time.perf_counter()
        plan = scheduler.plan()
        events = scheduler.commit(flying, results)
        costs.append(time.perf_counter() - began)
        assert plan is not None and len(events) == num_running
        flying = plan
    return statistics.median(costs) * 1e6


def main() -> None:
    """A line per size, then JSON."""
    record = {}
    for num_running in NUM_RUNNING:
        record[num_running] = round(run(num_running), 1)
        per_request = record[num_running] / num_running
        print(f"{num_running:5} running  {record[num_running]:8.1f} us/step  {per_request:6.2f} us/request")
    print(json.dumps({"bench": "host", "us_per_step": record}))


if __name__ == "__main__":
    main()
