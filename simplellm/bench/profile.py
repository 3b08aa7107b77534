"""Which kernel a decode step spends its time in: a few replays of the graphs under PyTorch's profiler.

Kernels launched with programmatic dependent launch overlap: one is resident, waiting, while the one before it ends. So the time
of a kernel is counted from the end of the one before it to its own end: these times add up to the step.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

from simplellm.bench.floor import op_bytes
from simplellm.bench.work import Meter, Work
from simplellm.config import ModelConfig
from simplellm.engine.scheduler import Request
from simplellm.errors import EngineError
from simplellm.request import Event, Sampling

SECONDS = 0.25  # of decoding under the profiler

# Kernels whose bytes bench/floor.py has, by the beginnings of their names, and the op that they read. cuBLAS's names do not
# tell which op it is.
OPS = {
    "dense_qkv": "qkv",
    "dense_linear": "output",
    "dense_logits": "lm_head",
    "attention_full": "attention_full",
    "attention_window": "attention_window",
    "router": "router",
    "experts_gate_up": "gate_up",
    "experts_down": "down",
    "experts_many_gate_up": "gate_up",
    "experts_many_down": "down",
}


def profile(meter: Meter, work: Work) -> list[dict[str, Any]]:
    """Per kernel: name, calls and microseconds a step; of `work` once all of its sequences decode."""
    import torch

    worker, random, vocab = meter.engine.worker, Random(0), meter.engine.model_config.vocab_size
    sampling = Sampling(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
    rids = [-1 - i for i in range(work.num)]
    requests = [Request(rid, tuple(random.choices(range(min(vocab, 199_000)), k=work.prompt)), sampling) for rid in rids]
    counts: dict[int, int] = dict.fromkeys(rids, 0)
    ended: list[Event] = []

    def take(event: Event) -> None:
        counts[event.rid] += len(event.tokens)
        ended.extend([event] if event.finish_reason is not None else [])

    worker.submit(requests, take)
    while min(counts.values()) < 8:
        if ended:
            raise EngineError(f"{work}: a sequence ended before its profile: {ended[0].error or ended[0].finish_reason}")
        time.sleep(0.01)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        time.sleep(SECONDS)
    worker.abort(rids)
    while not meter.engine.worker.loop.idle:
        time.sleep(0.01)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = [
            e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
    return tabulate(events)


def tabulate(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trace events (name, ts, dur in microseconds) -> rows, the largest first. A step is a replay of the final kernel."""
    events = sorted(events, key=lambda e: float(e["ts"]) + float(e["dur"]))
    spent: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    before = None
    for event in events:
        end = float(event["ts"]) + float(event["dur"])
        if before is not None:
            spent[event["name"]] += end - before
            calls[event["name"]] += 1
        before = end
    steps = max(1, calls.get("embed_kernel", 1))  # one a step
    rows = [{"kernel": name, "calls": round(calls[name] / steps, 2), "us": round(spent[name] / steps, 2)} for name in spent]
    return sorted(rows, key=lambda row: -float(str(row["us"])))


def show(rows: list[dict[str, Any]], config: ModelConfig, batch: int, context: int) -> None:
    """Print the table: time, bytes, TB/s, share of the step."""
    reads = op_bytes(config, batch, context)
    total = sum(row["us"] for row in rows)
    print(f"    {'kernel':40} {'calls':>6} {'us/step':>9} {'us/call':>8} {'MB/call':>8} {'TB/s':>6} {'share':>6}")
    for row in rows[:24]:
        num_bytes = next((reads[op] for name, op in OPS.items() if row["kernel"].startswith(name)), 0.0)
        each = row["us"] / max(row["calls"], 1e-9)
        rate = f"{num_bytes / 1e6:8.1f} {num_bytes / each / 1e6:6.2f}" if num_bytes else f"{'':8} {'':6}"
        print(f"    {row['kernel'][:40]:40} {row['calls']:6.1f} {row['us']:9.1f} {each:8.2f} {rate} {row['us'] / total:6.1%}")
    print(f"    {'all':40} {'':6} {total:9.1f}", flush=True)
