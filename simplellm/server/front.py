"""The front's process: `python -m simplellm.server.front LINK LISTENER`, two inherited sockets. `serve.py` starts it.

The first message over the link holds the settings. The process ends with the engine's, or once it has drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from simplellm.server import link
from simplellm.server.app import make_app
from simplellm.server.settings import Settings
from simplellm.server.state import Front

log = logging.getLogger("simplellm.server")

LAST_WORDS_S = 5  # seconds for what is left to say once the drain is over


class Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: what a signal means is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(front: Front) -> Uvicorn:
    """uvicorn around a front. Its own log tells what goes wrong, no line per request."""
    settings = front.settings
    config = uvicorn.Config(
        make_app(front),
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=LAST_WORDS_S,
        backlog=4096,
        **settings.tls,
    )
    return Uvicorn(config)


def on_signals(front: Front) -> None:
    """The first signal drains, a second one does not wait."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, front.ask_to_drain)


async def run(
    sock: socket.socket, listener: socket.socket, settings: Settings, started: Callable[[Front], None] = on_signals
) -> bool:
    """Serve until told to drain, or until the engine is gone; whether all went well. `started` gets the front."""
    front = Front(settings)
    wire = link.Wire(front.hear, front.lose)
    front.send = wire.send
    await asyncio.get_running_loop().create_unix_connection(lambda: wire, sock=sock)
    server = make_server(front)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    started(front)
    asked = asyncio.ensure_future(front.asked_to_drain.wait())
    await asyncio.wait({asked, serving}, return_when=asyncio.FIRST_COMPLETED)
    await front.drain(settings.drain_s)
    server.should_exit = True
    await serving
    well = front.failure is None
    wire.close()
    return well


def main() -> int:
    sock, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    told = link.receive(sock)
    if told is None:  # the engine's process ended meanwhile
        return 1
    settings, level = told
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")
    well = uvicorn_runner()(run(sock, listener, settings))
    return 0 if well else 1


def uvicorn_runner() -> Any:
    """asyncio.run, on uvloop if it is there: it saves a third of the time per event."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


if __name__ == "__main__":
    sys.exit(main())
