"""Chunk attention on the GPU against its twin: any start, any size, many at once, scores that overflow the frozen maximum."""

import random

import pytest
import torch

from tests.kernels.hopper.check import broken, close
from tests.kernels.hopper.work import Case

attention_chunk = pytest.importorskip("simplellm.kernels.hopper.attention_chunk")
attention_consumer = pytest.importorskip("simplellm.kernels.hopper.attention_consumer")
op = pytest.importorskip("simplellm.kernels.hopper.attention")

pytestmark = pytest.mark.gpu

LAYERS = [None, 128]  # the window
FRESH = [(0, 1), (0, 127), (0, 128), (0, 129), (0, 64), (0, 300)]
LATER = [(127, 130), (128, 64), (129, 257), (1000, 1), (0, 5), (384, 384), (2047, 200)]
MANY = [(random.Random(i).randrange(700), 1 + 13 * i % 70) for i in range(150)]


def chunks(places, **options):
    """(start, length) of each chunk; rows in reverse, so that no row is its span's number."""
    return Case.make([(len(places) - 1 - i, *place) for i, place in enumerate(places)], padding=3, **options)


def check(case, window, module=attention_chunk, tokens=None):
    want, plain = case.twin(window, torch.float32, tokens), case.twin(window, torch.bfloat16, tokens)
    out = torch.full((len(case.q), case.q[0].numel()), torch.nan, dtype=torch.bfloat16, device=case.q.device)
    module.chunk(case.q, case.kv, case.pages, case.spans, case.sinks, window, out)
    close(out[: len(want)] if tokens is None else out[tokens], want, plain)
    assert out[-3:].isnan().all(), "a padded token was written"


@pytest.mark.parametrize("window", LAYERS)
@pytest.mark.parametrize("places", [FRESH, LATER, MANY], ids=["fresh", "later", "many"])
def test_starts_and_sizes(places, window):
    check(chunks(places), window)


@pytest.mark.parametrize("window", LAYERS)
def test_one_kv_head(window):
    check(chunks(FRESH + LATER, num_kv=1), window)


def test_heavy_sinks_and_sharp_rows():
    check(chunks(LATER, sink=30.0), None)
    check(chunks([(0, 1500), (3000, 400)], sharp=4.0), None)


@pytest.mark.parametrize("place", [(0, 32_768), (122_800, 80), (122_879, 1)], ids=str)
def test_long(place):
    case = chunks([place])
    start, length = place
    tokens = torch.tensor(sorted({*random.Random(0).sample(range(length), min(length, 24)), 0, length - 1}))
    check(case, None, tokens=tokens.cuda())


def overflowing():
    """Keys of every sequence's first page are far above those on its diagonal."""
    case = chunks([(0, 700), (900, 300)], num_kv=1, sharp=20.0)
    case.kv[0, case.pages[:2, 0].long()] *= 10
    return case


def test_what_overflows_is_computed_again():
    check(overflowing(), None)
    only_first = broken(attention_chunk, "launch(_chunk, (num_sms(),), *args, redo, FROZEN=False, REDO=True, **sizes)", "pass")
    check(chunks(LATER, num_kv=1), None, only_first)
    with pytest.raises(AssertionError):
        check(overflowing(), None, only_first)


@pytest.mark.parametrize("window", LAYERS)
def test_decodes_and_chunks_of_a_step(window):
    lengths = [300, 1, 5000, 128]
    spans = [(i, length - 1, 1) for i, length in enumerate(lengths)] + [(4, 0, 500), (5, 700, 33), (6, 130, 1)]
    case = Case.make(spans, len(lengths), padding=5)
    out = op.attention(case.q, case.kv, case.pages, case.spans, case.sinks, window)
    close(out[:-5], case.twin(window), case.twin(window, torch.bfloat16))


@pytest.mark.parametrize(
    "old, new",
    [
        ("e[:, None][None, :, :] + WINDOW, s3", "e[:, None][None, :, :] + WINDOW + 1, s3"),
        ("gl.where(d >= e", "gl.where(d + 1 >= e"),
        ("inverse = 1.0 / (total + exp2(sink - m))", "inverse = 1.0 / total"),
    ],
)
def test_the_twin_decides_what_is_wrong(old, new):
    consumer = broken(attention_consumer, old, new)
    imports = "from simplellm.kernels.hopper.attention_consumer import"
    module = broken(attention_chunk, imports, f"from {consumer.__name__} import")
    case = chunks(FRESH + LATER, num_kv=1)
    check(case, 128)
    with pytest.raises(AssertionError):
        check(case, 128, module)
