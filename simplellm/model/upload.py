"""Mapped tensors to a GPU: threads copy pieces into pinned buffers, a stream of its own carries them over.

One thread copies about 5 GB/s out of the page cache, the link takes ten times that. Reading runs ahead of the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

PIECE = 32 << 20  # bytes
NUM_THREADS = 8
AHEAD = 16  # tensors on their way

K = TypeVar("K")


class Uploader:
    """Use as a context manager; its threads and buffers last as long."""

    def __init__(self, device: torch.device):
        self.device, self._stream = device, torch.cuda.Stream(device)
        self._pool = ThreadPoolExecutor(NUM_THREADS, "simplellm-load")
        self._buffers: SimpleQueue[tuple[Tensor, torch.cuda.Event]] = SimpleQueue()
        for _ in range(NUM_THREADS):
            self._buffers.put((torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, tensors: Iterable[tuple[K, Tensor]]) -> Iterator[tuple[K, Tensor]]:
        """The tensors on the device, in order, ready for the current stream."""
        flying: deque[tuple[K, Tensor, list[Future[None]]]] = deque()
        for key, source in tensors:
            flying.append((key, *self._start(source)))
            if len(flying) > AHEAD:
                yield self._finish(*flying.popleft())
        while flying:
            yield self._finish(*flying.popleft())

    def _start(self, source: Tensor) -> tuple[Tensor, list[Future[None]]]:
        target = torch.empty_like(source, device=self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # its memory may have been another's a moment ago
        pairs = zip(
            source.reshape(-1).view(torch.uint8).split(PIECE), target.reshape(-1).view(torch.uint8).split(PIECE), strict=True
        )
        return target, [self._pool.submit(self._copy, *pair) for pair in pairs]

    def _copy(self, source: Tensor, target: Tensor) -> None:
        buffer, free = self._buffers.get()
        try:
            free.synchronize()  # the copy out of it, by whichever thread had it last
            pinned = buffer[: len(source)]
            pinned.copy_(source)
            with torch.cuda.stream(self._stream):
                target.copy_(pinned, non_blocking=True)
                free.record(self._stream)
        finally:  # else the pieces behind would wait for it for ever
            self._buffers.put((buffer, free))

    def _finish(self, key: K, target: Tensor, copies: list[Future[None]]) -> tuple[K, Tensor]:
        for copy in copies:
            copy.result()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        target.record_stream(self._stream)
        return key, target
