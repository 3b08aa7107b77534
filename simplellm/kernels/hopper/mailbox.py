"""receive, send: a step's array from pinned host memory to the device, drawn tokens back, by loads and stores of a kernel.

plans [SLOTS, size] int32 and drawn [SLOTS, HEADER + rows] int32, pinned; step [size], tokens [n] int32 and count [1] int32 on
the device. Step number n has slot n % SLOTS in both; count is the number of the last step received, so that a graph, whose
arguments are fixed, finds its slot. receive: count += 1, step = plans[slot]. send: drawn[slot] = count, then the tokens from
HEADER on; the host may read them once an event behind the kernel is done. They move 4 bytes an int32 over PCIe.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simplellm.kernels.hopper.launch import launch

SLOTS = 2  # a step is filled while one is on its way (lag 1)
HEADER = 4  # int32s before a slot's tokens: the step's number, then nothing
WRAP = 1 << 30  # step numbers begin again at 0

WORDS = 1024  # of 16 bytes, that `receive` has on their way: four a thread
THREADS = 128  # of a program of `send`, a token each


@triton.jit(do_not_specialize=["words_apart", "num_words"])
def _receive(plans, words_apart, count, step, num_words, SLOTS: tl.constexpr, WRAP: tl.constexpr, BLOCK: tl.constexpr):
    """One program, since all of it reads the count before the count grows. Nothing of the host's may come from a cache."""
    gdc_wait()
    gdc_launch_dependents()
    number = (tl.load(count) + 1) % WRAP
    tl.debug_barrier()
    tl.store(count, number)
    plans += (number % SLOTS) * words_apart * 4
    for first in range(0, num_words, BLOCK):
        word = first + tl.arange(0, BLOCK)[:, None]
        at = word * 4 + tl.arange(0, 4)[None, :]
        inside = word < num_words
        tl.store(step + at, tl.load(plans + at, mask=inside, volatile=True), mask=inside)


@triton.jit(do_not_specialize=["apart", "num_tokens"])
def _send(tokens, num_tokens, count, drawn, apart, SLOTS: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr):
    """Program i: tokens i BLOCK and on."""
    gdc_wait()
    gdc_launch_dependents()
    number = tl.load(count)
    drawn += (number % SLOTS) * apart
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    tl.store(drawn + HEADER + at, tl.load(tokens + at, mask=inside), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(drawn, number)


def receive(plans: torch.Tensor, count: torch.Tensor, step: torch.Tensor) -> None:
    """The next step: plans [SLOTS, size] pinned -> the first len(step) of its slot in `step`; a multiple of 4, as is size."""
    size = len(step)
    assert plans.dtype == count.dtype == step.dtype == torch.int32 and plans.is_contiguous() and step.is_contiguous()
    assert len(plans) == SLOTS and size <= plans.shape[1] and size % 4 == plans.shape[1] % 4 == 0
    launch(
        _receive, (1,), plans, plans.shape[1] // 4, count, step, size // 4,
        SLOTS=SLOTS, WRAP=WRAP, BLOCK=WORDS, num_warps=8, num_stages=1,
    )  # fmt: skip


def send(tokens: torch.Tensor, count: torch.Tensor, drawn: torch.Tensor) -> None:
    """tokens [n] of the step received last -> its slot of drawn [SLOTS, HEADER + at least n] pinned."""
    num_tokens = len(tokens)
    assert tokens.dtype == count.dtype == drawn.dtype == torch.int32 and tokens.is_contiguous() and drawn.is_contiguous()
    assert len(drawn) == SLOTS and HEADER + num_tokens <= drawn.shape[1]
    launch(
        _send, (triton.cdiv(num_tokens, THREADS),), tokens, num_tokens, count, drawn, drawn.shape[1],
        SLOTS=SLOTS, HEADER=HEADER, BLOCK=THREADS, num_warps=THREADS // 32,
    )  # fmt: skip
