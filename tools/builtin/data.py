"""Conversations as token ids, exactly as the engine renders them, and rows of many for training, made by processes."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from simplellm.text.harmony import CONSTRAINED_JSON, FUNCTIONS, render
from simplellm.text.tokenizer import Tokenizer
from tools.builtin.tasks import Example, example

IGNORED = -100
OPEN_ROWS = 8  # rows that a conversation may still go into
Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]  # tokens, targets, docs


def prompt_ids(made: Example, tokenizer: Tokenizer) -> list[int]:
    return render(made.messages, tokenizer, tools=made.tools or None, reasoning_effort=made.effort, current_date=made.date)


def answer_ids(made: Example, tokenizer: Tokenizer) -> list[int]:
    """What the model is to write: reasoning, then its answer or its call."""
    special, encode = tokenizer.special, tokenizer.encode
    channel, message, start = special["<|channel|>"], special["<|message|>"], special["<|start|>"]
    ids = [channel, *encode("analysis"), message, *encode(made.think), special["<|end|>"], start, *encode("assistant")]
    if made.call is None:
        return [*ids, channel, *encode("final"), message, *encode(made.answer), special["<|return|>"]]
    name, arguments = made.call
    ids += [*encode(f" to={FUNCTIONS}.{name}"), channel, *encode("commentary"), *encode(" "), special["<|constrain|>"]]
    ids += [*encode(CONSTRAINED_JSON.split(">")[1]), message, *encode(json.dumps(arguments)), special["<|call|>"]]
    return ids


def pack(rng: Random, tokenizer: Tokenizer, num_rows: int, length: int) -> Batch:
    """Rows [num_rows, length] of whole conversations. A token's target is the next one, if the assistant writes it."""
    tokens = np.zeros((num_rows, length), np.int16)
    targets = np.full((num_rows, length), IGNORED, np.int16)
    docs = np.zeros((num_rows, length), np.int16)  # 0: nothing
    used, number, first = [0] * num_rows, [0] * num_rows, 0
    while first < num_rows:
        made = example(rng)
        prompt, answer = prompt_ids(made, tokenizer), answer_ids(made, tokenizer)
        size = len(prompt) + len(answer)
        if size > length:
            continue
        row = next((i for i in range(first, min(first + OPEN_ROWS, num_rows)) if used[i] + size <= length), None)
        if row is None:
            first += 1
            continue
        at, number[row] = used[row], number[row] + 1
        tokens[row, at : at + size] = prompt + answer
        targets[row, at + len(prompt) - 1 : at + size - 1] = answer
        docs[row, at : at + size] = number[row]
        used[row] += size
    return tokens, targets, docs


def _produce(queue: Any, tokenizer_path: Path, seed: int, num_rows: int, length: int) -> None:
    tokenizer, rng = Tokenizer.from_file(tokenizer_path), Random(seed)
    while True:
        queue.put(pack(rng, tokenizer, num_rows, length))


def batches(tokenizer_path: Path, seed: int, num_rows: int, length: int, workers: int) -> Iterator[Batch]:
    """Batches without end. The processes start at once and end with this one."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue(4 * workers)
    for worker in range(workers):
        arguments = (queue, tokenizer_path, 1000 * seed + worker, num_rows, length)
        context.Process(target=_produce, args=arguments, daemon=True).start()
    return iter(queue.get, None)
