"""Drawn tokens, changed logits and log-probabilities of the Hopper kernels against the twins in float64, settings per row.

A drawn token must have the twin's best score, but for 1e-4 and the rounding of z / T to float32; a token that the twin does
not let through has none. Where a filter's limit is a matter of rounding, both sides of it count.
"""

import random

import pytest
import torch

from simplellm.engine.gpu_rows import GpuRows, LogprobTensors
from simplellm.kernels.sampling import _keep, logprobs_ref, penalise_ref, race
from simplellm.request import RowStart, Sampling
from tests.kernels.hopper.check import broken

DEVICE = "cuda"
SIZES = [201_088, 1_536, 320]
NUM_ROWS, NUM_SLOTS = 300, 40

pytestmark = pytest.mark.gpu


def make_logits(num_rows, vocab_size, seed=0):
    """Rows of several shapes: flat, peaked, with many equal values, all equal."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=g) * torch.tensor([3.0, 1.0, 0.3])[torch.arange(num_rows) % 3, None]
    logits[1::5, :40] += torch.linspace(12, 4, 40)
    logits[2::5] = (logits[2::5] * 2).round() / 2
    logits[4::50] = 1.25
    return logits.to(DEVICE)


def make_starts(num_rows, vocab_size, seed=0, plain=False, **fixed):
    """A request for each of `num_rows` rows, in another order than they are drawn. plain: temperature only."""
    rng = random.Random(seed)
    free_slots, starts = list(range(NUM_SLOTS)), []
    for row in rng.sample(range(NUM_ROWS), num_rows):
        options = {"temperature": rng.choice([0, 0.05, 0.3, 0.7, 1, 1, 1, 2])}
        if not plain:
            options |= {
                "top_k": rng.choice([0, 0, 0, 1, 2, 5, 50, 1000, vocab_size + 5]),
                "top_p": rng.choice([1, 1, 1, 0.999, 0.95, 0.9, 0.5, 0.1, 1e-6]),
                "min_p": rng.choice([0, 0, 0, 0, 0.02, 0.3, 1]),
                "logprobs": rng.random() < 0.3,
            }
            if rng.random() < 0.2:
                num = rng.choice([1, 30, 300])
                options["logit_bias"] = {rng.randrange(vocab_size): rng.choice([-100, -1, 0.5, 3, 100]) for _ in range(num)}
            if free_slots and rng.random() < 0.3:
                options |= {"presence_penalty": rng.choice([0, -1, 0.7]), "frequency_penalty": rng.choice([0, 0.3, 2])}
                options["repetition_penalty"] = rng.choice([1.3, 0.8, 10])
            options["min_tokens"] = rng.choice([0, 0, 20])
        sampling = Sampling(**options | fixed)
        tokens = tuple(rng.randrange(vocab_size) for _ in range(60)) if sampling.penalised else ()
        stops = frozenset(rng.randrange(vocab_size) for _ in range(5))
        slot = free_slots.pop() if sampling.penalised else None
        starts.append(RowStart(row, sampling, rng.randrange(-(2**63), 2**64), 40, tokens, slot, stops))
    return starts


def make_masks(starts, vocab_size, seed=0):
    """For every seventh row: many tokens, or a single one."""
    g = torch.Generator().manual_seed(seed)
    masks = {}
    for i, start in enumerate(starts[::7]):
        bits = torch.randint(0, 256, (vocab_size // 8,), generator=g).to(torch.uint8)
        if i % 3 == 2:
            bits[:] = 0
            bits[start.row % len(bits)] = 1 << i % 8
        masks[start.row] = bytes(bits.tolist())
    return masks


def changed(logits, start, position, mask):
    """One row's logits by the definition, and its counts."""
    sampling, out = start.sampling, logits.clone()
    if start.penalty_slot is not None:
        counts, seen = torch.zeros(len(out), dtype=torch.int32), torch.zeros(len(out), dtype=torch.bool)
        seen[list(start.tokens[: start.num_prompt])] = True
        for token in start.tokens[start.num_prompt :]:
            counts[token] += 1
        strengths = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        out = penalise_ref(out[None], counts.to(DEVICE)[None], seen.to(DEVICE)[None], *(out.new_tensor([x]) for x in strengths))
        out = out[0]
    for token, bias in sampling.logit_bias.items():
        out[token] += bias
    if position < start.num_prompt + sampling.min_tokens:
        out[list(start.stop_ids)] = -torch.inf
    if mask is not None:
        packed = torch.tensor(list(mask), dtype=torch.uint8, device=DEVICE)
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=DEVICE) & 1
        out[bits.flatten() == 0] = -torch.inf
    return out


