"""Kind process: servers as they are run, started, signalled and killed. `input` has steps, or an environment to start in.

A step is one of STEPS, each on a server of its own. Without a network: whatever Python asks of one fails, and is noted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.cases.case import Case, NotRun, Verdict, verdict
from tests.cases.checks import Check, make
from tests.cases.models import Models
from tests.server.process import BODY, ROOT, Process

BUILTIN = ROOT / "simplellm" / "builtin"
LONGEST = 60  # seconds for anything
ENCODINGS = "TIKTOKEN_ENCODINGS_BASE"

# Python imports it at its start. Loopback is the server's own.
NO_NETWORK = """
import os, socket

def note(what):
    with open(os.environ["NETWORK_LOG"], "a") as file:
        file.write(f"{what}\\n")
    raise OSError("there is no network")

connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo
socket.socket.connect = lambda self, to: connect(self, to) if is_local(to) else note(to)
socket.getaddrinfo = lambda host, *args, **more: getaddrinfo(host, *args, **more) if is_local((host,)) else note(host)

def is_local(to):
    return not isinstance(to, tuple) or to[0] in (None, "127.0.0.1", "::1", "localhost")
"""


@dataclass
class Ended:
    """How a step ended."""

    step: str
    seconds: float  # from the signal to the exit of the process that was started
    code: int
    left_s: float  # from there until none of its processes was left; LONGEST: one stayed
    port_is_free: bool
    problems: list[str] = field(default_factory=list)


def run(case: Case, models: Models) -> Verdict:
    """One case of kind process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "steps" in case.input:
            if unknown := [step for step in case.input["steps"] if step not in STEPS]:
                raise NotRun(f"unknown step {unknown[0]!r}")
            ended = [_one(step, folder) for step in case.input["steps"]]
            failed, missing = make(case.expect, _end_checks(ended))
            failed += [f"{end.step}: {problem}" for end in ended for problem in end.problems]
        elif "environment" in case.input:
            failed, missing = make(case.expect, _start_checks(_environments(case.input["environment"], folder), folder))
        else:
            raise NotRun(f"unknown input: neither steps nor an environment among {', '.join(case.input)}")
    return verdict(case, failed, missing)


# Steps


def _one(step: str, folder: Path) -> Ended:
    """A server, what the step does to it, and how it ends."""
    options, act = STEPS[step]
    log = folder / "log"
    with Process(log, *options, wait=act is not _interrupted) as served:
        problems, signalled = act(served)
        code = served.process.wait(LONGEST)
        seconds, ended = time.monotonic() - signalled, time.monotonic()
        while served.num_left and time.monotonic() - ended < LONGEST:
            time.sleep(0.01)
        told = log.read_text()
        problems += ["a traceback in its log"] if "Traceback" in told else []
        return Ended(step, seconds, code, time.monotonic() - ended, served.port_is_free, problems)


class Streams:
    """Four answers on their way, each of which has begun."""

    def __init__(self, served: Process, max_tokens: int):
        self.texts = ["", "", "", ""]
        self._threads = [threading.Thread(target=self._read, args=(served, i, max_tokens)) for i in range(4)]
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + LONGEST
        while not all("data: " in text for text in self.texts):
            assert time.monotonic() < deadline, "the streams do not begin"
            time.sleep(0.01)

    def _read(self, served: Process, i: int, max_tokens: int) -> None:
        body = BODY | {"max_tokens": max_tokens, "seed": i}
        with httpx.stream("POST", served.url + "/v1/chat/completions", json=body, timeout=LONGEST) as response:
            for text in response.iter_text():
                self.texts[i] += text

    def ended(self) -> list[str]:
        for thread in self._threads:
            thread.join(LONGEST)
        return self.texts


def _drained(served: Process) -> tuple[list[str], float]:
    streams = Streams(served, 20)
    signalled = _signal(served, signal.SIGTERM)
    while (refused := served.chat(max_tokens=1)).status_code == 200:  # until the signal has come through
        assert time.monotonic() - signalled < LONGEST, "it does not drain"
    problems = []
    if refused.status_code != 503 or not refused.headers.get("retry-after"):
        problems.append(f"a new request got {refused.status_code} with {dict(refused.headers)}")
    problems += [f"a stream ended with {text[-200:]!r}" for text in streams.ended() if not _is_whole(text)]
    return problems, signalled


def _cut_off(served: Process) -> tuple[list[str], float]:
    streams = Streams(served, 100_000)
    signalled = _signal(served, signal.SIGTERM)
    return [f"a stream ended with {text[-200:]!r}" for text in streams.ended() if not _is_error(text)], signalled


def _twice(served: Process) -> tuple[list[str], float]:
    streams = Streams(served, 100_000)
    signalled = _signal(served, signal.SIGTERM)
    time.sleep(0.1)
    _signal(served, signal.SIGTERM)
    return [f"a stream ended with {text[-200:]!r}" for text in streams.ended() if not _is_error(text)], signalled


