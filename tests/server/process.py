"""`simplellm serve` as it is run: two processes and a port. What tests, and cases of kind process, start, signal and kill."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.server.harness import USER, wait_for

ROOT = Path(__file__).resolve().parents[2]
BODY: dict[str, Any] = {"messages": USER, "max_tokens": 80, "ignore_eos": True, "stream": True}


class Process:
    """A server on a free port, of the built-in model unless a path is given. verify: a certificate to trust."""

    def __init__(
        self,
        log: Path,
        *args: str,
        wait: bool = True,
        environment: Mapping[str, str | None] | None = None,
        verify: Any = True,
    ):
        command = [sys.executable, "-m", "simplellm", "serve", "--port", "0", "--device", "cpu", *args]
        self.log, self._verify = log, verify
        changed = {"PYTHONPATH": str(ROOT), "SIMPLELLM_API_KEY": "", **(environment or {})}
        whole = {name: value for name, value in {**os.environ, **changed}.items() if value is not None}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file, cwd=log.parent, env=whole)
        wait_for(lambda: "is open" in log.read_text() or self.process.poll() is not None, "the port does not open", 60)
        assert self.process.poll() is None, log.read_text()
        self.port = int(log.read_text().partition("port ")[2].split()[0])
        self.url = f"{'http' if verify is True else 'https'}://localhost:{self.port}"
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (self.front,) = map(int, children)
        if wait:
            wait_for(self.ready, "it does not get ready", 60)

    def ready(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, verify=self._verify)

    def chat(self, **body: Any) -> httpx.Response:
        json = {"messages": USER, "max_tokens": 2} | body
        return httpx.post(self.url + "/v1/chat/completions", json=json, verify=self._verify, timeout=60)

    @property
    def num_left(self) -> int:
        """Processes of it that are there."""
        return (self.process.poll() is None) + Path(f"/proc/{self.front}").exists()

    @property
    def port_is_free(self) -> bool:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the next server will
            return sock.connect_ex(("127.0.0.1", self.port)) != 0

    def ended(self) -> int:
        """The exit code; neither process nor port may be left."""
        code = self.process.wait(30)
        wait_for(lambda: not self.num_left, "the front is left")
        assert self.port_is_free
        return code

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, nothing of it is left."""
        self.process.kill()
        self.process.wait()