def scores(logits, starts, positions, slack):
    """The twin's score of every token, -inf for those that it does not let through; limits moved by `slack`."""
    column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=DEVICE)  # noqa: E731
    temperature = column([start.sampling.temperature for start in starts], torch.float32)
    scaled = logits.double() / torch.where(temperature > 0, temperature, 1).double()[:, None]
    top_k = column([min(start.sampling.top_k, logits.shape[1]) for start in starts], torch.int64)
    top_p = column([start.sampling.top_p for start in starts], torch.float32)
    min_p = column([start.sampling.min_p for start in starts], torch.float32)
    kept = _keep(scaled, top_k, torch.where(top_p < 1, top_p.double() * (1 + slack), 1.0), min_p.double() * (1 - slack))
    seeds = column([(start.seed + 2**63) % 2**64 - 2**63 for start in starts], torch.int64)
    drawn = scaled.masked_fill(~kept, -torch.inf) + race(seeds, positions, logits.shape[1])
    return torch.where((temperature > 0)[:, None], drawn, logits.double())


def check_tokens(tokens, logits, starts, positions, exact=True):
    """tokens [n] drawn from changed logits [n, V]. exact: the share of other tokens than the twin's is counted too."""
    good, same = torch.zeros(len(tokens), dtype=torch.bool, device=DEVICE), None
    for slack in (0, 1e-5, -1e-5):
        score = scores(logits, starts, positions, slack)
        best = score.amax(-1)
        own = score.gather(1, tokens.long()[:, None])[:, 0]
        tied = (own == best) & (tokens == score.argmax(-1)) | (own < best)  # of equal ones the lowest id, unless they
        tied |= best.abs() > 1e6  # are so large that the noise, lost in float64, decides how a float32 sum is rounded
        good |= (own >= best - 1e-4 - 3e-7 * best.abs()) & tied
        same = score.argmax(-1) == tokens if same is None else same
    wrong = [(starts[i].sampling, int(tokens[i])) for i in (~good).nonzero().flatten().tolist()]
    assert not wrong, f"{len(wrong)} of {len(tokens)} rows: {wrong[:3]}"
    assert not exact or (~same).sum() <= max(1, len(tokens) // 200), "too many near ties to be chance"


def positions_of(num_rows, seed):
    """Where the tokens will stand; many within min_tokens of 20, many just after."""
    positions = torch.randint(40, 100_000, (num_rows,), generator=torch.Generator().manual_seed(seed))
    positions[::2] = positions[::2] % 40 + 40
    positions[1::4] = 60
    return positions


def run(num_rows, vocab_size, starts, masks=None, full=True, seed=0, logits=None, skip=True):
    """Draw once and check everything; returns the tokens."""
    rows = GpuRows(NUM_ROWS, NUM_SLOTS, vocab_size, torch.device(DEVICE))
    rows.start(starts)
    rows.masks(masks or {})
    raw = make_logits(num_rows, vocab_size, seed) if logits is None else logits
    positions = positions_of(num_rows, seed)
    draws = torch.tensor([[start.row, position] for start, position in zip(starts, positions.tolist(), strict=True)])
    draws = draws.int().to(DEVICE)
    left_out = (
        torch.arange(num_rows, device=DEVICE) % 11 == 9 if skip else torch.zeros(num_rows, dtype=torch.bool, device=DEVICE)
    )
    draws[left_out, 0] = -1
    tokens = torch.full((num_rows,), -7, dtype=torch.int32, device=DEVICE)
    newest = torch.full((NUM_ROWS,), -7, dtype=torch.int32, device=DEVICE)
    out = LogprobTensors.empty(num_rows, torch.device(DEVICE))
    out.values.fill_(7), out.ids.fill_(-7)
    work, slots_before = raw.clone(), rows.tables.counts.clone()
    rows.draw(work, draws, tokens, newest, out, full)

    kept = [i for i in range(num_rows) if not left_out[i]]
    own, own_starts = tokens[kept], [starts[i] for i in kept]
    want = torch.stack([changed(raw[i], starts[i], int(positions[i]), (masks or {}).get(starts[i].row)) for i in kept])
    assert work[kept].isneginf().equal(want.isneginf())
    torch.testing.assert_close(work[kept], want, rtol=1e-6, atol=1e-5)
    assert torch.equal(work[left_out], raw[left_out]), "the logits of a row that draws nothing were changed"
    drawn = own >= 0
    assert torch.equal(drawn, (want > -torch.inf).any(-1)), "a row without a candidate"
    drawing = [start for start, draws_one in zip(own_starts, drawn.tolist(), strict=True) if draws_one]
    check_tokens(own[drawn], want[drawn], drawing, positions[kept].to(DEVICE)[drawn])
    taken = torch.tensor([start.row for start in own_starts], device=DEVICE)
    assert torch.equal(newest[taken], own.clamp(min=0)) and (newest == -7).sum() == NUM_ROWS - len(kept)
    check_counts(rows, slots_before, drawing, own[drawn])
    check_logprobs(out, raw, tokens, starts, kept)
    return tokens


def check_counts(rows, before, starts, tokens):
    for start, token in zip(starts, tokens.tolist(), strict=True):
        if start.penalty_slot is not None:
            before[start.penalty_slot, token] += 1
    assert torch.equal(rows.tables.counts, before)


def check_logprobs(out, raw, tokens, starts, kept):
    asked = [i for i in kept if starts[i].sampling.logprobs]
    others = [i for i in range(len(starts)) if i not in asked]
    assert (out.values[others] == 7).all() and (out.ids[others] == -7).all(), "a row that did not ask got something"
    if asked:
        own, ids, best = logprobs_ref(raw[asked], tokens[asked].long(), 20)
        assert torch.equal(out.ids[asked].long(), ids)
        torch.testing.assert_close(out.values[asked], torch.cat([own[:, None], best], 1), rtol=1e-6, atol=3e-5)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 8, 9, 256])