def _front_killed(served: Process) -> tuple[list[str], float]:
    os.kill(served.front, signal.SIGKILL)
    return [], time.monotonic()


def _interrupted(served: Process) -> tuple[list[str], float]:
    return [], _signal(served, signal.SIGINT)  # the port has just opened


def _signal(served: Process, number: int) -> float:
    served.process.send_signal(number)
    return time.monotonic()


def _is_whole(text: str) -> bool:
    return '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")


def _is_error(text: str) -> bool:
    *_, last, done = text.removesuffix("\n\n").split("\n\n")
    return done == "data: [DONE]" and last.startswith("data: ") and "message" in json.loads(last[6:]).get("error", {})


SIGTERMS = (_drained, _cut_off, _twice)
STEPS: dict[str, tuple[tuple[str, ...], Callable[[Process], tuple[list[str], float]]]] = {
    "start, 4 streams running, SIGTERM with a drain time of 10 s: streams end whole, new requests get 503 with Retry-After": (
        ("--drain-s", "10"),
        _drained,
    ),
    "same with drain time 0: streams end with an error object": (("--drain-s", "0"), _cut_off),
    "two SIGTERM 0.1 s apart": ((), _twice),
    "SIGKILL the HTTP process": ((), _front_killed),
    "SIGINT while weights load": ((), _interrupted),
}


def _end_checks(ended: list[Ended]) -> dict[str, Check]:
    def exit_within_s(value: float) -> Iterator[str]:
        yield from (f"{end.step}: after {end.seconds:.1f} s" for end in ended if end.seconds > value)

    def no_child_left_within_s(value: float) -> Iterator[str]:
        yield from (f"{end.step}: for {end.left_s:.1f} s" for end in ended if end.left_s > value)

    def device_memory_free() -> Iterator[str]:
        """The device is the CPU: its memory is that of the processes."""
        yield from (f"{end.step}: a process is left" for end in ended if end.left_s >= LONGEST)

    def port_free() -> Iterator[str]:
        yield from (f"{end.step}: it listens" for end in ended if not end.port_is_free)

    def exit_code_zero_on_sigterm() -> Iterator[str]:
        """And only then: a supervisor starts a server again whose front was killed."""
        for end in ended:
            act = STEPS[end.step][1]
            if (act in SIGTERMS and end.code != 0) or (act is _front_killed and end.code == 0):
                yield f"{end.step}: exit code {end.code}"

    made = [exit_within_s, no_child_left_within_s, device_memory_free, port_free, exit_code_zero_on_sigterm]
    return {check.__name__: check for check in made}


# Starts


def _environments(asked: dict[str, str], folder: Path) -> list[dict[str, str | None]]:
    """The environments to start in."""
    wanted = {"network": "none", "HOME": "empty folder", ENCODINGS: "unset, then a wrong folder"}
    if unknown := [name for name, value in asked.items() if wanted.get(name) != value]:
        raise NotRun(f"unknown environment {unknown[0]!r}: {asked[unknown[0]]!r}")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(NO_NETWORK)
    (folder / "home").mkdir()
    made: dict[str, str | None] = {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}", "HOME": str(folder / "home")}
    made |= {"NETWORK_LOG": str(folder / "network"), "HF_HOME": None, "XDG_CACHE_HOME": None}
    return [made | {ENCODINGS: None}, made | {ENCODINGS: str(folder / "no-such-folder")}]


def _start_checks(environments: list[dict[str, str | None]], folder: Path) -> dict[str, Check]:
    def starts(using: str) -> Iterator[str]:
        if using != "only the files in the model folder (tokenizer.json)":
            raise NotRun(f"unknown check 'starts' using {using!r}")
        for environment in environments:
            with Process(folder / "log", environment=environment) as served:
                if (status := served.chat().status_code) != 200:
                    yield f"with {ENCODINGS}={environment[ENCODINGS]}: {status}"
        if (asked := folder / "network").exists():
            yield f"it asked the network for {asked.read_text()!r}"

    def if_a_file_is_missing(then: str) -> Iterator[str]:
        """The weights are broken, too: who reads them first complains of them."""
        if not then.startswith("one clear error before weights are loaded"):
            raise NotRun(f"unknown check 'if_a_file_is_missing' then {then!r}")
        model = folder / "model"
        shutil.copytree(BUILTIN, model)
        (model / "tokenizer.json").unlink()
        for weights in model.glob("*.safetensors"):
            weights.write_bytes(b"broken")
        began = time.monotonic()
        with Process(folder / "log", str(model), wait=False, environment=environments[0]) as served:
            code = served.process.wait(LONGEST)
        lines = (folder / "log").read_text().splitlines()
        errors = [line for line in lines if "tokenizer.json" in line]
        if code != 1 or errors != lines[-1:] or "Traceback" in "\n".join(lines) or time.monotonic() - began > 20:
            yield f"exit code {code} after {time.monotonic() - began:.0f} s, having said {lines}"

    return {"starts": starts, "if_a_file_is_missing": if_a_file_is_missing}
