"""`simplellm bench serve`: a trace through the engine alone, behind its server, and through any OpenAI-compatible server.

All get the same requests: random token ids, greedy, no end token. The client is one for all servers, in a process that
does nothing else. The engine alone and the one behind the server start with the same options (prefix cache on, and of no
use) in a process of their own each, one after the other, so that both find the device empty.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simplellm.bench.figures import Answer, figures, show
from simplellm.bench.trace import TEXT_IDS, Arrival, draw_prompts, draw_trace, load_trace, parse_lengths, save_trace
from simplellm.errors import EngineError, OptionError

if TYPE_CHECKING:
    from simplellm.bench.client import Client
    from simplellm.engine.start import Engine

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 900.0  # for a server to load its model; the first time, kernels are compiled
END_S = 60.0

Drive = Callable[[Sequence[Arrival], Sequence[Sequence[int]]], list[Answer]]


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    path: Path | None  # a checkpoint; None: no engine of ours, servers only
    urls: tuple[str, ...] = ()
    both: bool = False  # the engine of `path` alone, then behind its server; else alone
    num: int = 256
    rate: float | None = None  # requests per second; None: all at once
    prompt: str = "1024"  # lengths, as `parse_lengths` reads them
    new: str = "256"
    seed: int = 1
    trace: Path | None = None  # to replay instead of drawing one
    save: Path | None = None
    passes: int = 2  # the last one counts
    vocab: int | None = None  # None: the checkpoint's

    def draw(self) -> tuple[list[Arrival], dict[str, Any]]:
        """The trace, and what a record says of it."""
        if self.passes < 1:
            raise OptionError(f"passes: {self.passes} is below 1")
        if self.vocab is not None and self.vocab < 1:
            raise OptionError(f"vocab: {self.vocab} is below 1")
        if self.trace is not None:
            return load_trace(self.trace), {"file": self.trace.name, "seed": self.seed}
        lengths = parse_lengths(self.prompt), parse_lengths(self.new)
        about = {name: getattr(self, name) for name in ("num", "rate", "prompt", "new", "seed")}
        return draw_trace(self.num, self.rate, *lengths, self.seed), about


def bench_serve(asked: Asked, options: Mapping[str, Any]) -> int:
    """A line per way and pass, then JSON; the exit code: 1 if a request failed. Raises SimpleLLMError."""
    from simplellm.bench.work import machine
    from simplellm.config import EngineConfig

    trace, about = asked.draw()
    if asked.save is not None:
        save_trace(asked.save, trace)
    vocab = asked.vocab or (TEXT_IDS if asked.path is None else _vocab_size(asked.path))
    prompts = [draw_prompts(trace, vocab, asked.seed + i) for i in range(asked.passes)]
    rows = []
    if asked.path is not None and asked.both:
        rows += [engine_apart(asked.path, trace, asked, vocab, options)]
        with own_server(asked.path, options) as client:
            rows += [measure("server", client.run, trace, prompts)]
    elif asked.path is not None:
        rows += [engine_here(asked.path, trace, prompts, options)]
    for url in asked.urls:
        client = connect(url)
        rows += [measure(url, client.run, trace, prompts) | {"served": client.model}]
    record = {"bench": "serve", "model": None, **machine(options.get("device", "auto")), "trace": about, "rows": rows}
    if asked.path is not None:
        record |= {"model": asked.path.resolve().name, "options": asdict(EngineConfig.from_options(**options))}
    if len(rows) > 1:
        record["ratios"] = ratios(rows)
    print(json.dumps(record))
    return 1 if any(run["failures"] for row in rows for run in row["passes"]) else 0


def measure(name: str, drive: Drive, trace: Sequence[Arrival], prompts: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """A pass for each set of prompts; the last one's figures, and all passes'."""
    passes = []
    for listed in prompts:
        passes.append(figures(drive(trace, listed)))
        print(show(name, passes[-1]), flush=True)
    return {"way": name, **passes[-1], "passes": passes}


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each way's throughput over the first one's."""
    first, told = rows[0], []
    for row in rows[1:]:
        parts = {key: round(row[key] / first[key], 4) if first[key] else None for key in ("overall", "steady")}
        told.append({"way": row["way"], "over": first["way"], **parts})
        text = ", ".join("no figure" if value is None else f"{value:.1%} {key}" for key, value in parts.items())
        print(f"{row['way']} / {first['way']}: {text}", flush=True)
    return told


