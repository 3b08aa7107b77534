"""The http kinds: each case's requests go to a real server over a scripted model, or over the built-in one."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from simplellm import LLM
from tests.cases.asked import Asked, ask, filled
from tests.cases.case import Case, NotRun, Verdict, verdict
from tests.cases.checks import make
from tests.cases.http_checks import Seen, checks
from tests.cases.models import Models
from tests.scripted import END_OF_TEXT
from tests.server.harness import USER, Served, post, wait_for

FLAGS = {"api_key": "keys"}  # of `input.server_flags`, as settings
PAGE = "http://localhost:3000"  # the page that asks in cases about CORS
INJECT = "raise in the decode loop after 3 tokens of this request only"
ANALYSIS, WORD, AFTER = [200005, 35644, 200008], 2411, [END_OF_TEXT]


def run(case: Case, models: Models) -> Verdict:
    """One case of any http kind."""
    script, kind = case.input.get("scripted_output_ids"), KINDS[case.kind]
    if "inject" in case.input:
        if (case.kind, case.input["inject"]) != ("http_each", INJECT):
            raise NotRun(f"unknown input.inject {case.input['inject']!r}")
        script, kind = AFTER, injected
    if case.needs == "scripted_model" and script is None:
        raise NotRun("has no scripted_output_ids")
    server = models.served_scripted if script is not None else models.served_tiny
    with _flagged(server, case.input.get("server_flags", {})) as served, _logs() as logs:
        if script is not None:
            served.play(script)
        seen = Seen(served, logs)
        missing = kind(case.input, seen)
        if not any(seen.asked) and not seen.notes:
            return verdict(case, [], missing)
        failed, unknown = make(case.expect, checks(seen))
    told = verdict(case, failed, missing + unknown)
    made = len(case.expect) - len(unknown)
    if told.status == "not run" and made:
        return Verdict(told.status, case.id, f"{told.why} ({made} of {len(case.expect)} checks pass)")
    return told


def each(given: dict[str, Any], seen: Seen) -> list[str]:
    """One request, or `requests`, in order. What stands in the way of one leaves the others' checks."""
    missing = []
    for request in given.get("requests", [given]):
        try:
            seen.asked.append(ask(seen.server, request, [asked for asked in seen.asked if asked is not None]))
        except NotRun as reason:
            seen.asked.append(None)
            missing.append(str(reason))
    return missing


class UntilTold(Sequence[int]):
    """A script of one word again and again; once `enough`, the answer ends."""

    def __init__(self) -> None:
        self.enough = threading.Event()

    def __len__(self) -> int:
        return 0 if self.enough.is_set() else 1 << 30

    def __getitem__(self, at: Any) -> Any:
        return [*ANALYSIS, WORD][min(at, 3)]


def injected(given: dict[str, Any], seen: Seen) -> list[str]:
    """As `each`, of requests that fail in the decode loop; another answer is on its way meanwhile, in the same steps."""
    server, missing = seen.server, []
    for request in given["requests"]:
        other = UntilTold()
        server.play(other, [*ANALYSIS, RuntimeError("injected")], AFTER)
        with server.http.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True}) as response:
            chunks = response.iter_text()
            beside = next(chunks)
            missing += each({"requests": [request]}, seen)
            other.enough.set()
            beside += "".join(chunks)
        seen.notes.append({"beside": beside})
    return missing


def sequence(given: dict[str, Any], seen: Seen) -> list[str]:
    """As `each`; later requests may need what earlier ones gave."""
    for request in given["requests"]:
        if "$" in json.dumps(request) and None in seen.asked:
            return ["a request before it was not run"]
        if missing := each({"requests": [request]}, seen):
            return missing
    return []


def matrix(given: dict[str, Any], seen: Seen) -> list[str]:
    """The base request with every combination of the varied fields."""
    names = list(given["vary"])
    combinations = itertools.product(*given["vary"].values())
    base = given["base"]
    requests = [base | {"json": base["json"] | dict(zip(names, values, strict=True))} for values in combinations]
    return each({"requests": requests}, seen)


