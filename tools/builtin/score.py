"""How often a model in training is right on held-out problems, by task and effort."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from simplellm.text.parser import Parser, fold, stop_ids
from simplellm.text.tokenizer import Tokenizer
from tools.builtin.data import prompt_ids
from tools.builtin.decode import greedy
from tools.builtin.judge import LONGEST, Table, is_right
from tools.builtin.model import Model
from tools.builtin.tasks import Example

MOST = 2048  # prompts at once
SCORES = 150_000_000  # of attention, in one head, at once


def _batches(prompts: list[list[int]]) -> Iterator[list[int]]:
    """Indices of prompts that are answered together, the longest first."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    while order:
        num = min(MOST, max(1, SCORES // len(prompts[order[0]]) ** 2))
        yield order[:num]
        del order[:num]


def score(model: Model, tokenizer: Tokenizer, examples: list[Example]) -> tuple[Table, list[str]]:
    """Per cent right by task and effort, and what was written instead where it was wrong."""
    stops, wrong = sorted(stop_ids(tokenizer)), []
    right: dict[tuple[str, str], list[bool]] = defaultdict(list)
    prompts = [prompt_ids(made, tokenizer) for made in examples]
    for chosen in _batches(prompts):
        for i, written in zip(chosen, greedy(model, [prompts[i] for i in chosen], stops, LONGEST), strict=True):
            made, parser = examples[i], Parser(tokenizer)
            message = fold([*parser.push(written), *parser.finish()])
            good = is_right(made, message.content, [(call.name, call.arguments) for call in message.tool_calls])
            right[made.task, made.effort].append(good)
            if not good:
                wrong.append(f"[{made.task} {made.effort}] {tokenizer.decode(prompts[i][-200:])!r}")
                wrong.append(f"  wanted {made.think!r} {made.answer or made.call!r}")
                wrong.append(f"  got {tokenizer.decode(written, skip_special=False)!r}")
    table: Table = defaultdict(dict)
    for (task, effort), results in sorted(right.items()):
        table[task][effort] = 100 * sum(results) / len(results)
    return table, wrong