class EngineDriver:
    """Traces through an engine in this process; tokens count when the engine's thread hands them out."""

    def __init__(self, engine: Engine):
        self.engine, self._rid = engine, 0

    def run(self, trace: Sequence[Arrival], prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """As `Client.run`. Raises OptionError if a request has no room."""
        from simplellm.engine.scheduler import Request
        from simplellm.request import Event, Sampling

        room, longest = self.engine.scheduler.max_length, max(one.prompt + one.new for one in trace)
        if longest > room:
            raise OptionError(f"trace: a request comes to {longest} tokens, there is room for {room}")
        answers = [Answer(one) for one in trace]
        requests: list[Request] = []
        for one, ids in zip(trace, prompts, strict=True):
            sampling = Sampling(temperature=0.0, max_tokens=one.new, ignore_eos=True)
            requests.append(Request(self._rid + len(requests), tuple(ids), sampling))
        by_rid = {request.rid: answer for request, answer in zip(requests, answers, strict=True)}
        self._rid += len(requests)
        left, done = len(requests), threading.Event()

        def take(event: Event) -> None:
            nonlocal left
            answer = by_rid[event.rid]
            if event.tokens:
                answer.times.append(time.perf_counter() - began)
                answer.tokens += len(event.tokens)
            if event.finish_reason is not None:
                answer.error = event.error
                answer.end(answer.tokens)
                left -= 1
                if left == 0:
                    done.set()

        began, sent = time.perf_counter(), 0
        while sent < len(requests):
            now = time.perf_counter() - began
            due = [i for i in range(sent, len(requests)) if trace[i].at <= now]
            if due:
                for i in due:
                    answers[i].sent = now
                self.engine.worker.submit([requests[i] for i in due], take)
                sent += len(due)
            else:
                time.sleep(trace[sent].at - now)
        done.wait()
        return answers


def engine_here(
    path: Path, trace: Sequence[Arrival], prompts: Sequence[Sequence[Sequence[int]]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The engine alone, in this process."""
    from simplellm.config import EngineConfig
    from simplellm.engine.start import start

    engine = start(path, EngineConfig.from_options(**options), frozenset())
    try:
        return measure("engine", EngineDriver(engine).run, trace, prompts)
    finally:
        engine.close()


def engine_apart(path: Path, trace: Sequence[Arrival], asked: Asked, vocab: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The engine alone, in a process that leaves the device empty behind it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        save_trace(file, trace)
        how = {"trace": file, "seed": asked.seed, "passes": asked.passes, "vocab": vocab}
        command = [sys.executable, "-m", "simplellm", "bench", "serve", str(path), *_flags(how), *_flags(options)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                if not line.startswith("{"):
                    print(line, end="", flush=True)
                last = line
    try:
        return dict(json.loads(last)["rows"][0])
    except ValueError:
        raise EngineError(f"the engine's process ended with code {process.returncode}") from None


@contextmanager
def own_server(path: Path, options: Mapping[str, Any]) -> Iterator[Client]:
    """`simplellm serve` on a free port, ready; ended afterwards. Raises EngineError with its last words."""
    from simplellm.bench.client import many_files

    many_files()
    command = [sys.executable, "-m", "simplellm", "serve", str(path), "--port", "0", *_flags(options)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=_environment())
        try:
            yield _wait_until_ready(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> Client:
    """The server says its address once it takes requests, and not before."""
    until = time.monotonic() + START_S
    while (told := re.search(r" at (http://\S+)", log.read_text(errors="replace"))) is None:
        if process.poll() is not None or time.monotonic() > until:
            words = log.read_text(errors="replace").strip()[-500:]
            raise EngineError(f"the server does not get ready; its last words: {words}")
        time.sleep(0.1)
    return connect(told[1])


def connect(url: str) -> Client:
    try:
        from simplellm.bench.client import Client
    except ModuleNotFoundError as error:
        raise OptionError(f"bench serve: {error.name} is missing: pip install 'simplellm-engine[server]'") from None
    return Client(url)


def _flags(options: Mapping[str, Any]) -> list[str]:
    """As a command line has them."""
    given = [(name, value) for name, value in options.items() if value is not None]
    return [part for name, value in given for part in ("--" + name.replace("_", "-"), str(value))]


def _environment() -> dict[str, str]:
    """Finds this package; a server without keys."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "SIMPLELLM_API_KEY": ""}


def _vocab_size(path: Path) -> int:
    from simplellm.model.checkpoint import load_config

    return load_config(path).vocab_size
