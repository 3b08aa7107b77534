"""Each row's sampling settings on the device, and the rare, larger state: penalty counts in a bounded pool of slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from simplellm import kernels
from simplellm.request import RowStart, Sampling, Span


@lru_cache(maxsize=16)  # reasoning has the same mask in every step and row
def forbidden(mask: bytes, vocab_size: int, device: torch.device) -> Tensor:
    """[V] bool: the tokens whose bits (i % 8 of byte i // 8) are not set. The packed mask is what travels."""
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8).to(device)
    bits = packed[:, None] & (1 << torch.arange(8, dtype=torch.uint8, device=device))
    return bits.flatten()[:vocab_size] == 0


class Rows:
    """Settings of `num_rows` rows; a RowStart overwrites one."""

    def __init__(self, num_rows: int, penalty_slots: int, vocab_size: int, device: torch.device):
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_rows, dtype=dtype, device=device)

        self.temperature, self.top_p, self.min_p = (column(torch.float32) for _ in range(3))
        self.top_k, self.seed = column(torch.int64), column(torch.int64)
        self.sampling = [Sampling()] * num_rows
        self.starts: list[RowStart | None] = [None] * num_rows
        self.counts = torch.zeros(penalty_slots, vocab_size, dtype=torch.int32, device=device)  # generated tokens
        self.seen = torch.zeros(penalty_slots, vocab_size, dtype=torch.bool, device=device)  # prompt tokens

    def start(self, start: RowStart) -> None:
        """A request takes the row."""
        row, sampling = start.row, start.sampling
        self.starts[row], self.sampling[row] = start, sampling
        self.temperature[row], self.top_p[row], self.min_p[row] = sampling.temperature, sampling.top_p, sampling.min_p
        self.top_k[row] = min(sampling.top_k, self.seen.shape[1])  # it may be any number, of any size
        self.seed[row] = (start.seed + 2**63) % 2**64 - 2**63  # the same 64 bits, as int64
        if start.penalty_slot is not None:
            prompt, generated = start.tokens[: start.num_prompt], start.tokens[start.num_prompt :]
            seen, counts = self.seen[start.penalty_slot].zero_(), self.counts[start.penalty_slot].zero_()
            seen[torch.tensor(prompt, dtype=torch.int64, device=seen.device)] = True
            ids = torch.tensor(generated, dtype=torch.int64, device=counts.device)
            counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))

    def settings(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """temperature, top_k, top_p, min_p, seeds of `rows`: sample's arguments."""
        return self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.seed[rows]

    def adjust(self, logits: Tensor, spans: Sequence[Span], masks: Mapping[int, bytes]) -> Tensor:
        """logits [N, V] of `spans` after penalties, bias and masks; a copy where anything changed."""
        raw = logits
        for i, span in enumerate(spans):
            start = self.starts[span.row]
            assert start is not None, "a span in a row that nobody took"
            early = span.end < start.num_prompt + start.sampling.min_tokens and start.stop_ids
            mask = masks.get(span.rid)
            if start.penalty_slot is None and not start.sampling.logit_bias and not early and mask is None:
                continue
            if logits is raw:
                logits = raw.clone()
            logits[i] = self._adjust_row(logits[i], start, bool(early), mask)
        return logits

    def _adjust_row(self, logits: Tensor, start: RowStart, early: bool, mask: bytes | None) -> Tensor:
        sampling, slot = start.sampling, start.penalty_slot
        if slot is not None:
            strengths = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
            presence, frequency, repetition = (logits.new_tensor([strength]) for strength in strengths)
            counts, seen = self.counts[slot : slot + 1], self.seen[slot : slot + 1]
            logits = kernels.penalise(logits[None], counts, seen, presence, frequency, repetition)[0]
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
            logits[ids] += logits.new_tensor(list(sampling.logit_bias.values()))
        if early:
            logits[torch.tensor(sorted(start.stop_ids), device=logits.device)] = -torch.inf
        return logits if mask is None else logits.masked_fill(forbidden(mask, len(logits), logits.device), -torch.inf)

    def count(self, spans: Sequence[Span], tokens: Tensor) -> None:
        """Note what was drawn, for rows with penalties."""
        for i, span in enumerate(spans):
            start = self.starts[span.row]
            if start is not None and start.penalty_slot is not None and tokens[i] >= 0:
                self.counts[start.penalty_slot, tokens[i]] += 1
