"""Sequences in KV pages without an engine: for tests of the model and its kernels. Unowned slots hold NaN."""

from collections.abc import Sequence

import torch

from simplellm.config import PAGE
from simplellm.kernels import Spans
from simplellm.model.gpt_oss import Batch, GptOss


class Sequences:
    """`num` sequences of up to `max_tokens`, their pages scattered over a poisoned pool. Page 0 belongs to nobody."""

    def __init__(self, model: GptOss, num: int, max_tokens: int, seed: int = 0):
        pages = (max_tokens + PAGE - 1) // PAGE
        order = torch.randperm(2 * num * pages, generator=torch.Generator().manual_seed(seed)) + 1
        self.model, self.done = model, [0] * num
        self.kv = model.new_kv(len(order) + 1).fill_(torch.nan)
        self.full, self.window = order.to(torch.int32).view(2, num, pages)

    def run(self, spans: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Append tokens to sequences, all in one batch; each span's logits [t, V] at every position."""
        hidden = self.model.body(self.batch(spans), self.kv)
        return list(self.model.head(hidden).split([len(tokens) for _, tokens in spans]))

    def batch(self, spans: Sequence[tuple[int, Sequence[int]]]) -> Batch:
        starts = [self.done[s] for s, _ in spans]
        lengths = torch.tensor([len(tokens) for _, tokens in spans])
        positions = torch.cat([torch.arange(b, b + len(t)) for b, (_, t) in zip(starts, spans, strict=True)])
        for s, tokens in spans:
            self.done[s] += len(tokens)
        return Batch(
            tokens=torch.tensor([t for _, tokens in spans for t in tokens]),
            newest=torch.zeros(len(self.done), dtype=torch.int64),
            spans=Spans(
                rows=torch.tensor([s for s, _ in spans]).repeat_interleave(lengths),
                positions=positions,
                offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            ),
            full_pages=self.full,
            window_pages=self.window,
            outputs=torch.arange(len(positions)),
        )
