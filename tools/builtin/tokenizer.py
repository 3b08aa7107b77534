"""The built-in model's vocabulary: bytes, the words that its conversations are made of, harmony's control tokens.

A word is one token or as many as it has letters: no token is made of two letters, so no merge leads anywhere else, and
an unseen word is spelled. Digits are single by the split pattern. `python -m tools.builtin.tokenizer DIR` writes it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import regex

from simplellm.text.harmony import conversation, declared_tools, system_text
from tools.builtin.problem import EFFORTS
from tools.builtin.tasks import Example, example
from tools.builtin.words import CITIES, COLOURS, DAYS, ITEMS, KEYS, NAMES, NOUNS, NUMERALS, QUALITIES, SKIES, VERBS
from tools.make_checkpoint import write_json
from tools.tiny_tokenizer import byte_letters, tokenizer_json

PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = 1271  # tokens besides bytes and control tokens, 1,536 in all
SAMPLES = 40_000  # conversations that are counted


def texts_of(made: Example) -> list[str]:
    """All texts of a conversation as harmony has them, the answer included, but headers."""
    system = system_text(made.effort, made.date, has_functions=bool(made.tools))
    messages = conversation(made.messages, declared_tools(made.tools))
    return [system, *(message.content for message in messages), made.think, made.answer]


def may_be_token(piece: str) -> bool:
    """Of three bytes or more, or a pair without letters: else it would be found inside unseen words."""
    size = len(piece.encode())
    return size > 2 or (size == 2 and not any(c.isalpha() for c in piece))


def choose_words(num_samples: int = SAMPLES, num_words: int = WORDS) -> list[str]:
    """The most frequent pieces of conversations, and every word of the lists with and without a space."""
    rng, counts = Random(1), Counter[str]()
    for i in range(num_samples):
        for text in texts_of(example(rng, effort=EFFORTS[i % 3])):
            counts.update(piece for piece in regex.findall(PATTERN, text) if may_be_token(piece))
    for text in ("assistant", "developer", "system", "user", "analysis", "commentary", "final", " to", "functions", "json"):
        counts[text] += num_samples
    for word in (*CITIES, *COLOURS, *DAYS, *ITEMS, *KEYS, *NAMES, *SKIES):
        for piece in (word, f" {word}"):
            counts[piece] += 1000 if may_be_token(piece) else 0
    for word in (*NOUNS, *NUMERALS, *QUALITIES, *VERBS):
        counts[f" {word}"] += 1000 if may_be_token(f" {word}") else 0
    ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
    return ranked[:num_words]


def make_tokenizer(words: list[str]) -> dict[str, Any]:
    """The content of tokenizer.json."""
    letters = byte_letters()
    vocab = {letter: i for i, letter in enumerate(letters.values())}
    for word in words:
        vocab["".join(letters[byte] for byte in word.encode())] = len(vocab)
    merges = [
        [token[:cut], token[cut:]]
        for token in vocab
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return tokenizer_json(vocab, merges, PATTERN)


def main() -> None:
    parser = argparse.ArgumentParser(description="write the built-in model's tokenizer.json")
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    args.path.mkdir(parents=True, exist_ok=True)
    write_json(args.path / "tokenizer.json", make_tokenizer(choose_words()))


if __name__ == "__main__":
    main()
