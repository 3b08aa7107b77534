"""How often a model in training is right on held-out problems, by task and effort."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from random import Random

from simplellm.text.parser import Message, Parser, fold, stop_ids
from simplellm.text.tokenizer import Tokenizer
from tools.builtin.data import prompt_ids
from tools.builtin.decode import greedy
from tools.builtin.model import Model
from tools.builtin.problem import EFFORTS
from tools.builtin.tasks import SHARES, Example, example

Table = dict[str, dict[str, float]]


def held_out(num: int, seed: int = 7, tasks: Iterable[str] = tuple(SHARES)) -> list[Example]:
    """`num` held-out conversations per task and effort, no problem twice."""
    rng, chosen = Random(seed), []
    for task in tasks:
        for effort in EFFORTS:
            seen: set[str] = set()
            while len(seen) < num:
                made = example(rng, task, effort, held_out=True)
                if made.key not in seen:
                    seen.add(made.key)
                    chosen.append(made)
    return chosen


def is_right(made: Example, message: Message) -> bool:
    """The exact answer, or the one call with the same arguments."""
    if made.call is None:
        return not message.tool_calls and message.content == made.answer
    if len(message.tool_calls) != 1 or message.tool_calls[0].name != made.call[0]:
        return False
    try:
        return bool(json.loads(message.tool_calls[0].arguments) == made.call[1])
    except json.JSONDecodeError:
        return False


def score(model: Model, tokenizer: Tokenizer, examples: list[Example], at_once: int = 2048) -> tuple[Table, list[str]]:
    """Per cent right by task and effort, and what was written instead where it was wrong."""
    stops, wrong = sorted(stop_ids(tokenizer)), []
    right: dict[tuple[str, str], list[bool]] = defaultdict(list)
    prompts = [prompt_ids(made, tokenizer) for made in examples]
    order = sorted(range(len(examples)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), at_once):
        chosen = order[start : start + at_once]
        for i, written in zip(chosen, greedy(model, [prompts[i] for i in chosen], stops), strict=True):
            parser = Parser(tokenizer)
            message = fold([*parser.push(written), *parser.finish()])
            good = is_right(examples[i], message)
            right[examples[i].task, examples[i].effort].append(good)
            if not good:
                wrong.append(_report(examples[i], tokenizer.decode(written, skip_special=False)))
    table: Table = defaultdict(dict)
    for (task, effort), results in sorted(right.items()):
        table[task][effort] = 100 * sum(results) / len(results)
    return table, wrong


def _report(made: Example, written: str) -> str:
    asked = made.messages[-1]["content"] if made.messages[-1]["role"] == "user" else made.messages[-3]["content"]
    return f"[{made.task} {made.effort}] {asked!r}\n  wanted {made.think!r} {made.answer or made.call!r}\n  got {written!r}"


def as_text(table: Table) -> str:
    """The table in Markdown."""
    rows = [f"| {task} | " + " | ".join(f"{table[task].get(e, float('nan')):.1f}" for e in EFFORTS) + " |" for task in table]
    return "\n".join(["| task | low | medium | high |", "| --- | --- | --- | --- |", *rows])
