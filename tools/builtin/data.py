"""Conversations as token ids, exactly as the engine renders them, and rows of many for training, made by processes."""

from __future__ import annotations

import functools
import itertools
import json
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from simplellm.text.harmony import CONSTRAINED_JSON, FUNCTIONS, render
from simplellm.text.tokenizer import Tokenizer
from tools.builtin.tasks import Example, example

IGNORED = -100
MAX_FAULTS = 5  # batches of a run that may fail
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


def pack(rng: Random, tokenizer: Tokenizer, num_rows: int, length: int, task: str | None = None) -> Batch:
    """Rows [num_rows, length] of whole conversations (of the task, or any).

    A token's target is the next one, if the assistant writes it.
    """
    tokens = np.zeros((num_rows, length), np.int16)
    targets = np.full((num_rows, length), IGNORED, np.int16)
    docs = np.zeros((num_rows, length), np.int16)  # 0: nothing
    used, number, first = [0] * num_rows, [0] * num_rows, 0
    while first < num_rows:
        made = example(rng, task)
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


_read = functools.cache(Tokenizer.from_file)  # once in each process


def _make(tokenizer_path: Path, seed: str, num_rows: int, length: int, task: str | None) -> Batch:
    return pack(Random(seed), _read(tokenizer_path), num_rows, length, task)


def batches(
    pool: Executor, ahead: int, tokenizer_path: Path, seed: str, num_rows: int, length: int, task: str | None = None
) -> Iterator[Batch]:
    """Batches without end, the same for the same seed, made by the pool's processes; `ahead` of them begin at once.

    A batch that cannot be made is told and left out, for a fault that shows once in a million conversations must not cost the
    run; after MAX_FAULTS of them what the process raised is raised here. If one is killed, BrokenProcessPool is, at once.
    """

    def submit(number: int) -> Future[Batch]:
        return pool.submit(_make, tokenizer_path, f"{seed} {number}", num_rows, length, task)

    pending = deque(submit(number) for number in range(ahead))

    def receive() -> Iterator[Batch]:
        num_faults = 0
        for number in itertools.count(ahead):
            try:
                yield pending.popleft().result()
            except BrokenProcessPool:
                raise
            except Exception as error:
                traceback.print_exc()
                num_faults += 1
                if num_faults > MAX_FAULTS:
                    raise RuntimeError(f"{num_faults} batches could not be made") from error
            pending.append(submit(number))

    return receive()
