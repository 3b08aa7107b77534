"""Runs plans on a Hopper GPU: CUDA graphs of fixed sizes over state that stays on the device.

The host writes one array a step (engine/step.py) into pinned memory and reads tokens from there a step later
(engine/mailbox.py). A drawn token feeds the next step where it is. Bodies and heads are graphs apart; decodes that need nothing
between the two are one. Plans above the largest graph run eagerly at their exact size. Nothing allocates after start.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import torch

from simplellm.config import PAGE, EngineConfig
from simplellm.engine.gpu_rows import GpuRows, LogprobTensors
from simplellm.engine.mailbox import Mailbox
from simplellm.engine.runner import Results, score
from simplellm.engine.scheduler import SCORED_PER_STEP
from simplellm.engine.step import StepShape, StepSpans, StepViews, draws_of, fill
from simplellm.errors import EngineError
from simplellm.kernels.hopper.clear import clear_tails
from simplellm.kernels.hopper.mailbox import SLOTS
from simplellm.model.gpt_oss import Batch, GptOss
from simplellm.request import Logprob, PageUpdate, Plan, Sampling, Span

log = logging.getLogger("simplellm")

DECODE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # tokens of graphs for decodes alone; heads have the same sizes
MIXED_SIZES = (64, 256, 1024, 2048)  # tokens of graphs for any mix
HEAD_ROWS = 256  # rows whose logits exist at a time: 206 MB; also the most that have body and head in one graph
_capturing = Lock()  # PyTorch captures one graph at a time
STEP_TIMEOUT = 120.0  # seconds after which a step counts as hung; the longest real one takes about two


@dataclass(slots=True)
class Pending:
    """A plan on its way."""

    plan: Plan
    drawing: Sequence[Span]  # spans that draw a token, in the order of the hidden states
    scoring: Sequence[Span]
    done: torch.cuda.Event
    size: int | None = None  # of the graph of body and head, while it waits for the head
    number: int = 0  # of the step in the mailbox
    logprobs: tuple[torch.Tensor, torch.Tensor] | None = None  # values [drawing, 21], ids [drawing, 20], pinned
    samplings: list[Sampling] = field(default_factory=list)  # of `drawing`, with logprobs: a row may soon be another's
    skipped: Set[int] = frozenset()
    scores: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)  # by rid


class GpuRunner:
    """The model with its KV pages and graphs on one Hopper GPU."""

    def __init__(self, model: GptOss, num_pages: int, options: EngineConfig, max_context: int):
        assert options.lag < SLOTS
        self.model, self.max_running = model, options.max_running
        self.device = device = model.weights.embed.device
        self.kv = model.new_kv(num_pages)
        self.kv[:, :, 0] = 0  # the dummy page
        num_rows, vocab = options.max_running, model.config.vocab_size

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tables = zeros(2, num_rows, (max_context + PAGE - 1) // PAGE)  # of full layers, of window layers
        self.newest = zeros(num_rows)
        self.rows = GpuRows(num_rows, options.penalty_slots, vocab, device)
        self.max_outputs = num_rows + SCORED_PER_STEP
        mixed = self._shape(max(options.idle_budget, MIXED_SIZES[-1]), chunks=True)
        self.mailbox = Mailbox(max(mixed.size, self._shape(num_rows, chunks=False).size), num_rows, device)
        self.hidden = zeros(self.max_outputs, model.config.hidden_size, dtype=torch.bfloat16)
        self.tokens = zeros(num_rows)
        self.logprobs = LogprobTensors.empty(num_rows, device)
        self.samplings = [Sampling()] * num_rows  # of the rows' requests, after the newest body
        self.bodies: dict[tuple[int, bool], tuple[StepShape, Callable[[], None]]] = {}  # by tokens, with chunks
        self.heads: dict[tuple[int, bool], Callable[[], None]] = {}  # by rows, with all settings
        self.wholes: dict[int, Callable[[], None]] = {}  # body and head, by decodes; temperature and seed only
        decodes = [size for size in DECODE_SIZES if size < num_rows] + [num_rows]
        self.sizes = {False: decodes, True: list(MIXED_SIZES)}  # by chunks
        self.hung = False
        self._compiling = device.type == "meta"
        self._pool = None if self._compiling else torch.cuda.graph_pool_handle()
        self._capture(options.idle_budget)

    def body(self, plan: Plan) -> Pending:
        """Apply the plan's changes and run its spans through the layers; or leave that to `head`, if one graph can do both.

        It can unless a row has settings that need the full draw, or had a mask: then the host may have to make one meanwhile.
        """
        if plan.row_starts:
            self.rows.start(plan.row_starts)
            for start in plan.row_starts:
                self.samplings[start.row] = start.sampling
        if plan.page_updates:
            self._update_pages(plan.page_updates)
        step = StepSpans.of(plan)
        size = self._pick(step.num_tokens, step.num_decodes < len(step.spans))
        shape, run = self._eager(step.num_tokens) if size is None else self.bodies[size]
        fill(shape, self.mailbox.claim(), step)
        pending = Pending(plan, step.drawing, step.scoring, torch.cuda.Event())
        if step.drawing_decodes and shape.tokens in self.wholes and not self.rows.needs_full(s.row for s in step.spans):
            pending.size = shape.tokens
        else:
            self._launch(pending, run)
        return pending

    def head(self, pending: Pending, masks: Mapping[int, bytes] | None = None, skip: Set[int] = frozenset()) -> None:
        """Draw each drawing span's token, but for rids in `skip`. masks: by rid, as loop.Mask."""
        pending.skipped = skip
        if pending.size is not None and not masks and not skip:
            self._launch(pending, self.wholes[pending.size])
        else:
            if pending.size is not None:
                self._launch(pending, self.bodies[pending.size, False][1])
            with torch.inference_mode():
                if pending.drawing:
                    self._draw(pending, masks or {})
                if pending.scoring:
                    self._score(pending)
        pending.done.record()

    def results(self, pending: Pending) -> Results:
        """Wait for the plan's tokens. EngineError if the GPU does not finish the step."""
        deadline = time.monotonic() + STEP_TIMEOUT
        while not pending.done.query():
            if time.monotonic() > deadline:
                self.hung = True
                raise EngineError(
                    f"the GPU has not finished a step of {pending.plan.num_tokens} tokens in {STEP_TIMEOUT:.0f} s"
                )
            time.sleep(2e-5)
        drawn = self.mailbox.tokens(pending.number, len(pending.drawing)) if pending.drawing else []
        self.mailbox.release(pending.number)
        tokens = dict(zip([span.rid for span in pending.drawing], drawn, strict=True))
        for rid in pending.skipped:
            tokens.pop(rid, None)
        return Results(tokens, self._logprobs(pending, tokens), pending.scores)

    def close(self) -> None:
        """Let go of graphs, weights and pages. A hung or lost GPU is left alone: waiting for it would never end."""
        if self.hung:
            return
        with suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
        for graphs in (self.bodies, self.heads, self.wholes):
            graphs.clear()
        del self.model, self.kv, self.rows, self.hidden, self.mailbox
        with suppress(RuntimeError):
            torch.cuda.empty_cache()  # else PyTorch keeps the memory, and the next engine finds none free

    # --- the device's side: what graphs hold -------------------------------------------------------------------------

    def _run_body(self, shape: StepShape) -> None:
        self.mailbox.receive(shape.size)
        self.hidden[: shape.outputs].copy_(self._run_layers(shape))

    def _run_head(self, num_rows: int, full: bool) -> None:
        draws = draws_of(self.mailbox.step, num_rows)
        for at in range(0, num_rows, HEAD_ROWS):
            part = slice(at, min(at + HEAD_ROWS, num_rows))
            self._run_draw(self.hidden[part], draws[part], part, full)
        self.mailbox.send(self.tokens[:num_rows])

    def _run_whole(self, shape: StepShape) -> None:
        self.mailbox.receive(shape.size)
        part = slice(shape.tokens)
        self._run_draw(self._run_layers(shape), draws_of(self.mailbox.step, shape.tokens), part, False)
        self.mailbox.send(self.tokens[part])

    def _run_layers(self, shape: StepShape) -> torch.Tensor:
        views = StepViews.of(shape, self.mailbox.step)
        full, window = self.tables
        work = views.spans.work
        assert work is not None
        if shape.tiles:
            for pages in (full, window):
                clear_tails(self.kv, pages, work.tiles, work.counts)
        return self.model.body(Batch(views.tokens, self.newest, views.spans, full, window, views.outputs), self.kv)

    def _run_draw(self, hidden: torch.Tensor, draws: torch.Tensor, part: slice, full: bool) -> None:
        logits = self.model.head(hidden)
        self.rows.draw(logits, draws, self.tokens[part], self.newest, self.logprobs.rows(part), full)

    def _capture(self, most_tokens: int) -> None:
        """Run each size once, which compiles it, then record it: the largest first, so that the others fit in its memory."""
        began = time.monotonic()
        shapes = [self._shape(size, chunks) for chunks, sizes in self.sizes.items() for size in sizes]
        shapes.sort(key=lambda shape: shape.tokens, reverse=True)
        heads = [(size, full) for full in (True, False) for size in reversed(self.sizes[False])]
        with torch.inference_mode():
            for shape in shapes:
                self._warm(shape)
            self.mailbox.step.fill_(-1)  # draws of no row
            for head in heads:
                self._run_head(*head)
            for shape in shapes:
                self.bodies[shape.tokens, shape.tiles > 0] = shape, self._record(partial(self._run_body, shape))
            for head in heads:
                self.heads[head] = self._record(partial(self._run_head, *head))
            for shape in shapes:
                if not shape.tiles and shape.tokens <= HEAD_ROWS:
                    self.wholes[shape.tokens] = self._record(partial(self._run_whole, shape))
            if most_tokens > MIXED_SIZES[-1]:  # last: PyTorch gives what it keeps for eager steps back at each capture
                self._warm(self._shape(most_tokens, chunks=True))
        num_graphs = len(self.bodies) + len(self.heads) + len(self.wholes)
        log.info("%d graphs in %.1f s", num_graphs, time.monotonic() - began)

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        """The kernels of `run` as a graph; all graphs share their memory, since only one runs at a time."""
        if self._compiling:
            return run
        graph = torch.cuda.CUDAGraph()
        with _capturing, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()  # other engines of this process may be using their GPU meanwhile
        return graph.replay

    def _warm(self, shape: StepShape) -> None:
        """Run a body on one token, or a chunk of two, of row 0, whose pages are the dummy."""
        span = Span(0, 0, 0, (0, 0) if shape.tiles else (0,), True)
        fill(shape, self.mailbox.claim(), StepSpans.of(Plan(0, (span,))))
        self.mailbox.launch(partial(self._run_body, shape))

    # --- the host's side ---------------------------------------------------------------------------------------------

    def _shape(self, num_tokens: int, chunks: bool) -> StepShape:
        return StepShape.of(num_tokens, self.max_outputs, self.max_running, chunks)

    def _pick(self, num_tokens: int, chunks: bool) -> tuple[int, bool] | None:
        """The smallest graph that holds the step, or None."""
        sizes = self.sizes[chunks]
        at = bisect_left(sizes, num_tokens)
        return (sizes[at], chunks) if at < len(sizes) else None

    def _eager(self, num_tokens: int) -> tuple[StepShape, Callable[[], None]]:
        shape = self._shape(num_tokens, chunks=True)
        return shape, partial(self._run_body, shape)

    def _launch(self, pending: Pending, run: Callable[[], None]) -> None:
        with torch.inference_mode():
            pending.number = self.mailbox.launch(run)

    def _update_pages(self, updates: tuple[PageUpdate, ...]) -> None:
        _, num_rows, width = self.tables.shape
        newest = {(u.window * num_rows + u.row) * width + u.index: u.page for u in updates}  # of two for one entry the later
        places, values = self._send(list(newest), torch.int64), self._send(list(newest.values()), torch.int32)
        self.tables.view(-1).index_copy_(0, places, values)

    def _send(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self.device, non_blocking=True)

    def _draw(self, pending: Pending, masks: Mapping[int, bytes]) -> None:
        spans, skip = pending.drawing, pending.skipped
        if skip:
            draws = [(-1 if span.rid in skip else span.row, span.end) for span in spans]
            draws_of(self.mailbox.step, len(spans)).copy_(self._send(draws, torch.int32))
        self.rows.masks({span.row: masks[span.rid] for span in spans if span.rid in masks} if masks else {})
        rows = [span.row for span in spans]
        picked = self._pick(len(spans), chunks=False)
        assert picked is not None, "more spans than rows"
        self.heads[picked[0], self.rows.needs_full(rows)]()
        if self.rows.needs_logprobs(rows):
            values, ids = self.logprobs.rows(slice(len(spans)))
            pending.samplings = [self.samplings[row] for row in rows]
            pending.logprobs = self._fetch(values), self._fetch(ids)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def _logprobs(self, pending: Pending, tokens: Mapping[int, int]) -> dict[int, Logprob]:
        if pending.logprobs is None:
            return {}
        values, ids = (part.tolist() for part in pending.logprobs)
        found = {}
        for i, (span, sampling) in enumerate(zip(pending.drawing, pending.samplings, strict=True)):
            if sampling.logprobs and span.rid in tokens:
                top = tuple(zip(ids[i], values[i][1:], strict=True))[: sampling.top_logprobs]
                found[span.rid] = Logprob(tokens[span.rid], values[i][0], top)
        return found

    def _score(self, pending: Pending) -> None:
        """Prompt log-probabilities: rare, so eagerly, and the host waits."""
        at = len(pending.drawing)
        for span in pending.scoring:
            hidden = self.hidden[at : at + len(span.targets)]
            pending.scores[span.rid] = score(self.model, hidden, span.targets, self.samplings[span.row].prompt_logprobs or 0)
            at += len(span.targets)
