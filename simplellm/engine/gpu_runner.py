"""Runs plans on a Hopper GPU: CUDA graphs of fixed sizes, bodies and heads apart, over state that stays on the device.

The host sends one array a step (engine/step.py) and reads tokens back over pinned memory, a step later. A drawn token feeds
the next step where it is. Plans above the largest graph run eagerly at their exact size. Nothing allocates after start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from simplellm.config import PAGE, EngineConfig
from simplellm.engine.gpu_rows import GpuRows, LogprobTensors
from simplellm.engine.runner import Results, score
from simplellm.engine.scheduler import SCORED_PER_STEP
from simplellm.engine.step import StepShape, StepViews, fill, sort_spans
from simplellm.errors import EngineError
from simplellm.kernels.hopper.clear import clear_tails
from simplellm.model.gpt_oss import Batch, GptOss
from simplellm.request import Logprob, PageUpdate, Plan, Sampling, Span

log = logging.getLogger("simplellm")

DECODE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # tokens of graphs for decodes alone; heads have the same sizes
MIXED_SIZES = (64, 256, 1024, 2048)  # tokens of graphs for any mix
HEAD_ROWS = 256  # rows whose logits exist at a time: 206 MB
_capturing = Lock()  # PyTorch captures one graph at a time
STEP_TIMEOUT = 120.0  # seconds after which a step counts as hung; the longest real one takes about two


@dataclass(slots=True)
class Pending:
    """A plan on its way."""

    plan: Plan
    drawing: list[Span]  # spans that draw a token, in the order of the hidden states
    scoring: list[Span]
    done: torch.cuda.Event
    tokens: torch.Tensor | None = None  # [drawing] int32, pinned
    logprobs: tuple[torch.Tensor, torch.Tensor] | None = None  # values [drawing, 21], ids [drawing, 20], pinned
    samplings: list[Sampling] = field(default_factory=list)  # of `drawing`, with logprobs: a row may soon be another's
    skipped: Set[int] = frozenset()
    scores: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)  # by rid


class GpuRunner:
    """The model with its KV pages and graphs on one Hopper GPU."""

    def __init__(self, model: GptOss, num_pages: int, options: EngineConfig, max_context: int):
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
        self.step = zeros(max(mixed.size, self._shape(num_rows, chunks=False).size))
        self.hidden = zeros(self.max_outputs, model.config.hidden_size, dtype=torch.bfloat16)
        self.draws, self.tokens = zeros(num_rows, 2), zeros(num_rows)
        self.logprobs = LogprobTensors.empty(num_rows, device)
        self.samplings = [Sampling()] * num_rows  # of the rows' requests, after the newest body
        self.bodies: dict[tuple[int, bool], tuple[StepShape, Callable[[], None]]] = {}  # by tokens, with chunks
        self.heads: dict[tuple[int, bool], Callable[[], None]] = {}  # by rows, with all settings
        self.hung = False
        self._compiling = device.type == "meta"
        self._pool = None if self._compiling else torch.cuda.graph_pool_handle()
        self._capture(options.idle_budget)

    def body(self, plan: Plan) -> Pending:
        """Apply the plan's changes and run its spans through the layers."""
        if plan.row_starts:
            self.rows.start(plan.row_starts)
            for start in plan.row_starts:
                self.samplings[start.row] = start.sampling
        if plan.page_updates:
            self._update_pages(plan.page_updates)
        spans, num_decodes = sort_spans(plan)
        size = self._pick(plan.num_tokens, num_decodes < len(spans))
        shape = self._shape(plan.num_tokens, True) if size is None else self.bodies[size][0]
        host = torch.empty(shape.size, dtype=torch.int32, pin_memory=True)
        fill(shape, host, spans, num_decodes)
        self.step[: shape.size].copy_(host, non_blocking=True)
        with torch.inference_mode():
            if size is None:
                self._run_body(shape)
            else:
                self.bodies[size][1]()
        drawing, scoring = [span for span in spans if span.sample], [span for span in spans if span.targets]
        return Pending(plan, drawing, scoring, torch.cuda.Event())

    def head(self, pending: Pending, masks: Mapping[int, bytes] | None = None, skip: Set[int] = frozenset()) -> None:
        """Draw each drawing span's token, but for rids in `skip`. masks: by rid, as loop.Mask."""
        pending.skipped = skip
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
        if pending.tokens is None:
            return Results({}, {}, pending.scores)
        tokens = dict(zip((span.rid for span in pending.drawing), pending.tokens.tolist(), strict=False))
        for rid in pending.skipped:
            tokens.pop(rid, None)
        return Results(tokens, self._logprobs(pending, tokens), pending.scores)

    def close(self) -> None:
        """Let go of graphs, weights and pages. A hung or lost GPU is left alone: waiting for it would never end."""
        if self.hung:
            return
        with suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
        self.bodies.clear()
        self.heads.clear()
        del self.model, self.kv, self.rows, self.hidden, self.step
        with suppress(RuntimeError):
            torch.cuda.empty_cache()  # else PyTorch keeps the memory, and the next engine finds none free

    # --- the device's side: what graphs hold -------------------------------------------------------------------------

    def _run_body(self, shape: StepShape) -> None:
        views = StepViews.of(shape, self.step)
        full, window = self.tables
        work = views.spans.work
        assert work is not None
        if shape.tiles:
            for pages in (full, window):
                clear_tails(self.kv, pages, work.tiles, work.counts)
        batch = Batch(views.tokens, self.newest, views.spans, full, window, views.outputs)
        self.hidden[: shape.outputs].copy_(self.model.body(batch, self.kv))

    def _run_head(self, num_rows: int, full: bool) -> None:
        for at in range(0, num_rows, HEAD_ROWS):
            part = slice(at, min(at + HEAD_ROWS, num_rows))
            logits = self.model.head(self.hidden[part])
            self.rows.draw(logits, self.draws[part], self.tokens[part], self.newest, self.logprobs.rows(part), full)

    def _capture(self, most_tokens: int) -> None:
        """Run each size once (which compiles it), then record it: the largest first, so that the others fit in its memory."""
        began = time.monotonic()
        decode_sizes = [size for size in DECODE_SIZES if size < self.max_running] + [self.max_running]
        bodies = [self._shape(size, chunks=True) for size in MIXED_SIZES] + [self._shape(n, chunks=False) for n in decode_sizes]
        bodies.sort(key=lambda shape: shape.tokens, reverse=True)
        self.draws.fill_(-1)
        with torch.inference_mode():
            for shape in bodies:
                self._warm(shape)
                self.bodies[shape.tokens, shape.tiles > 0] = shape, self._record(partial(self._run_body, shape))
            for full in (True, False):
                for size in reversed(decode_sizes):
                    self._run_head(size, full)
                    self.heads[size, full] = self._record(partial(self._run_head, size, full))
            if most_tokens > MIXED_SIZES[-1]:  # last: PyTorch gives what it keeps for eager steps back at each capture
                self._warm(self._shape(most_tokens, chunks=True))
        log.info("%d graphs in %.1f s", len(self.bodies) + len(self.heads), time.monotonic() - began)

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
        host = torch.zeros(shape.size, dtype=torch.int32)
        span = Span(0, 0, 0, (0, 0) if shape.tiles else (0,), True)
        fill(shape, host, [span], 0 if shape.tiles else 1)
        self.step[: shape.size].copy_(host)
        self._run_body(shape)

    # --- the host's side ---------------------------------------------------------------------------------------------

    def _shape(self, num_tokens: int, chunks: bool) -> StepShape:
        return StepShape.of(num_tokens, self.max_outputs, self.max_running, chunks)

    def _pick(self, num_tokens: int, chunks: bool) -> tuple[int, bool] | None:
        """The smallest graph that holds the step, or None."""
        sizes = [size for size, mixed in self.bodies if mixed == chunks and size >= num_tokens]
        return (min(sizes), chunks) if sizes else None

    def _update_pages(self, updates: tuple[PageUpdate, ...]) -> None:
        _, num_rows, width = self.tables.shape
        newest = {(u.window * num_rows + u.row) * width + u.index: u.page for u in updates}  # of two for one entry the later
        places, values = self._send(list(newest), torch.int64), self._send(list(newest.values()), torch.int32)
        self.tables.view(-1).index_copy_(0, places, values)

    def _send(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self.device, non_blocking=True)

    def _draw(self, pending: Pending, masks: Mapping[int, bytes]) -> None:
        spans, skip = pending.drawing, pending.skipped
        size = min(size for size, _ in self.heads if size >= len(spans))
        draws = torch.full((size, 2), -1, dtype=torch.int32, pin_memory=True)
        draws[: len(spans)] = torch.tensor([(-1 if span.rid in skip else span.row, span.end) for span in spans])
        self.draws[:size].copy_(draws, non_blocking=True)
        self.rows.masks({span.row: masks[span.rid] for span in spans if span.rid in masks})
        rows = [span.row for span in spans]
        self.heads[size, self.rows.needs_full(rows)]()
        pending.tokens = self._fetch(self.tokens[: len(spans)])
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
