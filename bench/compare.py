"""Times SimpleLLM and vLLM on one card in one call: each in its own process, in turns, until each agrees with itself.

    python bench/compare.py MODEL --work 1x1024x512 --work 64x1024x512 --prompt 8192 --inter 32x1024+40x8192@2 \\
        --vllm '{"max_num_batched_tokens": 8192}' --vllm '{"max_num_batched_tokens": 16384}' --out bench/results/NAME.json

--work: SEQUENCESxPROMPTxNEW. --prompt: one prompt, until its first token. --inter: sequences that decode while prompts arrive
(SEQUENCESxPROMPT+COUNTxPROMPT@RATE, of which the rate is what throughput is equal at, as long as both keep up with it).
Each --vllm is a setting, JSON of arguments of vllm.LLM. Where all do not fit on the card at once (the 120b), `--sequential`
runs each engine to its end before the next. Prompts are the same random token ids for all, greedy, without end tokens, prefix
cache off. Figures are medians of an engine's last three passes, which agree within 3 % or `agreed` is false; all passes are in
the JSON, which is written after each work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LAST = 3  # passes that count
MORE, LESS = ("steady", "decode", "overall", "prompts"), ("last_first", "between_p50", "between_p99", "first_p50")  # is better

Figures = dict[str, float]


class Engine:
    """A worker process: one line of JSON in, one out."""

    def __init__(self, name: str, model: str, options: dict[str, Any]):
        self.name, began = name, time.perf_counter()
        command = [sys.executable, str(HERE / f"run_{name.split('-')[0]}.py"), model, json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent)
        self.about = self._read()
        self.about["startup_s"] = round(time.perf_counter() - began, 1)
        print(f"{name}: ready in {self.about['startup_s']} s", flush=True)

    def run(self, work: str, seed: int) -> Figures:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"work": work, "seed": seed}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)

    def _read(self) -> dict[str, Any]:
        """The next line that is a record; engines print other things, too."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RECORD "):
                return dict(json.loads(line.removeprefix("RECORD ")))
        raise SystemExit(f"{self.name} ended with code {self.process.wait()}")


def agree(passes: list[Figures]) -> bool:
    """The last three, within 3 per cent in what a run is about: throughput and first tokens, or the median gap."""
    keys = ("between_p50",) if passes and "between_p50" in passes[0] else ("overall", "last_first")
    last = passes[-LAST:]
    return len(last) == LAST and all(max(p[key] for p in last) <= 1.03 * min(p[key] for p in last) for key in keys)


def measure(engines: list[Engine], work: str, most: int) -> list[dict[str, Any]]:
    """A row for each engine: its passes on a work, in turns with the others, and their medians."""
    passes: dict[str, list[Figures]] = {engine.name: [] for engine in engines}
    for seed in range(1, most + 1):
        for engine in engines:
            if not agree(passes[engine.name]):
                passes[engine.name].append(engine.run(work, seed))
    rows = []
    for name, found in passes.items():
        figures = {key: statistics.median(one[key] for one in found[-LAST:]) for key in found[0]}
        rows.append({"work": work, "engine": name, "agreed": agree(found), **figures, "passes": found})
        told = ", ".join(f"{key} {figures[key]:g}" for key in MORE + LESS if figures.get(key))
        print(f"{work:>24} {name:10} {told}{'' if agree(found) else ' (passes differ)'}", flush=True)
    return rows


def tabulate(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each work and figure ours, that of vLLM's better setting, and ours over theirs."""
    table = []
    for ours in (row for row in rows if row["engine"] == "simplellm"):
        others = [row for row in rows if row["work"] == ours["work"] and row["engine"] != "simplellm"]
        for key in MORE + LESS:
            if others and ours.get(key) and all(row[key] for row in others):
                best = (max if key in MORE else min)(others, key=lambda row: row[key])
                line = {"work": ours["work"], "figure": key, "simplellm": ours[key], "vllm": best[key], "by": best["engine"]}
                table.append(line | {"ratio": round(ours[key] / best[key], 3), "agreed": ours["agreed"] and best["agreed"]})
    return table


def show(table: list[dict[str, Any]]) -> None:
    for line in table:
        both = f"{line['simplellm']:12g} {line['vllm']:12g} {line['ratio']:7.3f} {line['by']}"
        print(f"{line['work']:>24} {line['figure']:12} {both}{'' if line['agreed'] else ' (passes differ)'}", flush=True)


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--work", action="append", default=[])
    parser.add_argument("--prompt", action="append", default=[], type=int)
    parser.add_argument("--inter", action="append", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--passes", type=int, default=6, help="at most, of each work on each engine")
    parser.add_argument("--sequential", action="store_true")
    parser.add_argument("--vllm", type=json.loads, action="append", help="JSON: arguments of vllm.LLM; repeat for settings")
    parser.add_argument("--ours", type=json.loads, default={}, help="JSON: options of simplellm.LLM")
    chosen = parser.parse_args(args)
    chosen.works = chosen.work + [f"1x{num}x1" for num in chosen.prompt] + chosen.inter
    if not chosen.works or chosen.passes < 1:
        parser.error("nothing to measure: give --work, --prompt or --inter, and at least one pass")
    return chosen


def main() -> None:
    args = parse()
    settings = args.vllm or [{}]
    others = {f"vllm-{i}" if len(settings) > 1 else "vllm": options for i, options in enumerate(settings, 1)}
    options = {"simplellm": args.ours, **others}  # in this order: vLLM measures the memory that is left
    groups = [[name] for name in [*others, "simplellm"]] if args.sequential else [list(options)]
    record: dict[str, Any] = {"bench": "compare", "model": Path(args.model).name, "engines": {}, "rows": [], "table": []}
    for group in groups:
        engines = [Engine(name, args.model, options[name]) for name in group]
        record["engines"] |= {engine.name: engine.about for engine in engines}
        for work in args.works:
            record["rows"] += measure(engines, work, args.passes)
            record["table"] = tabulate(record["rows"])
            if args.out:
                args.out.write_text(json.dumps(record, indent=1) + "\n")
        for engine in engines:
            engine.close()
    show(record["table"])
    print(json.dumps(record))


if __name__ == "__main__":
    main()
