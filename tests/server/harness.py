"""A server within the test's process: the real front on a real port, in a thread, over the real link to a real engine.

Only the process boundary is missing; tests/server/test_process.py has that one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai

from simplellm import LLM
from simplellm.server.front import run
from simplellm.server.host import Host
from simplellm.server.serve import listen
from simplellm.server.settings import Settings
from simplellm.server.state import Front
from tests.scripted import Script, ScriptedLLM

MODEL = "gpt-oss-20b"
USER = [{"role": "user", "content": "Weather in Oslo?"}]


class Served:
    """Use it in a `with` block. The LLM belongs to the caller, and must get no requests from elsewhere."""

    def __init__(self, llm: LLM, **settings: Any):
        self.llm = llm
        self.settings = Settings(**({"path": Path(llm.path), "names": (MODEL, f"openai/{MODEL}"), "drain_s": 0.0} | settings))
        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        ours, theirs = socket.socketpair()
        self.host = Host(ours)
        self._link = ours
        self.front: Front
        self._loop: asyncio.AbstractEventLoop
        started = threading.Event()

        def on_start(front: Front) -> None:
            self.front, self._loop = front, asyncio.get_running_loop()
            started.set()

        self.well: bool | None = None

        def serve() -> None:
            self.well = asyncio.run(run(theirs, listener, self.settings, on_start))

        works = serve, lambda: self.host.run(llm)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        assert started.wait(30)
        wait_for(lambda: self.front.llm is not None, "the front is not ready")
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.call(self.front.ask_to_drain)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a thread of the server hangs"
        self._link.close()

    def call(self, action: Any) -> None:
        """Run something in the front's loop, unless that has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    def client(self, strict: bool = True) -> openai.OpenAI:
        """The official client; strict: it refuses answers that its types do not allow."""
        url = self.url + "/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=strict)

    def play(self, *scripts: Script) -> None:
        """The next requests draw these (scripted model)."""
        assert isinstance(self.llm, ScriptedLLM) and self.front.llm is not None
        self.llm.runner.play(next(self.front.llm._rids) + 1, scripts)

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 400} | body)

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "Once"} | body)

    def metric(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))

    def wait_until_idle(self) -> None:
        """Nothing is left of any request, here or in the engine, and the books balance."""
        scheduler = self.llm._engine.scheduler
        wait_for(lambda: not scheduler.busy and not self.front.feeds and not self.front.num_open, "requests are left")
        scheduler.audit()
        assert scheduler.pool.num_available == scheduler.pool.num_usable, "pages are held"

    def alive(self) -> None:
        assert self.http.get("/health").status_code == 200
        assert self.chat(max_tokens=3).status_code == 200


def post(
    server: Served, body: Any, path: str = "/v1/chat/completions", buffer: int | None = None, missing: int = 0
) -> socket.socket:
    """A request on a socket of its own, so that it can be broken off at any time. missing: bytes that do not come."""
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.settimeout(60)
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(head(path, data) + data[: len(data) - missing])
    return sock


def head(path: str, body: bytes) -> bytes:
    """What goes before a body."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode()


def wait_for(true: Any, what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def events(response: httpx.Response) -> Iterator[Any]:
    """What a stream's events hold; it must end with [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        assert line.startswith("data: ")
        yield json.loads(line[6:])
