"""`simplellm serve`: opens the port, starts the front's process, then loads the model here. Each process ends with the other.

The link is a pair of connected sockets, so whichever process ends, however it ends, the other one reads the end of it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simplellm.errors import OptionError
from simplellm.server import link
from simplellm.server.settings import Settings

PACKAGES = ("starlette", "uvicorn", "prometheus_client")  # of the extra `server`
WAIT_S = 15  # seconds for the front to end once its link is closed

log = logging.getLogger("simplellm.server")


def serve(settings: Settings, options: Mapping[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises SimpleLLMError."""
    check_packages()
    listener = listen(settings.host, settings.port)
    port = listener.getsockname()[1]
    warn(settings)
    process = Front(settings, listener, lambda: announce(settings, port))
    try:
        say(f"loading {settings.path}; port {port} is open")
        code = process.run(options)
    finally:
        ended = process.end()
    return code or ended


def check_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(f"serve: {', '.join(missing)} missing; install the extra: pip install 'simplellm-engine[server]'")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OptionError if the address cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
    except (OSError, OverflowError) as error:
        raise OptionError(f"port: cannot listen on {host}:{port} ({error}); choose another with --port or --host") from None
    return listener


def say(text: str) -> None:
    """A line on stderr, in one write: two processes share it, and programs look for the address there."""
    sys.stderr.write(f"simplellm: {text}\n")
    sys.stderr.flush()


def warn(settings: Settings) -> None:
    """Whoever reaches a server without a key may use it."""
    if not settings.loopback and not settings.keys:
        text = f"WARNING: {settings.host} can be reached from other machines and no API key is set: anybody may use it."
        say(text)
        say("Set SIMPLELLM_API_KEY or --api-key-file.")


def announce(settings: Settings, port: int) -> None:
    scheme = "https" if settings.tls else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    say(f"{settings.names[0]} at {scheme}://{host}:{port}/v1")


class Front:
    """The front's process, as the engine's sees it."""

    def __init__(self, settings: Settings, listener: socket.socket, on_serving: Callable[[], None]):
        from simplellm.server.host import Host

        ours, theirs = socket.socketpair()
        self._path, self._link, self._host = settings.path, ours, Host(ours, on_serving)
        self._loaded = self._draining = False
        sockets = theirs.fileno(), listener.fileno()
        root = str(Path(__file__).resolve().parent.parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "simplellm.server.front", *map(str, sockets)],
            pass_fds=sockets,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes here alone; what follows is said over the link
            env=os.environ | {"PYTHONPATH": path},
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        theirs.close()
        listener.close()
        ours.sendall(link.pack((settings, logging.INFO)))

    def run(self, options: Mapping[str, Any]) -> int:
        """Load the model, serve until the front is gone."""
        from simplellm.api import LLM

        with LLM(self._path, **options) as llm:
            self._loaded = True
            self._host.run(llm)
        if not self._draining:
            log.error("the front ended without being asked to")
        return 0 if self._draining else 1

    def end(self) -> int:
        """Close the link, see the front end; its exit code."""
        self._link.close()
        try:
            return self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _on_signal(self, number: int, _: object) -> None:
        """The front drains, and its end ends this process. While the model loads, nothing is worth waiting for."""
        if self._loaded:
            self._draining = True
            self._host.say("drain")
            return
        self._process.terminate()
        try:
            self._process.wait(WAIT_S)
        finally:
            os._exit(0 if number == signal.SIGTERM else 130)
