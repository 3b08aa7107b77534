"""Each row's sampling settings on a GPU, and the draw. The GPU's counterpart of `rows`; what a setting means is the same.

    rows = GpuRows(num_rows, penalty_slots, vocab_size, device)
    rows.start(plan.row_starts)                 # before the plan's body: requests take rows; small copies, no wait
    rows.masks({row: mask, ...})                # before each head: the masks of all its rows (none: {}), packed as loop.Mask
    full = rows.needs_full(drawing_rows)        # which head graph: the one captured with full=True?
    rows.draw(logits, draws, tokens, newest, out, full)   # inside the head graph, once for each slice of up to 256 rows
    rows.needs_logprobs(drawing_rows)           # after the head: copy `out` to the host?

`draw` launches the same kernels whatever the settings are, on static tensors, and looks at no value; it allocates by
torch.empty only (in a graph: from its pool). Everything runs on the current stream, in the order of the calls, so a row or
penalty slot may be taken over while older plans are still running. A draw with full=True changes the logits in place, and
draws the same tokens as full=False for rows that need nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from simplellm.kernels.hopper.sampling_tables import MAX_ENTRIES, TOP, WIDTH, Field, Tables
from simplellm.request import RowStart

_MAX_POSITION = 2**31 - 1
_MAX_INVERSE = 1e30  # of a temperature: then the best logit wins for certain

Int32s = npt.NDArray[np.int32]


class LogprobTensors(NamedTuple):
    """Where log-probabilities go; rows that did not ask keep what was there."""

    values: Tensor  # [n, 1 + TOP] float32: the drawn token's, then the best ones', best first
    ids: Tensor  # [n, TOP] int32: the best ones' tokens

    @staticmethod
    def empty(num_rows: int, device: torch.device) -> LogprobTensors:
        return LogprobTensors(
            torch.empty(num_rows, 1 + TOP, dtype=torch.float32, device=device),
            torch.empty(num_rows, TOP, dtype=torch.int32, device=device),
        )

    def rows(self, part: slice) -> LogprobTensors:
        return LogprobTensors(self.values[part], self.ids[part])


class GpuRows:
    """Settings of `num_rows` rows; vocab_size must be a multiple of 32.

    Memory: 25 KB of mask and 15 KB of entries a row, 5 V bytes a penalty slot: 75 MB with 1,024 rows and 32 slots.
    """

    def __init__(self, num_rows: int, penalty_slots: int, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        self.tables = Tables.empty(num_rows, penalty_slots, vocab_size, device)
        self._full: set[int] = set()  # rows whose settings need the full draw, or that had a mask
        self._logprobs: set[int] = set()  # rows that want log-probabilities
        self._masks: dict[int, bytes] = {}  # rows with a mask now
        self._uploaded: dict[int, bytes] = {}  # what `tables.masks` holds

    def start(self, starts: Sequence[RowStart]) -> None:
        """Requests take rows, each another one: one copy for all their settings, and one each for what few of them have."""
        if not starts:
            return
        records = np.stack([_settings(start, self.vocab_size) for start in starts])
        rows = np.array([[start.row] for start in starts], np.int32)
        sent = self._send(np.concatenate([rows, records], 1))
        self.tables.settings.index_copy_(0, sent[:, 0].long(), sent[:, 1:])
        for start, (num_entries, filtered) in zip(
            starts, records[:, [Field.NUM_ENTRIES, Field.FILTERED]].tolist(), strict=True
        ):
            row, sampling = start.row, start.sampling
            if num_entries:
                self.tables.entries[row, :, :num_entries].copy_(self._send(_entries(start)))
            if start.penalty_slot is not None:
                self._fill_slot(start, start.penalty_slot)
            _put(self._logprobs, row, sampling.logprobs)
            _put(self._full, row, bool(num_entries or filtered or sampling.logprobs or start.penalty_slot is not None))

    def masks(self, masks: Mapping[int, bytes]) -> None:
        """The masks of the next head, by row; rows that are not named have none. A mask that has not changed stays."""
        if not masks and not self._masks:
            return
        self._full.update(masks)
        new = [row for row, mask in masks.items() if self._uploaded.get(row) != mask]
        if new:
            packed = np.stack([np.frombuffer(masks[row], np.uint8) for row in new]).view(np.int32)
            assert packed.shape[1] * 32 == self.vocab_size, "a mask of another vocabulary"
            rows = np.array(new, np.int32)[:, None]
            sent = self._send(np.concatenate([rows, packed], 1))
            self.tables.masks.index_copy_(0, sent[:, 0].long(), sent[:, 1:])
            self._uploaded.update((row, masks[row]) for row in new)
        if masks.keys() != self._masks.keys():
            flags = np.zeros(len(self.tables.masked), np.int32)
            flags[list(masks)] = 1
            self.tables.masked.copy_(self._send(flags))
        self._masks = dict(masks)

    def needs_full(self, rows: Iterable[int]) -> bool:
        """Whether any of `rows` needs draw(full=True): filters, penalties, bias, min_tokens, log-probabilities, a mask.

        A request that had a mask once counts as one that has: it is likely to have one again.
        """
        return bool(self._full) and not self._full.isdisjoint(rows)

    def needs_logprobs(self, rows: Iterable[int]) -> bool:
        """Whether any of `rows` wants log-probabilities."""
        return bool(self._logprobs) and not self._logprobs.isdisjoint(rows)

    def draw(self, logits: Tensor, draws: Tensor, tokens: Tensor, newest: Tensor, out: LogprobTensors, full: bool) -> None:
        """Draw a token for each row of logits [n, V] float32, n <= 256.

        draws [n, 2] int32: the row, or -1 to draw nothing, and the position where the token will stand. Writes tokens [n]
        int32 (0 where nothing is drawn), newest[row] int32 and, with `full`, `out` for rows that want it; `logits` are
        changed then.
        """
        from simplellm.kernels.hopper.sampling import sample, sample_full  # Triton only where there is a GPU

        if full:
            sample_full(logits, draws, self.tables, tokens, newest, out.values, out.ids)
        else:
            sample(logits, draws, self.tables, tokens, newest)

    def _fill_slot(self, start: RowStart, slot: int) -> None:
        """What the penalties have to count: prompt and, after a preemption, generated tokens."""
        tokens = self._send(np.array(start.tokens, np.int32)).long()
        seen, counts = self.tables.seen[slot].zero_(), self.tables.counts[slot].zero_()
        prompt, generated = tokens[: start.num_prompt], tokens[start.num_prompt :]
        seen.index_fill_(0, prompt, 1)
        counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def _send(self, array: npt.NDArray[np.int32]) -> Tensor:
        """A copy on the device. PyTorch keeps the pinned memory until the copy is done."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _settings(start: RowStart, vocab_size: int) -> Int32s:
    """[WIDTH]: a row of Tables.settings."""
    sampling, record = start.sampling, np.zeros(WIDTH, np.int32)
    reals = record.view(np.float32)
    temperature, top_p, min_p = (float(np.float32(x)) for x in (sampling.temperature, sampling.top_p, sampling.min_p))
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0  # all tokens are as good as off
    if temperature > 0:
        reals[Field.INVERSE_TEMPERATURE] = min(1 / temperature, _MAX_INVERSE)
        record[Field.FILTERED] = top_k > 0 or top_p < 1 or min_p > 0
    record[[Field.SEED_LOW, Field.SEED_HIGH]] = np.array([start.seed % 2**64], np.uint64).view(np.int32)
    record[Field.TOP_K], reals[Field.TOP_P] = top_k, top_p
    reals[Field.MIN_GAP] = -temperature * math.log(min_p) if min_p > 0 else math.inf
    record[Field.SLOT] = -1 if start.penalty_slot is None else start.penalty_slot
    reals[Field.PRESENCE], reals[Field.FREQUENCY] = sampling.presence_penalty, sampling.frequency_penalty
    reals[Field.REPETITION] = sampling.repetition_penalty
    record[Field.NUM_ENTRIES] = len(_entry_tokens(start))
    record[Field.LOGPROBS] = sampling.logprobs
    return record


def _entry_tokens(start: RowStart) -> list[int]:
    """Tokens with a bias or a limit, each once."""
    tokens = dict.fromkeys(start.sampling.logit_bias)
    if start.sampling.min_tokens:
        tokens |= dict.fromkeys(start.stop_ids)
    return list(tokens)


def _entries(start: RowStart) -> Int32s:
    """[3, n]: tokens, biases by their bits, and below which positions they are forbidden."""
    sampling, tokens = start.sampling, _entry_tokens(start)
    assert len(tokens) <= MAX_ENTRIES, f"{len(tokens)} tokens with a bias or forbidden before min_tokens, at most {MAX_ENTRIES}"
    first = min(start.num_prompt + sampling.min_tokens, _MAX_POSITION)
    limits = [first if token in start.stop_ids else 0 for token in tokens]
    biases = np.array([sampling.logit_bias.get(token, 0.0) for token in tokens], np.float32)
    return np.stack([np.array(tokens, np.int32), biases.view(np.int32), np.array(limits, np.int32)])


def _put(rows: set[int], row: int, belongs: bool) -> None:
    (rows.add if belongs else rows.discard)(row)
