"""Times SimpleLLM and vLLM on one card in one call: each in its own process, in turns, until each agrees with itself.

    python bench/compare.py MODEL --work 1x1024x512 --work 64x1024x512 --out bench/results/NAME.json

Where both do not fit on the card at once (the 120b), `--sequential` runs vLLM to its end first. Prompts are the same random
token ids for both, greedy, without end tokens, prefix cache off. `--vllm` takes JSON: more arguments of vllm.LLM.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Engine:
    """A worker process: one line of JSON in, one out."""

    def __init__(self, name: str, model: str, options: dict[str, Any]):
        self.name, began = name, time.perf_counter()
        command = [sys.executable, str(HERE / f"run_{name}.py"), model, json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent)
        self.about = self._read()
        self.about["startup_s"] = round(time.perf_counter() - began, 1)
        print(f"{name}: ready in {self.about['startup_s']} s", flush=True)

    def run(self, work: str, seed: int) -> dict[str, float]:
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


def agree(passes: list[dict[str, float]]) -> bool:
    """The last two, within 3 per cent."""
    if len(passes) < 2:
        return False
    a, b = passes[-2:]
    return all(abs(a[key] - b[key]) <= 0.03 * b[key] for key in ("overall", "last_first"))


def measure(engines: list[Engine], works: list[str], most: int) -> list[dict[str, Any]]:
    """Rows: each engine's passes on each work, in turns."""
    rows = []
    for work in works:
        passes: dict[str, list[dict[str, float]]] = {engine.name: [] for engine in engines}
        for seed in range(1, most + 1):
            for engine in engines:
                if not agree(passes[engine.name]):
                    passes[engine.name].append(engine.run(work, seed))
        for engine in engines:
            last = passes[engine.name][-1]
            rows.append({"work": work, "engine": engine.name, "agreed": agree(passes[engine.name]), **last})
            rows[-1]["passes"] = passes[engine.name]
            print(f"{work:>16} {engine.name:10} steady {last['steady']:9.1f} overall {last['overall']:9.1f} tok/s, "
                  f"first token {last['last_first']:.4f} s", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--work", action="append", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--sequential", action="store_true")
    parser.add_argument("--vllm", type=json.loads, default={}, help="JSON: arguments of vllm.LLM")
    parser.add_argument("--ours", type=json.loads, default={}, help="JSON: options of simplellm.LLM")
    args = parser.parse_args()
    options = {"vllm": args.vllm, "simplellm": args.ours}
    about, rows = {}, []
    groups = [["vllm"], ["simplellm"]] if args.sequential else [["simplellm", "vllm"]]  # vLLM measures the memory that is left
    for group in groups:
        engines = [Engine(name, args.model, options[name]) for name in group]
        about |= {engine.name: engine.about for engine in engines}
        rows += measure(engines, args.work, args.passes)
        for engine in engines:
            engine.close()
    record = {"bench": "compare", "model": Path(args.model).name, "engines": about, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
