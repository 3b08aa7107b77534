"""Decode attention on the GPU against its twin: lengths around pages, one long, many short, both kinds of layer."""

import pytest
import torch

from tests.kernels.hopper.check import broken, close
from tests.kernels.hopper.work import Case, make_spans

attention_decode = pytest.importorskip("simplellm.kernels.hopper.attention_decode")
op = pytest.importorskip("simplellm.kernels.hopper.attention")

pytestmark = pytest.mark.gpu

LAYERS = [None, 128]  # the window
EDGES = [1, 2, 64, 65, 127, 128, 129, 130, 255, 256, 257, 1000, 5000]


def decodes(lengths, **options):
    """Rows in reverse, so that no row is its token's number; two padded tokens, items and queries."""
    spans = [(len(lengths) - 1 - i, length - 1, 1) for i, length in enumerate(lengths)]
    return Case.make(spans, len(spans), padding=2, **options)


def check(case, window, module=attention_decode):
    """Twice, so that what the first call leaves behind is looked at, too."""
    want, plain = case.twin(window), case.twin(window, torch.bfloat16)
    for _ in range(2):
        out = torch.full((len(case.q), case.q[0].numel()), torch.nan, dtype=torch.bfloat16, device=case.q.device)
        module.decode(case.q, case.kv, case.pages, case.spans, case.sinks, window, out)
        close(out[: len(want)], want, plain)
        assert out[len(want) :].isnan().all(), "a padded token was written"


@pytest.mark.parametrize("window", LAYERS)
@pytest.mark.parametrize("num_kv", [1, 8])
def test_lengths_around_pages(num_kv, window):
    check(decodes(EDGES, num_kv=num_kv), window)


@pytest.mark.parametrize("window", LAYERS)
@pytest.mark.parametrize("lengths", [[131_072], [40_000, 7, 129, 3000] * 2, [1 + 37 * i % 700 for i in range(1000)]])
def test_long_and_many(lengths, window):
    check(decodes(lengths, seed=1), window)


def test_sharp_rows_and_heavy_sinks():
    check(decodes([3000, 500, 77], sharp=4.0, sink=4.0), None)


def test_runs_do_not_differ():
    """The pieces are added in their order, whoever comes last."""
    case = decodes([20_000, 300])
    outs = []
    for _ in range(20):
        outs.append(torch.zeros(len(case.q), case.q[0].numel(), dtype=torch.bfloat16, device=case.q.device))
        attention_decode.decode(case.q, case.kv, case.pages, case.spans, case.sinks, None, outs[-1])
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("window", LAYERS)
def test_a_graph_serves_any_number_of_decodes(window):
    spans = [(row, length - 1, 1) for row, length in enumerate([900, 3, 128, 6000, 129, 40, 1, 2000])]
    case = Case.make(spans, len(spans))
    want, plain = case.twin(window), case.twin(window, torch.bfloat16)
    static = make_spans(spans, len(spans), padding=100)  # room for more items than any step below has
    op.attention(case.q, case.kv, case.pages, static, case.sinks, window)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.attention(case.q, case.kv, case.pages, static, case.sinks, window)
    for num in (8, 3, 1):
        step = make_spans(spans[:num], num).work
        static.work.counts.copy_(step.counts)
        static.work.items[: len(step.items)] = step.items
        out.fill_(torch.nan)
        graph.replay()
        close(out[:num], want[:num], plain[:num])
        assert out[num:].isnan().all()


def test_the_twin_decides_what_is_wrong():
    """One key too few or too many, the sink once a piece, counters left behind: each is rejected."""
    short, long = decodes(EDGES, num_kv=1), decodes([6000, 3], num_kv=1, sink=6.0)
    sink = "tl.exp2(sink.to(tl.float32) * LOG2E - m)"
    for old, new, case, window in (
        ("tl.maximum(end - WINDOW, 0)", "tl.maximum(end - WINDOW + 1, 0)", short, 128),
        ("tl.maximum(end - WINDOW, 0)", "tl.maximum(end - WINDOW - 1, 0)", short, 128),
        ("seen = start + block < last", "seen = start + block < last + 1", short, None),
        ("seen = start + block < last", "seen = start + block < last - 1", short, None),
        ("+ 1, total, mask=real)", f"+ 1, total + {sink}, mask=real)", long, None),
        ("tl.store(counter, 0)", "pass", long, None),
    ):
        check(case, window)
        with pytest.raises(AssertionError):
            check(case, window, broken(attention_decode, old, new))
