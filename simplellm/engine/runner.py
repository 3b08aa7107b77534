"""Runs plans on the device: page tables, rows' settings and newest tokens live here, the host sends what changed.

`body` turns a plan into hidden states, `head` into tokens that stay on the device (the next plan may name them ON_DEVICE),
`results` brings them to the host. In this order per plan, plans in order; two plans may overlap (lag 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch

from simplellm import kernels
from simplellm.config import PAGE
from simplellm.engine.rows import Rows
from simplellm.model.gpt_oss import Batch, GptOss
from simplellm.request import ON_DEVICE, Logprob, Plan, Span

HEAD_ROWS = 64  # rows whose logits exist at a time: 64 x 201,088 x 4 B = 51 MB


@dataclass(slots=True)
class Pending:
    """A plan on its way: what its body left for the head, then what the head left for the host."""

    plan: Plan
    drawing: tuple[Span, ...]  # spans that draw a token
    scoring: tuple[Span, ...]  # spans whose prompt tokens get log-probabilities
    hidden: torch.Tensor  # [drawing, then the scoring spans' tokens; H]
    tokens: torch.Tensor | None = None  # [drawing]
    logprobs: dict[int, Logprob] = field(default_factory=dict)  # by rid
    scores: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)  # by rid

    def leave_out(self, rids: Set[int]) -> None:
        """These draw no token after all."""
        keep = [i for i, span in enumerate(self.drawing) if span.rid not in rids]
        self.hidden = torch.cat([self.hidden[keep], self.hidden[len(self.drawing) :]])
        self.drawing = tuple(self.drawing[i] for i in keep)


@dataclass(frozen=True, slots=True)
class Results:
    """What the host learns of a plan, by rid: drawn tokens, their log-probabilities, prompt tokens' ones."""

    tokens: dict[int, int]
    logprobs: dict[int, Logprob]
    scores: dict[int, tuple[Logprob, ...]]


class Runner:
    """The model with its KV pages on one device."""

    def __init__(self, model: GptOss, num_pages: int, max_running: int, max_context: int, penalty_slots: int):
        self.model = model
        self.device = model.weights.embed.device
        self.kv = model.new_kv(num_pages)
        shape = (max_running, (max_context + PAGE - 1) // PAGE)
        self.full_table = torch.zeros(shape, dtype=torch.int32, device=self.device)  # 0 is the dummy page
        self.window_table = torch.zeros_like(self.full_table)
        self.newest = torch.zeros(max_running, dtype=torch.int64, device=self.device)
        self.rows = Rows(max_running, penalty_slots, model.config.vocab_size, self.device)

    def body(self, plan: Plan) -> Pending:
        """Apply the plan's changes and run its spans through the layers."""
        for start in plan.row_starts:
            self.rows.start(start)
        for update in plan.page_updates:
            table = self.window_table if update.window else self.full_table
            table[update.row, update.index] = update.page
        drawing = tuple(span for span in plan.spans if span.sample)
        scoring = tuple(span for span in plan.spans if span.targets)
        with torch.inference_mode():
            hidden = self.model.body(self._batch(plan), self.kv)
        return Pending(plan, drawing, scoring, hidden)

    def head(self, pending: Pending, masks: Mapping[int, bytes] | None = None, skip: Set[int] = frozenset()) -> None:
        """Draw each drawing span's token, but for rids in `skip`. masks: by rid, as loop.Mask."""
        with torch.inference_mode():
            if skip:
                pending.leave_out(skip)
            parts = [
                self._draw(pending, slice(at, at + HEAD_ROWS), masks or {}) for at in range(0, len(pending.drawing), HEAD_ROWS)
            ]
            pending.tokens = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
            self._score(pending)

    def results(self, pending: Pending) -> Results:
        """Wait for the plan's tokens."""
        assert pending.tokens is not None, "results before head"
        tokens = {span.rid: token for span, token in zip(pending.drawing, pending.tokens.tolist(), strict=True)}
        return Results(tokens, pending.logprobs, pending.scores)

    def close(self) -> None:
        """Let go of weights and pages."""
        del self.model, self.kv
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # else PyTorch keeps the memory, and the next engine finds none free

    def _batch(self, plan: Plan) -> Batch:
        spans = plan.spans
        lengths = [len(span.tokens) for span in spans]
        span_rows = self._tensor([span.row for span in spans])
        rows = span_rows.repeat_interleave(self._tensor(lengths))
        tokens = self._tensor([token for span in spans for token in span.tokens])
        positions = self._tensor([p for span in spans for p in range(span.start, span.end)])
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        outputs = [end - 1 for span, end in zip(spans, offsets[1:], strict=True) if span.sample]
        for span, begin in zip(spans, offsets, strict=False):
            outputs.extend(range(begin, begin + len(span.targets)))
        num_pages = (max(span.end for span in spans) + PAGE - 1) // PAGE
        slots = [table[rows, positions // PAGE] * PAGE + positions % PAGE for table in (self.full_table, self.window_table)]
        return Batch(
            tokens=torch.where(tokens == ON_DEVICE, self.newest[rows], tokens),
            positions=positions,
            span_offsets=self._tensor(offsets),
            span_starts=self._tensor([span.start for span in spans]),
            full_pages=self.full_table[span_rows, :num_pages],
            window_pages=self.window_table[span_rows, :num_pages],
            full_slots=slots[0],
            window_slots=slots[1],
            outputs=self._tensor(outputs),
        )

    def _draw(self, pending: Pending, part: slice, masks: Mapping[int, bytes]) -> torch.Tensor:
        spans = pending.drawing[part]
        raw = self.model.head(pending.hidden[part][: len(spans)])
        rows = self._tensor([span.row for span in spans])
        positions = self._tensor([span.end for span in spans])
        logits = self.rows.adjust(raw, spans, masks)
        tokens = kernels.sample(logits, *self.rows.settings(rows), positions)
        self.newest[rows] = tokens
        self.rows.count(spans, tokens)
        for i, span in enumerate(spans):
            sampling = self.rows.sampling[span.row]
            if sampling.logprobs:
                top = kernels.logprobs(raw[i : i + 1], tokens[i : i + 1], sampling.top_logprobs)
                pending.logprobs[span.rid] = _logprobs(tokens[i : i + 1], *top)[0]
        return tokens

    def _score(self, pending: Pending) -> None:
        at = len(pending.drawing)
        for span in pending.scoring:
            num = len(span.targets)
            k = self.rows.sampling[span.row].prompt_logprobs or 0
            scores: list[Logprob] = []
            for i in range(0, num, HEAD_ROWS):
                targets = self._tensor(span.targets[i : i + HEAD_ROWS])
                logits = self.model.head(pending.hidden[at + i : at + i + len(targets)])
                scores += _logprobs(targets, *kernels.logprobs(logits, targets, k))
            pending.scores[span.rid] = tuple(scores)
            at += num

    def _tensor(self, values: list[int] | tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _logprobs(tokens: torch.Tensor, own: torch.Tensor, ids: torch.Tensor, best: torch.Tensor) -> list[Logprob]:
    rows = zip(tokens.tolist(), own.tolist(), ids.tolist(), best.tolist(), strict=True)
    return [Logprob(token, value, tuple(zip(i, b, strict=True))) for token, value, i, b in rows]
