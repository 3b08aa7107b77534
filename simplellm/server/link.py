"""The link between the two processes: length-prefixed pickles over a socket pair that no other process can open.

Pickle, because both ends are our own code and Sampling, Event and Logprob travel as they are; JSON has no tuples and no bytes
and takes three times as long. One message carries all that one step, or one turn of the front's loop, has to say. Events that
are a token and nothing else, which nearly all are, travel as two ints: a fifth of the time of pickled Events.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from simplellm.request import Event

_LENGTH = struct.Struct("<Q")
_PLAIN = Event(0, (0,))[2:]  # what an event holds behind its tokens if they are all it has to say

Squeezed = tuple[list[int], list["int | Event"]]  # events in order: their rids, and the one token of each or the event itself


def squeeze(events: Iterable[Event]) -> Squeezed:
    """Events as they travel."""
    rids, news = list[int](), list[int | Event]()
    for event in events:
        rids.append(event[0])
        news.append(event[1][0] if event[2:] == _PLAIN and len(event[1]) == 1 else event)
    return rids, news


def merged(batch: Iterable[Squeezed]) -> Iterator[Event]:
    """The events of several messages by request, each request's in order, and of neighbouring plain tokens one event."""
    runs: dict[int, list[int | Event]] = {}
    for rids, news in batch:
        for rid, new in zip(rids, news, strict=True):
            if rid in runs:
                runs[rid].append(new)
            else:
                runs[rid] = [new]
    for rid, run in runs.items():
        if len(run) == 1:
            (new,) = run
            yield Event(rid, (new,)) if isinstance(new, int) else new
        else:
            yield from _joined(rid, run)


def _joined(rid: int, run: Sequence[int | Event]) -> Iterator[Event]:
    tokens: list[int] = []
    for new in run:
        if isinstance(new, int):
            tokens.append(new)
            continue
        if tokens:
            yield Event(rid, tuple(tokens))
            tokens = []
        yield new
    if tokens:
        yield Event(rid, tuple(tokens))


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


class Wire(asyncio.Protocol):
    """An end of the link in an event loop. `take` gets all the messages that have come, several where the loop is behind."""

    def __init__(self, take: Callable[[list[Any]], None], lost: Callable[[], None]):
        self._take, self._lost = take, lost
        self._read = bytearray()
        self._transport: asyncio.Transport

    def send(self, message: object) -> None:
        self._transport.write(pack(message))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._read += data
        messages, at, begin = list[Any](), 0, _LENGTH.size
        while len(self._read) >= begin and len(self._read) >= (end := begin + _LENGTH.unpack_from(self._read, at)[0]):
            with memoryview(self._read) as view, view[begin:end] as message:
                messages.append(pickle.loads(message))
            at, begin = end, end + _LENGTH.size
        del self._read[:at]
        if messages:
            self._take(messages)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()
