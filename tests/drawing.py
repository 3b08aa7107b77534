"""A model that knows nothing: draws at random what a mask allows, leaning towards tokens that close something."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Set
from typing import Any

from simplellm.request import Span
from simplellm.text.grammar import Grammars
from tests import vocab
from tests.scripted import Drawn, Script, ScriptedLLM, ScriptedRunner

VOCAB_SIZE = 201088  # the model's, larger than the tokenizer's
CLOSERS = ['"', '"}', "}", "]", '"]', "}]", "}}", "null", ",", '",', "],", "},"]
ENDS = ("<|end|>", "<|call|>", "<|return|>")


@functools.cache
def grammars() -> Grammars:
    """Those of the official vocabulary, once per test process: they take seconds to make."""
    return Grammars(vocab.tokenizer(), VOCAB_SIZE)


@functools.cache
def closers() -> list[int]:
    tokenizer = vocab.tokenizer()
    listed = [tokenizer.encode(text) for text in CLOSERS]
    return [ids[0] for ids in listed if len(ids) == 1] + [tokenizer.special[name] for name in ENDS]


FEW = 100


def allowed(mask: bytes) -> list[int]:
    """The ids in a mask."""
    bits, few = int.from_bytes(mask, "little"), []
    if bits.bit_count() > FEW:
        return [token for token, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]
    while bits:
        few.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return few


def draw(mask: bytes, rng: random.Random, haste: float = 0.3) -> int:
    """A token that the mask allows; with probability `haste` one that closes something, if there is one."""
    bits = int.from_bytes(mask, "little")
    assert bits, "nothing may come next"
    closing = [token for token in closers() if bits >> token & 1]
    if closing and rng.random() < haste:
        return rng.choice(closing)
    if bits.bit_count() <= FEW:
        return rng.choice(allowed(mask))
    behind = bits >> rng.randrange(bits.bit_length())  # the next one after a random id
    return bits.bit_length() - behind.bit_length() + (behind & -behind).bit_length() - 1


class RandomRunner(ScriptedRunner):
    """Masked rows draw at random, by (seed, position) alone; the others by script."""

    def head(self, pending: Drawn, masks: Mapping[int, Any], skip: Set[int]) -> None:
        super().head(pending, masks, skip | masks.keys())
        for span in pending.plan.spans:
            if span.sample and span.rid in masks and span.rid not in skip:
                pending.tokens[span.rid] = draw(masks[span.rid], self._rng(span), haste=0.4)

    def _script(self, rid: int) -> Script:
        """One drawn behind a masked answer's end, which the engine drops, needs no script."""
        return super()._script(rid) if rid in self._by_rid or rid >= self._scripts[0] else ()

    def _rng(self, span: Span) -> random.Random:
        return random.Random(f"{self._rows[span.row].seed} {span.end}")


class RandomLLM(ScriptedLLM):
    """An LLM that draws at random under a grammar, and `<|endoftext|>` or a script without one."""

    def __init__(self, **options: Any):
        super().__init__([], **options)
        self._grammars = grammars()
        self._engine.worker.new_constraint = self._grammars.new

    def _open(self, end_ids: frozenset[int]) -> Any:
        self.runner = RandomRunner([[]])
        return super()._open(end_ids)
