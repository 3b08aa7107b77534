"""What GpuRows keeps for the device, and, on a GPU, that one captured draw serves whatever comes to stand in its rows."""

import numpy as np
import pytest
import torch

from simplellm.engine.gpu_rows import GpuRows, LogprobTensors
from simplellm.kernels.hopper.sampling_tables import MAX_FORBIDDEN, Field
from simplellm.request import RowStart, Sampling
from tests.kernels.hopper import test_sampling as ops

V = 320


def start(row, seed=0, stops=(1, 2), tokens=(), slot=None, **options):
    return RowStart(row, Sampling(**options), seed, 3, tokens, slot, frozenset(stops))


def make(*starts, device="cpu"):
    rows = GpuRows(8, 2, V, torch.device(device))
    rows.start(starts)
    return rows


def field(rows, row, name):
    value = rows.tables.settings[row, Field[name]]
    reals = ("INVERSE_TEMPERATURE", "TOP_P", "MIN_GAP", "PRESENCE", "FREQUENCY", "REPETITION")
    return float(value.view(torch.float32)) if name in reals else int(value)


def test_settings_by_their_bits() -> None:
    rows = make(start(5, seed=-2, temperature=0.5, top_k=7, top_p=0.25, min_p=0.5), start(1, temperature=0.0, top_k=4))
    assert (field(rows, 5, "SEED_LOW"), field(rows, 5, "SEED_HIGH")) == (-2, -1)
    assert (field(rows, 5, "INVERSE_TEMPERATURE"), field(rows, 5, "TOP_P"), field(rows, 5, "TOP_K")) == (2.0, 0.25, 7)
    assert field(rows, 5, "MIN_GAP") == pytest.approx(0.5 * np.log(2)) and field(rows, 1, "MIN_GAP") == np.inf
    assert field(rows, 5, "FILTERED") == 1 and field(rows, 1, "FILTERED") == 0, "a greedy row has no use for filters"
    assert field(rows, 1, "INVERSE_TEMPERATURE") == 0 and field(rows, 1, "SLOT") == -1


def test_entries_join_bias_and_forbidden_stops() -> None:
    rows = make(
        start(2, logit_bias={2: -1.5, 9: 4.0}, min_tokens=10), start(3, logit_bias={7: 1.0}), start(4, min_tokens=2**70)
    )
    tokens, bias, limits = rows.tables.entries[2, :, : field(rows, 2, "NUM_ENTRIES")]
    got = {
        t: (b, limit) for t, b, limit in zip(tokens.tolist(), bias.view(torch.float32).tolist(), limits.tolist(), strict=True)
    }
    assert got == {2: (-1.5, 13), 9: (4.0, 0), 1: (0.0, 13)}
    assert field(rows, 3, "NUM_ENTRIES") == 1 and rows.tables.entries[3, 2, 0] == 0
    assert rows.tables.entries[4, 2, :2].tolist() == [2**31 - 1] * 2
    with pytest.raises(AssertionError, match="at most"):
        make(start(2, stops=range(MAX_FORBIDDEN + 1), min_tokens=1, logit_bias={V + t: 1.0 for t in range(1024)}))


def test_penalty_slot_counts_generated_tokens() -> None:
    rows = make(start(0, tokens=(4, 5, 5, 6, 6, 4), slot=1, presence_penalty=1.0))
    assert rows.tables.seen[1].nonzero().flatten().tolist() == [4, 5]
    assert {t: int(rows.tables.counts[1, t]) for t in rows.tables.counts[1].nonzero().flatten().tolist()} == {4: 1, 6: 2}
    rows.start([start(3, tokens=(8, 8, 8), slot=1, repetition_penalty=2.0)])
    assert not rows.tables.counts.any() and rows.tables.seen[1].nonzero().flatten().tolist() == [8]


