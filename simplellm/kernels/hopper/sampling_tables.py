"""What the sampling kernels read: each row's settings, its changed tokens, its mask, and penalty counts. No triton here.

All tensors live on the device at fixed addresses; `engine.gpu_rows` writes them, kernels index them by row or slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from simplellm.request import MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_TOP_LOGPROBS

MAX_FORBIDDEN = MAX_STOP_IDS + 6  # stop ids of one row that min_tokens forbids: a request's, and the model's own
MAX_ENTRIES = MAX_LOGIT_BIAS + MAX_FORBIDDEN
TOP = MAX_TOP_LOGPROBS  # alternatives whose log-probabilities are found for every row that asks for any
WIDTH = 16  # int32s of a row's settings


class Field(IntEnum):
    """Columns of `settings`. float32 ones are stored by their bits."""

    INVERSE_TEMPERATURE = 0  # float32; 0: greedy
    SEED_LOW = 1
    SEED_HIGH = 2
    FILTERED = 3  # 1: top_k, top_p or min_p cuts something off
    TOP_K = 4  # 0: off
    TOP_P = 5  # float32; 1: off
    MIN_GAP = 6  # float32: -temperature * log(min_p), how far below the best logit min-p lets a token be; inf: off
    SLOT = 7  # row of `counts` and `seen`; -1: no penalties
    PRESENCE = 8  # float32
    FREQUENCY = 9  # float32
    REPETITION = 10  # float32
    NUM_ENTRIES = 11  # of `entries` that count
    LOGPROBS = 12  # 1: asked for


@dataclass(frozen=True, slots=True)
class Tables:
    """R rows, S penalty slots, V tokens (a multiple of 32)."""

    settings: torch.Tensor  # [R, WIDTH] int32, see Field
    entries: torch.Tensor  # [R, 3, MAX_ENTRIES] int32: token, bias (float32), and below which position it is forbidden
    masked: torch.Tensor  # [R] int32: 1 if `masks` holds for the row
    masks: torch.Tensor  # [R, V / 32] int32: bit v % 32 of word v // 32 set: token v may be drawn
    counts: torch.Tensor  # [S, V] int32: times generated
    seen: torch.Tensor  # [S, V] uint8: 1 if in the prompt

    @staticmethod
    def empty(num_rows: int, penalty_slots: int, vocab_size: int, device: torch.device) -> Tables:
        """Tables of zeros: every row greedy."""
        assert vocab_size % 32 == 0 and vocab_size >= TOP, f"a vocabulary of {vocab_size} tokens"

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return Tables(
            settings=zeros(num_rows, WIDTH),
            entries=zeros(num_rows, 3, MAX_ENTRIES),
            masked=zeros(num_rows),
            masks=zeros(num_rows, vocab_size // 32),
            counts=zeros(penalty_slots, vocab_size),
            seen=zeros(penalty_slots, vocab_size, dtype=torch.uint8),
        )
