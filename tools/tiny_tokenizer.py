"""A byte-level tokenizer of 320 tokens in the form of the official tokenizer.json, for tiny checkpoints.

256 bytes, 55 merges of frequent English pairs, and harmony's special tokens after them. The split pattern is
o200k's without its upper/lower case distinction.
"""

from __future__ import annotations

from typing import Any

SPECIALS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)

# Left and right half of each merged token, in rank order, with _ for a space: a half is a byte or an earlier token.
MERGES = (
    "t+h h+e i+n e+r a+n r+e o+n a+t e+n n+d t+i e+s o+r t+e o+f e+d i+s i+t a+l a+r s+t t+o n+t n+g s+e h+a a+s o+u "
    "i+o l+e v+e c+o m+e d+e h+i r+i r+o i+c n+e e+a r+a c+e l+i c+h l+l b+e m+a s+i o+m u+r _+th _th+e in+g _+a io+n"
)
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_letters() -> dict[int, str]:
    """GPT-2's spelling of bytes as printable characters, in the order of the byte tokens' ids."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def tiny_tokenizer() -> dict[str, Any]:
    """The content of tokenizer.json."""
    return tokenizer_json(*_vocabulary(), PATTERN)


def tokenizer_json(vocab: dict[str, int], merges: list[list[str]], pattern: str) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json: `vocab` by spelling, then harmony's control tokens."""
    added = [_special(text, len(vocab) + i) for i, text in enumerate(SPECIALS)]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_only]},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    """Token ids by spelling, and the merges as the official file lists them: every split of a token into two others."""
    letters = byte_letters()
    vocab = {letter: i for i, letter in enumerate(letters.values())}
    for pair in MERGES.split():
        left, right = ("".join(letters[byte] for byte in half.replace("_", " ").encode()) for half in pair.split("+"))
        assert left in vocab and right in vocab, pair
        token = left + right
        assert token not in vocab, token
        vocab[token] = len(vocab)
    merges: list[list[str]] = []
    for token in vocab:
        splits = [[token[:i], token[i:]] for i in range(1, len(token))]
        known = [split for split in splits if split[0] in vocab and split[1] in vocab]
        merges += sorted(known, key=lambda split: (vocab[split[0]], vocab[split[1]]))
    return vocab, merges


def _special(text: str, token: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": True}
