"""What a task's generator returns: a question with one right answer, and the reasoning of an effort that leads there."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

EFFORTS = ("low", "medium", "high")
HELD_OUT = 8  # one problem in so many is kept from training


@dataclass(frozen=True, slots=True)
class Problem:
    """`key` says what is asked, whatever the wording: problems of one key are the same. A fixed phrase begins with `=`."""

    key: str
    ask: str
    think: str
    sentence: str  # the answer where nothing else is asked for
    short: str = ""  # the answer alone; empty where a style cannot be asked for
    value: Any = None  # the answer as JSON; None where that is not to be asked for
    context: str = ""  # what the instructions say to the matter, such as a list

    @property
    def held_out(self) -> bool:
        return not self.key.startswith("=") and zlib.crc32(self.key.encode()) % HELD_OUT == 0