def raw(given: dict[str, Any], seen: Seen) -> list[str]:
    """Bodies as they are written, as JSON unless a header says otherwise."""
    requests = given.get("requests", [given])
    if not all("body" in request or "body_hex" in request for request in requests):
        raise NotRun(f"unknown input: no body among {', '.join(requests[0])}")
    for request in requests:
        content = (
            bytes.fromhex(request["body_hex"]) if "body_hex" in request else request["body"].encode("utf-8", "surrogatepass")
        )
        headers = {"Content-Type": "application/json"} | request.get("headers", {})
        seen.asked.append(ask(seen.server, {"path": request["path"], "headers": headers, "body": content}))
    return []


def disconnect(given: dict[str, Any], seen: Seen) -> list[str]:
    """Sockets closed as said, on a server of its own: two requests run at once, and prompts take many steps."""
    with LLM(device="cpu", progress=False, num_pages=600, max_running=2, token_budget=64) as llm, Served(llm) as server:
        for entry in given["requests"]:
            body = filled(entry["request"]["json"], server)
            wait_for(lambda: server.metric("vllm:kv_cache_usage_perc") == 0, "the pages are not given back")
            before = server.metric("simplellm:requests_aborted_total")
            _leave(server, body, entry["close_after"])
            began = time.monotonic()
            server.wait_until_idle()
            wait_for(lambda: server.metric("vllm:num_requests_running") == 0, "the gauge does not fall")
            seen.notes.append(
                {
                    "idle_s": time.monotonic() - began,
                    "aborted": server.metric("simplellm:requests_aborted_total") - before,
                    "kv_use": server.metric("vllm:kv_cache_usage_perc"),
                    "next": ask(server, {"json": body | {"stream": False, "max_tokens": 2, "n": 1}}).status,
                }
            )
    return []


def _leave(server: Served, body: dict[str, Any], when: str) -> None:
    """Send a body and close its socket in the named phase."""
    scheduler = server.llm._engine.scheduler
    running = []
    match when:
        case "first byte or 0.5 s":
            sock = post(server, body)
            sock.settimeout(0.5)
            with suppress(TimeoutError):
                sock.recv(1)
        case "while queued":
            running = [post(server, body | {"stream": True, "n": 1}) for _ in range(2)]
            assert all(other.recv(1) for other in running)
            sock = post(server, body)
            wait_for(lambda: scheduler.waiting, "it does not wait")
        case "during a long prefill":
            sock = post(server, body | {"messages": [{"role": "user", "content": "word " * 4000}]})
            wait_for(lambda: any(request.computed > 0 for request in list(scheduler.running)), "it does not run")
        case _:
            raise NotRun(f"unknown close_after {when!r}")
    for one in (sock, *running):
        one.close()


def concurrent(given: dict[str, Any], seen: Seen) -> list[str]:
    """Light requests alone, then again while a heavy one runs."""
    alone = [_seconds(seen.server, given["light"]) for _ in range(given["light_count"])]
    heavy: list[Asked] = []
    began = time.monotonic()
    thread = threading.Thread(target=lambda: heavy.append(ask(seen.server, given["heavy"])))
    thread.start()
    beside = [_seconds(seen.server, given["light"]) for _ in range(given["light_count"])]
    thread.join(120)
    seen.asked += heavy
    seen.notes.append({"alone": alone, "beside": beside, "heavy_s": time.monotonic() - began})
    return []


def _seconds(server: Served, request: dict[str, Any]) -> float:
    began = time.monotonic()
    assert ask(server, request).status == 200
    return time.monotonic() - began


@contextmanager
def _flagged(server: Served, flags: dict[str, Any]) -> Iterator[Served]:
    """The server, or, where a case sets its flags, another front to the same kind of model."""
    if not flags:
        yield server
        return
    if unknown := sorted(flags.keys() - FLAGS.keys()):
        raise NotRun(f"unknown server_flags {unknown[0]!r}")
    settings = {FLAGS[name]: (value,) for name, value in flags.items()}
    with LLM(device="cpu", progress=False, num_pages=300) as llm, Served(llm, origins=(PAGE,), **settings) as served:
        yield served


@contextmanager
def _logs() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    level = logging.getLogger("simplellm").level
    logging.getLogger("simplellm").setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logging.getLogger("simplellm").setLevel(level)
        logging.getLogger().removeHandler(handler)


KINDS = {
    "http": each,
    "http_each": each,
    "http_sequence": sequence,
    "http_matrix": matrix,
    "http_concurrent": concurrent,
    "http_disconnect": disconnect,
    "raw_http": raw,
}
