"""A plan as one array: every key of every decode in exactly one piece, every chunk token in one tile, all at its place."""

import numpy as np
import pytest
import torch

from simplellm.config import PAGE
from simplellm.engine.step import PIECES, StepShape, StepSpans, StepViews, cut_decodes, draws_of, fill
from simplellm.kernels.spans import TILE
from simplellm.request import ON_DEVICE, Plan, Span


def pack(spans: list[Span], shape: StepShape) -> tuple[torch.Tensor, StepSpans]:
    array = np.full(shape.size, -7, dtype=np.int32)
    step = StepSpans.of(Plan(0, tuple(spans)))
    fill(shape, array, step)
    return torch.from_numpy(array), step


def unpack(spans: list[Span], shape: StepShape) -> tuple[StepViews, StepSpans]:
    array, step = pack(spans, shape)
    return StepViews.of(shape, array), step


SPANS = [
    Span(1, 5, 0, tuple(range(100, 700)), False),
    Span(2, 3, 999, (ON_DEVICE,), True),
    Span(3, 0, 130, (8, 9, 10), True, (9, 10)),
    Span(4, 2, 0, (77,), True),
]


def test_every_token_is_at_its_place() -> None:
    views, step = unpack(SPANS, StepShape.of(1024, 1024, 64, chunks=True))
    assert [span.rid for span in step.spans] == [2, 4, 1, 3]
    assert (step.num_tokens, step.num_decodes, step.drawing_decodes) == (605, 2, False)
    assert [span.rid for span in step.drawing] == [2, 4, 3] and [span.rid for span in step.scoring] == [3]
    assert views.spans.work is not None
    assert views.spans.work.counts[:5].tolist() == [605, 2, 9, 5, 5]
    assert views.tokens[:605].tolist() == [ON_DEVICE, 77, *range(100, 700), 8, 9, 10]
    assert views.spans.rows[:605].tolist() == [3, 2, *[5] * 600, *[0] * 3]
    assert views.spans.positions[:605].tolist() == [999, 0, *range(600), 130, 131, 132]
    assert views.outputs[:5].tolist() == [0, 1, 604, 602, 603]  # what draws, then what is scored
    assert not any(part[605:].any() for part in (views.tokens, views.spans.rows, views.spans.positions))
    tiles = views.spans.work.tiles[:5].tolist()
    assert sorted(tiles) == [[2, TILE, 0, 5], [194, TILE, 192, 5], [386, TILE, 384, 5], [578, 24, 576, 5], [602, 3, 130, 0]]
    assert [tile[2] + tile[1] for tile in tiles] == sorted((tile[2] + tile[1] for tile in tiles), reverse=True)


@pytest.mark.parametrize("shape", [StepShape.of(1024, 1024, 64, chunks=True), StepShape.of(605, 70, 64, chunks=True)], ids=str)
def test_draws_are_where_every_head_reads_them(shape: StepShape) -> None:
    """Row and position of each token to come; nothing beyond, as far as a head of all rows looks."""
    draws = draws_of(pack(SPANS, shape)[0], 64)
    assert draws[:3].tolist() == [[3, 1000], [2, 1], [0, 133]] and (draws[3:] == -1).all()


def test_decodes_that_all_draw() -> None:
    """Token i is output i and draw i, and the array is short."""
    spans = [Span(i, 9 - i, 200 * i, (ON_DEVICE if i % 2 else 50 + i,), True) for i in range(5)]
    shape = StepShape.of(8, 1024, 1024, chunks=False)
    array, step = pack(spans, shape)
    assert step.drawing_decodes and list(step.drawing) == spans and not step.scoring and shape.size < 1000
    views = StepViews.of(shape, array)
    assert views.spans.work is not None and views.spans.work.counts[:5].tolist() == [5, 5, 19, 0, 5]
    assert views.tokens.tolist() == [50, -1, 52, -1, 54, 0, 0, 0] and views.outputs.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert views.spans.rows.tolist() == [9, 8, 7, 6, 5, 0, 0, 0]
    assert draws_of(array, 8).tolist() == [[9 - i, 200 * i + 1] for i in range(5)] + [[-1, -1]] * 3
    for other in (spans[1]._replace(sample=False), spans[1]._replace(targets=(3,)), spans[1]._replace(tokens=(3, 4))):
        assert not StepSpans.of(Plan(0, (spans[0], other))).drawing_decodes


@pytest.mark.parametrize("chunks", [False, True])
def test_parts_begin_at_16_bytes_and_do_not_overlap(chunks: bool) -> None:
    for tokens in (1, 2, 4, 64, 605):
        shape = StepShape.of(tokens, 70, 64, chunks)
        array = torch.zeros(shape.size, dtype=torch.int32)
        for part in shape.parts(array):
            assert part.storage_offset() % 4 == 0
            part += 1
        assert array.max() == 1 and shape.size % 4 == 0


@pytest.mark.parametrize("positions", [[0], [127], [128], [131071], [0] * 1024, [131071] * 40 + [5] * 900, [999, 131071, 3]])
def test_pieces_cover_every_page_once(positions: list[int]) -> None:
    rows = np.arange(len(positions), dtype=np.int32)[::-1]
    items = cut_decodes(rows, np.array(positions, dtype=np.int32))
    assert len(items) <= len(positions) + PIECES
    for token, position in enumerate(positions):
        own = items[items[:, 0] == token]
        assert own[:, 3].tolist() == list(range(len(own))) and set(own[:, 4]) == {len(own)}
        assert own[0, 1] == 0 and own[-1, 2] == position // PAGE + 1
        assert (own[1:, 1] == own[:-1, 2]).all() and (own[:, 1] < own[:, 2]).all()
        sizes = own[:, 2] - own[:, 1]
        assert sizes.max() - sizes.min() <= 1
        assert (own[:, 6] == rows[token]).all() and (own[:, 7] == position + 1).all()
    slots = items[:, 5] + items[:, 3]
    assert len(set(slots)) == len(items) and slots.max() < len(items)


def test_a_step_without_decodes_or_without_chunks() -> None:
    views, _ = unpack(SPANS[:1], StepShape.of(600, 8, 1, chunks=True))
    assert views.spans.work is not None and views.spans.work.counts[:5].tolist() == [600, 0, 0, 4, 0]
    views, _ = unpack(SPANS[1:2], StepShape.of(1, 1, 1, chunks=False))
    assert views.spans.work is not None and views.spans.work.tiles.shape == (0, 4)
