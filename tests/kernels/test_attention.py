"""Attention over pages against plain loops over keys: windows, sinks, spans, and slots that hold NaN."""

import math
from importlib import import_module

import pytest
import torch

from simplellm import kernels
from simplellm.config import PAGE
from simplellm.kernels import Spans


def loops(q, keys, values, start, sinks, window):
    """Query i of a span at start + i, one query and head at a time. q [t, Hq, D]; keys, values [n, Hkv, D]."""
    out = torch.zeros_like(q, dtype=torch.float64)
    q, keys, values, sinks = q.double(), keys.double(), values.double(), sinks.double()
    group = q.shape[1] // keys.shape[1]
    for i in range(len(q)):
        seen = range(max(0, start + i - window + 1) if window else 0, start + i + 1)
        for h in range(q.shape[1]):
            key, value = keys[seen.start : seen.stop, h // group], values[seen.start : seen.stop, h // group]
            z = torch.cat([key @ q[i, h] / math.sqrt(q.shape[2]), sinks[h : h + 1]])
            weights = (z - z.max()).exp()
            out[i, h] = weights[:-1] / weights.sum() @ value
    return out.flatten(1)


class Pages:
    """Spans over scattered pages of a poisoned pool."""

    def __init__(self, spans, heads=4, kv_heads=2, dim=32, dtype=torch.bfloat16, seed=0):
        g = torch.Generator().manual_seed(seed)
        rand = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
        self.spans = spans  # (start, length)
        most = max((start + num + PAGE - 1) // PAGE for start, num in spans)
        order = torch.randperm(most * len(spans), generator=g) + 1
        self.table = order.view(len(spans), most).to(torch.int32)
        self.kv = torch.full((2, len(order) + 1, kv_heads, PAGE, dim), torch.nan, dtype=dtype)
        self.keys = [rand(start + num, kv_heads, dim) for start, num in spans]
        self.values = [rand(start + num, kv_heads, dim) for start, num in spans]
        for s in range(len(spans)):
            for j in range(len(self.keys[s])):
                page = self.table[s, j // PAGE]
                self.kv[0, page, :, j % PAGE], self.kv[1, page, :, j % PAGE] = self.keys[s][j], self.values[s][j]
        self.q = rand(sum(num for _, num in spans), heads, dim)
        self.sinks = rand(heads)

    def run(self, window):
        offsets = torch.tensor([0] + [num for _, num in self.spans]).cumsum(0)
        rows = torch.arange(len(self.spans)).repeat_interleave(offsets.diff())
        positions = torch.cat([torch.arange(start, start + num) for start, num in self.spans])
        return kernels.attention(self.q, self.kv, self.table, Spans(rows, positions, offsets), self.sinks, window)

    def want(self, window):
        at, rows = 0, []
        for (start, num), k, v in zip(self.spans, self.keys, self.values, strict=True):
            rows.append(loops(self.q[at : at + num], k, v, start, self.sinks, window))
            at += num
        return torch.cat(rows)


EDGES = [(0, 1), (126, 3), (127, 1), (128, 1), (129, 1), (255, 2), (0, 130), (300, 5)]


@pytest.mark.parametrize("window", [None, 128, 127, 5, 1])
def test_any_mix_of_spans(window) -> None:
    """Pitfalls 4 and 15. Window pages outside the view are poisoned too: given back, they may hold anything."""
    pages = Pages(EDGES)
    want = pages.want(window)
    if window is not None:
        for s, (start, _) in enumerate(EDGES):
            pages.kv[:, pages.table[s, : max(0, start - window + 1) // PAGE].long()] = torch.nan
    got = pages.run(window)
    assert torch.equal(got, want.to(torch.bfloat16)) or (got.double() - want).abs().max() < 0.01
    assert (got == want.to(torch.bfloat16)).float().mean() > 0.999


@pytest.mark.parametrize("window", [126, 127, 129, 130])
def test_a_window_off_by_one_is_noticed(window) -> None:
    pages = Pages(EDGES)
    assert (pages.run(window).double() - pages.want(128)).abs().max() > 0.01


def test_sink_is_a_logit_without_a_value() -> None:
    """Two keys with z = 0 and a sink of 0 weigh a third each."""
    pages = Pages([(1, 1)], heads=1, kv_heads=1, dtype=torch.float32)
    pages.q.zero_()
    pages.sinks.zero_()
    assert torch.allclose(pages.run(None)[0], pages.values[0].sum(0)[0] / 3)


def test_sink_is_not_scaled_nor_absent_at_zero() -> None:
    """Pitfall 7: a sink of 2 against one key with z = 0 leaves the key 1 / (1 + e^2); of 0, a half; of -inf, all."""
    pages = Pages([(0, 1)], heads=1, kv_heads=1, dtype=torch.float32)
    pages.q.zero_()
    for sink, weight in ((2.0, 1 / (1 + math.exp(2))), (0.0, 0.5), (-math.inf, 1.0), (80.0, math.exp(-80))):
        pages.sinks.fill_(sink)
        assert torch.allclose(pages.run(None)[0], pages.values[0][0, 0] * weight)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("sink", [-30.0, 6.0, 30.0])
def test_large_sinks(window, sink) -> None:
    """Pitfalls 5 and 6, on prompts, chunks and decodes, both kinds of layer."""
    pages = Pages([(0, 40), (100, 60), (299, 1)], dtype=torch.float32)
    pages.sinks.fill_(sink)
    assert torch.allclose(pages.run(window).double(), pages.want(window), rtol=1e-5, atol=1e-30)


def test_blocks_of_queries_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(EDGES, dtype=torch.float32)
    whole = pages.run(128)
    monkeypatch.setattr(import_module("simplellm.kernels.attention"), "SCORE_BYTES", 8 * 4 * 300 * 3)
    assert torch.equal(pages.run(128), whole)
