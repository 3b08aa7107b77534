"""`simplellm bench host`: what the host itself costs, microseconds of plan and commit a decode step, on a runner that answers
at once. The ceiling is the device's step, about 1,500 us for the 20b at batch 1; the aim is 500 us at 1,000 running requests.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from dataclasses import dataclass, field

from simplellm import __version__
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


def measure_host(num_running: int, num_steps: int = 512) -> dict[str, float]:
    """Microseconds per step of `num_running` decoding requests, one step planned ahead: medians, and the 90th percentile.

    Prompts have 100 tokens and more, so that page borders fall on different steps.
    """
    config = EngineConfig(max_running=num_running, token_budget=1 << 20)
    num_pages = 16 * num_running + 8
    scheduler = Scheduler(config, num_pages=num_pages, max_context=131072, sliding_window=128, eos_ids=frozenset({0}))
    for rid in range(num_running):
        scheduler.add(Request(rid, tuple(range(100 + rid % 128)), Sampling(ignore_eos=True), cache_salt=str(rid)))
    flying = scheduler.plan()
    plans, commits = [], []
    for _ in range(num_steps):
        assert flying is not None and len(flying.spans) == num_running
        results = results_of(flying)
        began = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        scheduler.commit(flying, results)
        plans.append(planned - began)
        commits.append(time.perf_counter() - planned)
        flying = plan
    both = [p + c for p, c in zip(plans, commits, strict=True)]
    worst = statistics.quantiles(both, n=10)[-1]
    figures = {"plan": statistics.median(plans), "commit": statistics.median(commits), "step": statistics.median(both)}
    return {name: round(value * 1e6, 1) for name, value in (figures | {"p90": worst}).items()}


def bench_host() -> None:
    """A line per number of requests, then JSON."""
    record = {}
    for num_running in NUM_RUNNING:
        record[num_running] = figures = measure_host(num_running)
        print(
            f"{num_running:5} running: {figures['step']:8.1f} us a step (p90 {figures['p90']:8.1f})"
            f" = plan {figures['plan']:.1f} + commit {figures['commit']:.1f}; {figures['step'] / num_running:.2f} us a request"
        )
    python = f"{platform.python_implementation()} {platform.python_version()}"
    print(json.dumps({"bench": "host", "version": __version__, "python": python, "us_per_step": record}))