def test_temperature_and_greedy(num_rows, vocab_size):
    starts = make_starts(num_rows, vocab_size, num_rows, plain=True)
    tokens = run(num_rows, vocab_size, starts, full=False)
    assert torch.equal(tokens, run(num_rows, vocab_size, starts, full=True)), "plain and full draw differ"


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_every_setting(num_rows, vocab_size):
    starts = make_starts(num_rows, vocab_size, num_rows)
    run(num_rows, vocab_size, starts, make_masks(starts, vocab_size))


@pytest.mark.parametrize("vocab_size", SIZES[1:])
def test_thousands_of_rows(vocab_size):
    for seed in range(8):
        starts = make_starts(256, vocab_size, seed)
        run(256, vocab_size, starts, make_masks(starts, vocab_size, seed), seed=seed)


EDGES = {
    "top_k 1": {"top_k": 1},
    "tiny top_p": {"top_p": 1e-30},
    "top_p just below 1": {"top_p": 0.9999999},
    "min_p 1": {"min_p": 1.0},
    "tiny min_p": {"min_p": 1e-30, "top_k": 300},
    "top_k, then top_p": {"top_k": 3, "top_p": 0.45},
    "all of them": {"top_k": 40, "top_p": 0.8, "min_p": 0.001, "temperature": 1.5},
    "cold": {"temperature": 0.01, "top_p": 0.9},
    "frozen": {"temperature": 1e-30, "top_p": 0.9},
    "huge bias": {"logit_bias": {7: 100, 8: 100, 9: -100}, "top_p": 0.5},
    "every entry": {"logit_bias": {v * 3 % 320: v / 10 - 50 for v in range(320)}, "min_tokens": 2**40},
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    for vocab_size in (320, 201_088):
        starts = make_starts(12, vocab_size, plain=True, **{"temperature": 1.0} | EDGES[name])
        run(12, vocab_size, starts)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.7}, {"top_k": 9}, {"temperature": 0}], ids=str)
def test_extreme_logits(options):
    """All equal; all but one forbidden; all forbidden (-1, as the twin); one far above; one far below."""
    logits = torch.zeros(5, 1_536)
    logits[1:3] = -torch.inf
    logits[1, 1_535] = -3.0
    logits[3, 700], logits[4, 700] = 1e4, -1e4
    starts = make_starts(5, 1_536, plain=True, **{"temperature": 1.0} | options)
    for full in (True, False) if options in ({}, {"temperature": 0}) else (True,):
        tokens = run(5, 1_536, starts, full=full, logits=logits.to(DEVICE), skip=False).tolist()
        assert tokens[1:4] == [1_535, -1, 700]


