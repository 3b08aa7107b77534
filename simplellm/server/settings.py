"""What a server may be told, from the command line and the environment. Plain data; it crosses the link to the front."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_BODY_MB = 32.0
LOOPBACK_NAMES = ("localhost",)


@dataclass(frozen=True)
class Settings:
    """docs/server.md explains each."""

    path: Path  # the checkpoint
    names: tuple[str, ...]  # that requests may call the model by; the first one is told in answers
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()  # none: no key is needed
    origins: tuple[str, ...] = ()  # browsers' pages that may ask (CORS); "*": all
    hosts: tuple[str, ...] = ()  # names of this server in Host, besides its address
    max_queue: int = 1024  # requests that may wait beyond those that the engine runs at once
    max_body_mb: float = MAX_BODY_MB
    drain_s: float = 30.0  # from SIGTERM until what still runs is ended
    keep_alive_s: float = 15.0  # of silence in a stream, then a comment
    stalled_s: float = 120.0  # that a client may leave unread what is sent, or unsent what it announced
    stale_s: float = 60.0  # without a heartbeat of the engine, then /health says 503
    tls: dict[str, Any] = field(default_factory=dict)  # uvicorn's ssl_ options

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    if host.lower() in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def model_names(path: Path) -> tuple[str, ...]:
    """Names for a checkpoint's folder: its own, `openai/` before it, and without `gpt-oss-`: `20b`."""
    folder = path.resolve()
    if folder.name in ("original", "metal"):  # inside a download, the folder above has the name
        folder = folder.parent
    cached = folder.parent.name == "snapshots"  # Hugging Face's cache: models--openai--gpt-oss-20b/snapshots/HASH
    name = folder.parent.parent.name.rpartition("--")[2] if cached else folder.name
    return tuple(dict.fromkeys((name, f"openai/{name}", name.removeprefix("gpt-oss-"))))
