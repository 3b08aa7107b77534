"""Held-out conversations of every task and effort, and whether an answer to one is right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from random import Random

from tools.builtin.problem import EFFORTS
from tools.builtin.tasks import SHARES, Example, example

Table = dict[str, dict[str, float]]  # task -> effort -> per cent right
LONGEST = 512  # tokens of an answer: more than any task needs


def held_out(num: int, seed: int = 7, tasks: Iterable[str] = tuple(SHARES)) -> list[Example]:
    """`num` held-out conversations per task and effort, no problem twice."""
    chosen = []
    for task in tasks:
        for effort in EFFORTS:
            rng, seen = Random(f"{seed} {task} {effort}"), set()
            while len(seen) < num:
                made = example(rng, task, effort, held_out=True)
                if made.key not in seen:
                    seen.add(made.key)
                    chosen.append(made)
    return chosen


def is_right(made: Example, content: str, calls: Sequence[tuple[str, str]]) -> bool:
    """The exact answer, or the one call (its name, its arguments as text) with the same arguments."""
    if made.call is None:
        return not calls and content == made.answer
    if len(calls) != 1 or calls[0][0] != made.call[0]:
        return False
    try:
        return bool(json.loads(calls[0][1]) == made.call[1])
    except json.JSONDecodeError:
        return False


def as_text(table: Table) -> str:
    """The table in Markdown."""
    rows = [
        f"| {task} | " + " | ".join(f"{row.get(effort, 0.0):.1f}" for effort in EFFORTS) + " |" for task, row in table.items()
    ]
    return "\n".join(["| task | low | medium | high |", "| --- | --- | --- | --- |", *rows])
