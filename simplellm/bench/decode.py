"""`simplellm bench decode` and `bench prefill`: tokens per second and first tokens, against what the card can do."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from simplellm.bench.floor import prompt_flops, read_bandwidth, step_bytes
from simplellm.bench.profile import profile, show
from simplellm.bench.work import Meter, Timing, Work, about, rounded
from simplellm.config import EngineConfig
from simplellm.engine.start import Engine, pick_device, start


def open_engine(path: Path, options: dict[str, Any]) -> Engine:
    """An engine without prefix cache: nothing is measured twice."""
    return start(path, EngineConfig.from_options(**options, prefix_cache=False), frozenset())


def bench_decode(path: Path, works: list[Work], options: dict[str, Any], passes: int, kernels: bool) -> None:
    """A line per workload, if asked for a table of its kernels, then JSON."""
    device = pick_device(EngineConfig.from_options(**options).device)
    bandwidth = read_bandwidth(device) if device.type == "cuda" else None
    engine = open_engine(path, options)
    try:
        meter = Meter(engine)
        rows = [_decode(meter, work, bandwidth, passes, kernels) for work in works]
    finally:
        engine.close()
    record = {"bench": "decode", "model": path.resolve().name, **about(engine), "read_bandwidth": bandwidth, "rows": rows}
    print(json.dumps(record))


def _decode(meter: Meter, work: Work, bandwidth: float | None, passes: int, kernels: bool) -> dict[str, Any]:
    config = meter.engine.model_config
    runs = meter.repeat(work, passes)
    context = work.prompt + work.new // 2
    num_bytes = step_bytes(config, work.num, context)
    row: dict[str, Any] = {"work": str(work), **rounded(runs[-1]), "passes": [rounded(run) for run in runs]}
    row["step_ms"], row["step_bytes"] = 1e3 * work.num / runs[-1].steady if runs[-1].steady else None, round(num_bytes)
    line = f"{work!s:>16}: {runs[-1].steady:9.1f} tok/s steady, first token {runs[-1].last_first:7.3f} s"
    if row["step_ms"]:
        rate = num_bytes / row["step_ms"] * 1e3
        line += f", {row['step_ms']:.3f} ms a step, {num_bytes / 1e9:.2f} GB, {rate / 1e12:.2f} TB/s"
        if bandwidth:
            row["share"] = round(rate / bandwidth, 4)
            line += f", {rate / bandwidth:.1%} of {bandwidth / 1e12:.2f}"
    print(line, flush=True)
    if kernels:
        row["kernels"] = profile(meter, work)
        show(row["kernels"], config, work.num, context)
    return row


def bench_prefill(path: Path, prompts: list[int], options: dict[str, Any], passes: int) -> None:
    """Time to the first token of one prompt, the engine idle before: medians; then JSON."""
    engine = open_engine(path, options)
    rows = []
    try:
        meter = Meter(engine)
        for num in prompts:
            runs: list[Timing] = [meter.run(Work(1, num, 1), seed) for seed in range(1 + passes)][1:]
            seconds = statistics.median(run.first for run in runs)
            flops = prompt_flops(engine.model_config, num)
            rows.append({"prompt": num, "first": seconds, "flops": flops, "passes": [run.first for run in runs]})
            print(
                f"{num:8} tokens: first token after {1e3 * seconds:9.2f} ms, {flops / seconds / 1e12:6.1f} TFLOP/s", flush=True
            )
    finally:
        engine.close()
    print(json.dumps({"bench": "prefill", "model": path.resolve().name, **about(engine), "rows": rows}))
