"""The link between the two processes: length-prefixed pickles over a socket pair that no other process can open.

Pickle, because both ends are our own code and Sampling, Event and Logprob travel as they are; JSON has no tuples and no bytes
and takes three times as long. One message carries all that one step, or one turn of the front's loop, has to say.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("<Q")


def pack(message: object) -> bytes:
    """A message as it goes over the link."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def receive(sock: socket.socket) -> Any | None:
    """The next message; None once the other end is gone."""
    header = _read(sock, _LENGTH.size)
    data = None if header is None else _read(sock, _LENGTH.unpack(header)[0])
    return None if data is None else pickle.loads(data)


def _read(sock: socket.socket, num_bytes: int) -> bytes | None:
    parts, left = [], num_bytes
    while left:
        try:
            part = sock.recv(min(left, 1 << 20))
        except OSError:  # reset, or shut down from this side
            return None
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


async def messages(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """Messages as they come, until the other end is gone."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            yield pickle.loads(await reader.readexactly(length))
