"""Steps to the device and tokens back, with no copy on the stream: slots in pinned memory which the graphs read and write.

    fill(shape, mailbox.claim(), spans)         # engine/step.py
    number = mailbox.launch(run)                # run: receive, the layers, perhaps the draw and send; a graph or kernels
    tokens = mailbox.tokens(number, n)          # once an event behind `send` is done; then, or without tokens,
    mailbox.release(number)                     # the slot may be filled again

Host and device count the steps, each for itself, and the number picks the slot (kernels/hopper/mailbox.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from simplellm.engine.step import Int32s
from simplellm.errors import EngineError
from simplellm.kernels.hopper import mailbox
from simplellm.kernels.hopper.mailbox import HEADER, SLOTS, WRAP


@dataclass(slots=True)
class Slot:
    """One step's place, both ways."""

    plan: Int32s  # [size]
    drawn: Int32s  # [HEADER + rows]: which step's, then its tokens
    number: int = -1  # of the step launched last in it
    free: bool = True  # that step is over


class Mailbox:
    """For arrays of up to `size` int32s, a multiple of 4, and the tokens of `num_rows` rows; the lag must be below SLOTS."""

    def __init__(self, size: int, num_rows: int, device: torch.device):
        pin = device.type == "cuda"  # pinned memory has one address for host and device
        self.plans = torch.zeros(SLOTS, size, dtype=torch.int32, pin_memory=pin)
        self.drawn = torch.zeros(SLOTS, HEADER + num_rows, dtype=torch.int32, pin_memory=pin)
        self.step = torch.zeros(size, dtype=torch.int32, device=device)  # what kernels read
        self.count = torch.zeros(1, dtype=torch.int32, device=device)  # number of the step received last
        self.launched = 0  # of the step launched last
        self._slots = [Slot(plan, drawn) for plan, drawn in zip(self.plans.numpy(), self.drawn.numpy(), strict=True)]

    def claim(self) -> Int32s:
        """The next step's array, to be filled and launched before another is claimed; if it is not, it is claimed again."""
        slot = self._slot(self.launched + 1)
        if not slot.free:  # only after a failure, or where nobody read the results
            self._wait()
        slot.free = False
        return slot.plan

    def launch(self, run: Callable[[], None]) -> int:
        """Call `run`, which launches the step that was claimed: its number. Whatever `run` raises, the counts stay equal."""
        number = (self.launched + 1) % WRAP
        try:
            run()
        except Exception:
            self.launched = self._wait()  # did it come as far as `receive`?
            raise
        self._slot(number).number = self.launched = number
        return number

    def tokens(self, number: int, num_tokens: int) -> list[int]:
        """The first tokens that step `number` drew, once it is done. EngineError if others are in their place."""
        drawn = self._slot(number).drawn
        if drawn[0] != number:
            raise EngineError(f"in the place of the tokens of step {number} are those of step {drawn[0]}")
        return drawn[HEADER : HEADER + num_tokens].tolist()  # type: ignore[no-any-return]

    def release(self, number: int) -> None:
        """Step `number` is done, and its tokens are read."""
        slot = self._slot(number)
        slot.free |= slot.number == number

    # --- launches, for graphs too ------------------------------------------------------------------------------------

    def receive(self, size: int) -> None:
        """The next step's array, the first `size` int32s, in `self.step`."""
        mailbox.receive(self.plans, self.count, self.step[:size])

    def send(self, tokens: torch.Tensor) -> None:
        """Tokens [n] of the step received last go to the host."""
        mailbox.send(tokens, self.count, self.drawn)

    def _wait(self) -> int:
        """Until the device has nothing to do; the steps that it has received."""
        return self.launched if self.count.is_meta else int(self.count)

    def _slot(self, number: int) -> Slot:
        return self._slots[number % SLOTS]