@pytest.mark.parametrize("full", [True, False])
def test_nan_is_never_drawn(full):
    """A row of NaN draws nothing; of others NaN is left out."""
    starts, logits = make_starts(3, 1_536, plain=True, temperature=0), make_logits(3, 1_536)
    logits[1], logits[2, ::2] = torch.nan, torch.nan
    rows = GpuRows(NUM_ROWS, NUM_SLOTS, 1_536, torch.device(DEVICE))
    rows.start(starts)
    draws = torch.tensor([[start.row, 50] for start in starts], dtype=torch.int32, device=DEVICE)
    tokens = torch.full((3,), -7, dtype=torch.int32, device=DEVICE)
    newest = torch.full((NUM_ROWS,), -7, dtype=torch.int32, device=DEVICE)
    rows.draw(logits.clone(), draws, tokens, newest, LogprobTensors.empty(3, torch.device(DEVICE)), full)
    assert tokens.tolist() == [int(logits[0].argmax()), -1, int(logits[2].nan_to_num(-torch.inf).argmax())]
    assert newest[[start.row for start in starts]].tolist() == tokens.clamp(min=0).tolist()


def test_min_p_1_with_one_allowed_token():
    starts = make_starts(7, 1_536, plain=True, temperature=1.0, min_p=1.0, top_k=5, top_p=0.5)
    mask = bytes(191) + b"\x10"
    assert run(7, 1_536, starts, {start.row: mask for start in starts}, skip=False).tolist() == [1_532] * 7


def test_token_does_not_depend_on_the_batch():
    """Alone or among 64: the same token, to the bit, whatever the number of tiles a program takes."""
    starts, logits = make_starts(64, 201_088, 3, plain=True, temperature=1.0), make_logits(64, 201_088, 3)
    together = run(64, 201_088, starts, full=False, logits=logits, seed=3, skip=False)
    rows = GpuRows(NUM_ROWS, NUM_SLOTS, 201_088, torch.device(DEVICE))
    rows.start(starts)
    positions = positions_of(64, 3)
    tokens, newest = together.clone(), torch.zeros(NUM_ROWS, dtype=torch.int32, device=DEVICE)
    for i in (0, 1, 2, 63):
        draws = torch.tensor([[starts[i].row, int(positions[i])]], dtype=torch.int32, device=DEVICE)
        rows.draw(logits[i : i + 1], draws, tokens[i : i + 1], newest, LogprobTensors.empty(1, torch.device(DEVICE)), False)
    assert torch.equal(tokens, together)


FAULTS = {  # what, in which module, its text, the fault
    "word at the wrong token": (
        "draw",
        "tl.join(tl.join(c0, c2), tl.join(c1, c3))",
        "tl.join(tl.join(c0, c1), tl.join(c2, c3))",
    ),
    "nine rounds": ("draw", "tl.static_range(10)", "tl.static_range(9)"),
    "highest of equal ids": (
        "draw",
        "tl.min(tl.where(best == top, best_ids, 0x7FFFFFFF",
        "tl.max(tl.where(best == top, best_ids, 0",
    ),
    "first tile only": ("draw", "quads(first + tile * TILE, TILE)", "quads(first, TILE)"),
    "no floor": ("draw", "z > floor", "z > -1e30"),
    "top_k and one more": ("filter", "top_k.to(tl.float32), best", "top_k.to(tl.float32) + 1, best"),
    "next sixteenth": ("filter", "tl.maximum(reached - 1, 0)", "tl.minimum(reached, POINTS - 1)"),
    "top_p alone": ("filter", "TOP_P) < 1, best, lo)\n", "TOP_P) < 1, best, lo)\n        lo = tl.minimum(lo, best - 50)\n"),
    "min_p too low": ("filter", "best - real_setting", "best - 3 * real_setting"),
    "bias subtracted": ("change", "+ bias", "- bias"),
    "limit off by one": ("change", "position < limit", "position <= limit"),
    "mask reversed": ("change", "(tokens % 32)", "(31 - tokens % 32)"),
    "presence for the prompt": ("change", "tl.where(count > 0, real_setting(", "tl.where(count >= 0, real_setting("),
    "changed logit": ("logprobs", "own = raw_logit(", "own = z + 0 * raw_logit("),
    "uncounted": ("logprobs", "+ token, 1)", "+ token, 0)"),
    "higher id first": ("logprobs", "(0x7FFFFFFF - tokens).to(tl.int64)", "tokens.to(tl.int64)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_kernel_is_noticed(name, monkeypatch):
    import simplellm.kernels.hopper.sampling as sampling

    module, old, new = FAULTS[name]
    monkeypatch.setattr(sampling, f"sampling_{module}", broken(getattr(sampling, f"sampling_{module}"), old, new))
    vocab_size = 10_048 if "tile" in name else 1_536
    starts = make_starts(256, vocab_size, 5)
    with pytest.raises(AssertionError):
        run(256, vocab_size, starts, make_masks(starts, vocab_size, 5), seed=5)