def test_host_knows_what_the_rows_need() -> None:
    rows = make(start(0), start(1, temperature=0.0, min_p=0.5), start(2, top_p=0.9), start(3, logprobs=True), start(4, top_k=V))
    assert [rows.needs_full([row]) for row in range(6)] == [False, False, True, True, False, False]
    assert [rows.needs_logprobs([row]) for row in range(5)] == [False, False, False, True, False]
    assert rows.needs_full(range(6)) and not rows.needs_full([0, 1, 4])
    rows.start([start(2), start(3)])
    assert not rows.needs_full(range(6)) and not rows.needs_logprobs(range(6))
    rows.masks({0: bytes(V // 8)})
    assert rows.needs_full([0]) and not rows.needs_full([1])
    rows.masks({})
    assert rows.needs_full([0]), "the next token of a row under a grammar has a mask, too"
    rows.start([start(0)])
    assert not rows.needs_full([0])


def test_a_mask_is_sent_when_it_changes(monkeypatch) -> None:
    rows, one, two = make(), b"\x01" + bytes(V // 8 - 1), bytes(V // 8 - 1) + b"\x80"
    rows.masks({3: one, 5: two})
    assert rows.tables.masked.tolist() == [0, 0, 0, 1, 0, 1, 0, 0]
    assert rows.tables.masks[3].tolist() == [1] + [0] * 9 and rows.tables.masks[5].tolist() == [0] * 9 + [-(2**31)]
    monkeypatch.setattr(rows, "_send", lambda array: pytest.fail("sent again"))
    rows.masks({3: bytes(one), 5: two})
    monkeypatch.undo()
    rows.masks({5: two})
    assert rows.tables.masked.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    rows.masks({3: one, 5: one})
    assert rows.tables.masked.tolist() == [0, 0, 0, 1, 0, 1, 0, 0] and rows.tables.masks[5, 0] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("full", [False, True])
def test_one_graph_for_all_plans(full) -> None:
    """Captured once, replayed while requests take the rows over, masks come and go, and counts grow: as without a graph."""
    vocab_size, num, device = 1_536, 16, torch.device("cuda")
    raw = ops.make_logits(num, vocab_size)
    graphed, plain = (GpuRows(ops.NUM_ROWS, ops.NUM_SLOTS, vocab_size, device) for _ in range(2))
    ints = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)  # noqa: E731
    logits, draws, tokens, newest, out = (
        raw.clone(),
        ints(num, 2),
        ints(num),
        ints(ops.NUM_ROWS),
        LogprobTensors.empty(num, device),
    )
    draws[:, 0] = -1

    def draw(rows, logits, tokens, newest, out):
        for at in (0, 8):  # two slices
            part = slice(at, at + 8)
            rows.draw(logits[part], draws[part], tokens[part], newest, out.rows(part), full)

    draw(graphed, logits, tokens, newest, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw(graphed, logits, tokens, newest, out)
    want_tokens, want_newest, want_out = ints(num), ints(ops.NUM_ROWS), LogprobTensors.empty(num, device)
    for step in range(6):
        if step % 2 == 0:
            starts = ops.make_starts(num, vocab_size, step, plain=not full)
            for rows in (graphed, plain):
                rows.start(starts)
            assert graphed.needs_full(s.row for s in starts) == full
        masks = ops.make_masks(starts, vocab_size, step) if full and step % 3 else {}
        for rows in (graphed, plain):
            rows.masks(masks)
        table = [[s.row if i != step else -1, 60 + step] for i, s in enumerate(starts)]
        draws.copy_(torch.tensor(table, dtype=torch.int32))
        for o in (out, want_out):
            o.values.zero_(), o.ids.zero_()
        logits.copy_(raw)
        graph.replay()
        draw(plain, raw.clone(), want_tokens, want_newest, want_out)
        assert torch.equal(tokens, want_tokens) and torch.equal(newest, want_newest)
        assert torch.equal(out.values, want_out.values) and torch.equal(out.ids, want_out.ids)
        assert torch.equal(graphed.tables.counts, plain.tables.counts)
        assert int(graphed.tables.counts.sum()) > 0 or not full
