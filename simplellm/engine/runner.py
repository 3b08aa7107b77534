"""Runs plans on the device: page tables, rows' settings and newest tokens live here, the host sends what changed.

`body` turns a plan into hidden states, `head` into tokens that stay on the device (the next plan may name them ON_DEVICE),
`results` brings them to the host. In this order per plan, plans in order; two plans may overlap (lag 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from simplellm import kernels
from simplellm.config import PAGE
from simplellm.engine.rows import Rows
from simplellm.kernels import Spans
from simplellm.model.gpt_oss import Batch, GptOss
from simplellm.request import Logprob, Plan, Span

SCORE_ROWS = 64  # rows whose logits exist at a time: 64 x 201,088 x 4 B = 51 MB


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
                self._draw(pending, slice(at, at + SCORE_ROWS), masks or {})
                for at in range(0, len(pending.drawing), SCORE_ROWS)
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
        offsets = [0]
        for span in spans:
            offsets.append(offsets[-1] + len(span.tokens))
        outputs = [end - 1 for span, end in zip(spans, offsets[1:], strict=True) if span.sample]
        for span, begin in zip(spans, offsets, strict=False):
            outputs.extend(range(begin, begin + len(span.targets)))
        return Batch(
            tokens=self._tensor([token for span in spans for token in span.tokens]),
            newest=self.newest,
            spans=Spans(
                rows=self._tensor([span.row for span in spans for _ in span.tokens]),
                positions=self._tensor([p for span in spans for p in range(span.start, span.end)]),
                offsets=self._tensor(offsets),
            ),
            full_pages=self.full_table,
            window_pages=self.window_table,
            outputs=self._tensor(outputs),
        )

    def _draw(self, pending: Pending, part: slice, masks: Mapping[int, bytes]) -> torch.Tensor:
        spans = pending.drawing[part]
        raw = self.model.head(pending.hidden[part][: len(spans)])
        rows = self._tensor([span.row for span in spans])
        positions = self._tensor([span.end for span in spans])
        logits = self.rows.adjust(raw, spans, masks)
        tokens = kernels.sample(logits, *self.rows.settings(rows), positions)
        self.newest[rows] = tokens.clamp(min=0)
        self.rows.count(spans, tokens)
        for i, span in enumerate(spans):
            sampling = self.rows.sampling[span.row]
            if sampling.logprobs and tokens[i] >= 0:
                top = kernels.logprobs(raw[i : i + 1], tokens[i : i + 1], sampling.top_logprobs)
                pending.logprobs[span.rid] = _logprobs(tokens[i : i + 1], *top)[0]
        return tokens

    def _score(self, pending: Pending) -> None:
        at = len(pending.drawing)
        for span in pending.scoring:
            hidden = pending.hidden[at : at + len(span.targets)]
            pending.scores[span.rid] = score(
                self.model, hidden, span.targets, self.rows.sampling[span.row].prompt_logprobs or 0
            )
            at += len(span.targets)

    def _tensor(self, values: list[int] | tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def score(model: GptOss, hidden: torch.Tensor, targets: Sequence[int], k: int) -> tuple[Logprob, ...]:
    """Log-probabilities of the tokens that follow each of hidden [n, H], and of the k best there."""
    scores: list[Logprob] = []
    for i in range(0, len(targets), SCORE_ROWS):
        tokens = torch.tensor(targets[i : i + SCORE_ROWS], device=hidden.device)
        logits = model.head(hidden[i : i + SCORE_ROWS])
        scores += _logprobs(tokens, *kernels.logprobs(logits, tokens, k))
    return tuple(scores)


def _logprobs(tokens: torch.Tensor, own: torch.Tensor, ids: torch.Tensor, best: torch.Tensor) -> list[Logprob]:
    rows = zip(tokens.tolist(), own.tolist(), ids.tolist(), best.tolist(), strict=True)
    return [Logprob(token, value, tuple(zip(i, b, strict=True))) for token, value, i, b in rows]
