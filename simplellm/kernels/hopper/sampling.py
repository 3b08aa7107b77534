"""sample: one token for each row of logits, every setting per row, a fixed sequence of kernels without a look at any value.

logits [n, V] float32, n <= 256 rows of a slice; draws [n, 2] int32: a row's place in the tables, or -1 where nothing is to be
drawn, and the position where the drawn token will stand. Writes tokens [n] int32 and newest[row] int32.

Plain (2 kernels, 4 n V bytes read): temperature and seed only. Full (20 kernels): scan and report find log-probabilities,
change applies penalties, bias and masks in place, search finds the floors of top-k, top-p and min-p. In it the programs of
a row exit where the row does not ask; whether any row of a slice needs it the host knows (`engine.gpu_rows`).
The twins: kernels/sampling.py (draws, penalties, log-probabilities), engine/rows.py (bias, stop ids, masks).
"""

from __future__ import annotations

import torch

from simplellm.kernels.hopper import sampling_change, sampling_draw, sampling_filter, sampling_logprobs
from simplellm.kernels.hopper.sampling_tables import TOP, Tables

MAX_ROWS = 256


def sample(logits: torch.Tensor, draws: torch.Tensor, tables: Tables, tokens: torch.Tensor, newest: torch.Tensor) -> None:
    """For rows that need nothing but temperature and seed."""
    _check(logits, draws, tables, tokens, newest)
    scores, ids = sampling_draw.race(logits, draws, tables, None)
    sampling_draw.finish(scores, ids, draws, tokens, newest)


def sample_full(
    logits: torch.Tensor,
    draws: torch.Tensor,
    tables: Tables,
    tokens: torch.Tensor,
    newest: torch.Tensor,
    values: torch.Tensor,
    best_ids: torch.Tensor,
) -> None:
    """For rows with any setting; `logits` is changed. values [n, 1 + TOP] float32, best_ids [n, TOP] int32: log-probabilities
    of the drawn token and of the best ones, in the rows that asked for them."""
    _check(logits, draws, tables, tokens, newest)
    assert values.shape == (len(logits), 1 + TOP) and best_ids.shape == (len(logits), TOP)
    assert values.is_contiguous() and best_ids.is_contiguous()
    scanned = sampling_logprobs.scan(logits, draws, tables)
    sampling_change.change(logits, draws, tables)
    cut = sampling_filter.search(logits, draws, tables)
    scores, ids = sampling_draw.race(logits, draws, tables, cut)
    sampling_draw.finish(scores, ids, draws, tokens, newest)
    sampling_logprobs.report(logits, draws, tables, tokens, scanned, values, best_ids)


def _check(logits: torch.Tensor, draws: torch.Tensor, tables: Tables, tokens: torch.Tensor, newest: torch.Tensor) -> None:
    num_rows, vocab_size = logits.shape
    assert num_rows <= MAX_ROWS and draws.shape == (num_rows, 2) and tokens.shape == (num_rows,)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and logits.stride(0) % 4 == 0
    assert draws.is_contiguous() and tokens.is_contiguous() and newest.shape == tables.masked.shape
    assert draws.dtype == tokens.dtype == newest.dtype == torch.int32 and vocab_size == tables.counts.shape[1]
