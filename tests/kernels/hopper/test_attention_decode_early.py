"""Every way to do decode attention that bench_attention_decode.py times, against the twin."""

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: E402

from simplellm.kernels.hopper import attention_decode_early  # noqa: E402
from simplellm.kernels.hopper.launch import launch  # noqa: E402
from tests.kernels.hopper.bench_attention_decode import FULLS, WINDOW_VARIANTS, Variant  # noqa: E402
from tests.kernels.hopper.check import broken, close  # noqa: E402
from tests.kernels.hopper.test_attention_decode import EDGES, check, decodes  # noqa: E402
from tests.kernels.hopper.work import make_spans  # noqa: E402

pytestmark = pytest.mark.gpu

ALL = [(None, variant) for variant in FULLS] + [(128, variant) for variant in WINDOW_VARIANTS]
each = pytest.mark.parametrize("window, variant", ALL, ids=lambda x: getattr(x, "name", str(x)))


def cut(case, lengths, target):
    """The case with another number of pieces."""
    spans = [(len(lengths) - 1 - i, length - 1, 1) for i, length in enumerate(lengths)]
    return replace(case, spans=make_spans(spans, len(spans), padding=2, target=target))


@each
def test_lengths_and_pieces(window, variant):
    for lengths in (EDGES, [40_000, 7, 129, 3000] * 2, [1 + 37 * i % 700 for i in range(300)]):
        case = decodes(lengths, seed=1)
        for target in (1, 20, 256) if window is None else (64,):
            check(cut(case, lengths, target), window, variant)


@each
def test_runs_do_not_differ(window, variant):
    case = decodes([20_000, 300])
    outs = []
    for _ in range(20):
        outs.append(torch.zeros(len(case.q), case.q[0].numel(), dtype=torch.bfloat16, device="cuda"))
        variant.decode(case.q, case.kv, case.pages, case.spans, case.sinks, window, outs[-1])
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_what_a_use_leaves_behind():
    """EMPTY, and counters at zero, everywhere."""
    case = decodes([20_000, 300, 5])
    slots = triton.next_power_of_2(len(case.spans.work.items))
    for spin in (True, False):
        check(case, None, Variant("", attention_decode_early, {"SPIN": spin}))
        accs, sums, counters = attention_decode_early._workspace(case.q.device, slots, case.kv.shape[2], spin)
        assert not counters.any()
        assert not spin or ((accs.view(torch.int32) == -1).all() and (sums.view(torch.int32) == -1).all())


@triton.jit
def _write_late(q_from, q_to, q_blocks, kv_from, kv_places, kv_to, SIZE: tl.constexpr):
    """Copies q and what comes to kv_places of the pages, long after the kernel behind may start: 400 trips to memory."""
    gdc_wait()
    gdc_launch_dependents()
    zero = 0
    for _ in range(400):
        zero = tl.minimum(tl.load(kv_places + zero, volatile=True), 0)
    block = tl.program_id(0)
    at = tl.arange(0, SIZE) + zero
    if block < q_blocks:
        tl.store(q_to + block * SIZE + at, tl.load(q_from + block * SIZE + at))
    else:
        at += (block - q_blocks) * SIZE
        tl.store(kv_to + tl.load(kv_places + at), tl.load(kv_from + at))


def written_late(case, window, variant):
    """q, and the tokens' own keys and values, come from the kernel before, while the decode already waits."""
    want, plain = case.twin(window), case.twin(window, torch.bfloat16)
    num, num_kv = len(want), case.kv.shape[2]
    positions = case.spans.positions[:num, None].long()
    page = case.pages[case.spans.rows[:num, None].long(), positions // 128].long()
    lines = (page * num_kv + torch.arange(num_kv, device="cuda")) * 128 + positions % 128
    places = lines.flatten()[:, None] * 64 + torch.arange(64, device="cuda")
    places = torch.stack([places, places + case.kv[0].numel()]).flatten()
    kv, q = case.kv.clone(), case.q.clone()
    own = kv.view(-1)[places]
    blocks = q.numel() // 512
    assert q.numel() % 512 == len(own) % 512 == 0
    for _ in range(3):
        kv.view(-1)[places] = torch.nan
        q.fill_(torch.nan)
        out = torch.full((len(q), q[0].numel()), torch.nan, dtype=torch.bfloat16, device="cuda")
        at = places.to(torch.int32)
        launch(_write_late, (blocks + len(own) // 512,), case.q, q, blocks, own, at, kv, SIZE=512)
        variant.decode(q, kv, case.pages, case.spans, case.sinks, window, out)
        close(out[:num], want, plain)


@each
def test_the_kernel_before_writes_late(window, variant):
    written_late(decodes([1, 128, 129, 1000, 300]), window, variant)


def test_the_twin_decides_what_is_wrong():
    """One key too few or too many, the own key lost or read twice, results left behind or a counter: each is rejected."""
    short, long = decodes(EDGES), decodes([6000, 3])
    small = {"MERGED": 2, "STAGES": 2}  # quick to compile
    for old, new, case, window, options in (
        ("tl.maximum(end - WINDOW, 0)", "tl.maximum(end - WINDOW + 1, 0)", short, 128, {}),
        ("tl.maximum(end - WINDOW, 0)", "tl.maximum(end - WINDOW - 1, 0)", short, 128, {}),
        ("limit = tl.minimum(last, end - 1)", "limit = tl.minimum(last, end)", short, None, small),
        ("limit = tl.minimum(last, end - 1)", "limit = tl.minimum(last, end - 2)", short, None, small),
        ("score = tl.where(own,", "score = tl.where(own & False,", short, None, small),
        ("tl.store(counter, 0)", "pass", long, None, {"SPIN": False, **small}),
    ):
        check(case, window, Variant("right", attention_decode_early, options))
        with pytest.raises(AssertionError):
            check(case, window, Variant("wrong", broken(attention_decode_early, old, new), options))
    hasty = broken(attention_decode_early, "    gdc_wait()\n", "")
    for window in (None, 128):
        with pytest.raises(AssertionError):
            written_late(decodes([1, 128, 129, 1000, 300]), window, Variant("hasty", hasty))
