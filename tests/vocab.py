"""The official o200k_harmony tokenizer.json, rebuilt offline from the ranks in PyPI's bpe-openai.

Byte for byte the file of the gpt-oss repositories (checked by sha256), kept in the system's temp folder.
`python -m tests.vocab` builds it and prints where it is.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from simplellm.text.tokenizer import Tokenizer

RANKS_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"  # o200k_base.tiktoken
JSON_SHA256 = "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3"  # tokenizer.json

SPECIAL = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}
FIRST_SPECIAL, LAST_SPECIAL = 199998, 200018

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def folder() -> Path:
    """Where rebuilt files are kept; keyed by content, so a changed recipe never meets an old file."""
    return Path(tempfile.gettempdir()) / f"simplellm-vocab-{JSON_SHA256[:12]}"


def ranks_file() -> Path:
    """o200k_base.tiktoken in `folder()`, as openai-harmony reads it under TIKTOKEN_ENCODINGS_BASE."""
    path = folder() / "o200k_base.tiktoken"
    if not path.exists():
        _write(path, _official_ranks())
    return path


def tokenizer_json() -> Path:
    """The official tokenizer.json in `folder()`; building it takes some seconds, once per machine."""
    path = folder() / "tokenizer.json"
    if not path.exists():
        data = json.dumps(_hugging_face(ranks()), indent=2, ensure_ascii=False).encode()
        digest = hashlib.sha256(data).hexdigest()
        assert digest == JSON_SHA256, f"rebuilt tokenizer.json has sha256 {digest}"
        _write(path, data)
    return path


@functools.cache
def tokenizer() -> Tokenizer:
    """The official tokenizer, loaded once per test process."""
    return Tokenizer.from_file(tokenizer_json())


@functools.cache
def ranks() -> dict[bytes, int]:
    """Token bytes to rank, in rank order."""
    lines = (line.split() for line in ranks_file().read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def byte_letters() -> list[str]:
    """GPT-2's spelling of each byte: itself where printable, else the next free character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def added_token(content: str, token: int) -> dict[str, Any]:
    """A special token as tokenizer.json lists it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, **flags, "special": True}


def byte_level(vocab: dict[str, int], merges: list[list[str]], added: dict[int, str], pattern: str) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json around these tokens, shaped as the official one."""
    stage = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    model = {
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
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(name, token) for token, name in sorted(added.items())],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, stage]},
        "post_processor": {**stage, "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {**stage, "add_prefix_space": True, "use_regex": True},
        "model": model,
    }


def _hugging_face(ranks: dict[bytes, int]) -> dict[str, Any]:
    letters = byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        [spelled[left], spelled[right]]
        for token in ranks
        for left, right in sorted(
            ((token[:cut], token[cut:]) for cut in range(1, len(token))),
            key=lambda pair: (ranks.get(pair[0], -1), ranks.get(pair[1], -1)),
        )
        if left in ranks and right in ranks
    ]
    reserved = {token: f"<|reserved_{token}|>" for token in range(FIRST_SPECIAL, LAST_SPECIAL + 1)}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    return byte_level(vocab, merges, reserved | SPECIAL, PATTERN)


def _official_ranks() -> bytes:
    spec = importlib.util.find_spec("bpe_openai")
    assert spec is not None and spec.origin is not None, "pip install bpe-openai (it carries the o200k ranks)"
    data = gzip.decompress((Path(spec.origin).parent / "data/o200k_base.tiktoken.gz").read_bytes())
    assert hashlib.sha256(data).hexdigest() == RANKS_SHA256, "bpe-openai carries other ranks than o200k_base's"
    return data


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")  # several test processes may build at once
    part.write_bytes(data)
    part.replace(path)


if __name__ == "__main__":
    print(tokenizer_json())
