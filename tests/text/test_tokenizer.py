"""The tokenizer against two others over the official vocabulary: tiktoken on the ranks, `tokenizers` on the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from simplellm.errors import CheckpointError
from simplellm.text.tokenizer import LONG_RUN, Tokenizer
from tests import vocab

CORPUS = [
    "The quick brown fox, isn't it? WE'LL see; they'RE here.",
    "def f(x):\n    return x ** 2  # square\r\n\r\n\tif (a != b) { return; }\n\n\n",
    "Größe naïve café Ünïcödé e\u0301 \u0301x ﬁ ſ ǅ ʼn",
    "これは日本語の文章です。漢字とカナ。한국어 문장입니다. 中文，标点。",
    "Это русский текст. مرحبا بالعالم שלום עולם हिन्दी में पाठ ไทย",
    "🙂🚀👩‍👩‍👧‍👦🇩🇪 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "   \t\n\n \u3000\u00a0\u2028\u2029\x85\x0b\x0c end  ",
    "1234567890 3.14159 ½ ⅷ ١٢٣ 𝟘𝟙",
    '{"key": [1, 2, {"a": null}], "b": "c\\n"}',
    "<|end|> <|start|>assistant<|reserved_200013|> ==>>> //// !!!\n/\n",
    "\x00\x01\x7f\ufeff\ufffd\U0010ffff",
    "",
]


@pytest.fixture(scope="module")
def oracle() -> tokenizers.Tokenizer:
    loaded = tokenizers.Tokenizer.from_file(str(vocab.tokenizer_json()))
    loaded.encode_special_tokens = True  # marker text stays text, as ours has it
    return loaded


@pytest.fixture(scope="module")
def reference() -> tiktoken.Encoding:
    return tiktoken.Encoding("ranks", pat_str=vocab.PATTERN, mergeable_ranks=vocab.ranks(), special_tokens={})


def tiny(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json of 256 bytes and three control tokens, with `changes` at its top level."""
    letters = {letter: byte for byte, letter in enumerate(vocab.byte_letters())}
    added = {256: "<|start|>", 257: "<|end|>", 300: "<|call|>"}
    return vocab.byte_level(letters, [], added, r"\s+|\S+") | changes


def written(folder: Path, data: Any) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


@pytest.mark.parametrize("text", CORPUS)
def test_equals_both_references(official, oracle, reference, text):
    ids = official.encode(text)
    assert ids == reference.encode_ordinary(text) == oracle.encode(text, add_special_tokens=False).ids
    assert official.decode(ids) == text


texts = st.lists(st.sampled_from(CORPUS) | st.text() | st.text(" \n\r\t/'s1aA\u0301é\u3000", max_size=12)).map("".join)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_any_text_equals_tiktoken_and_survives(official, reference, text):
    ids = official.encode(text)
    assert ids == reference.encode_ordinary(text)
    assert official.decode(ids) == text
    assert not set(ids) & set(official.special.values()), "text became a control token"


@settings(max_examples=200, deadline=None)
@given(texts)
def test_the_slow_path_splits_as_the_fast_one(official, reference, text):
    assert official._encode_slowly(text) == reference.encode_ordinary(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-5, 202_000) | st.sampled_from([*range(128, 256)]), max_size=40), st.data())
def test_streamed_text_equals_whole_text_for_any_ids_and_chunks(official, ids, data):
    decoder, text, at = official.decoder(), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, len(ids) - at))
        text, at = text + decoder.push(ids[at : at + size]), at + size
    text += decoder.flush()
    whole = b"".join(official.token_bytes(token) for token in ids)
    assert text == official.decode(ids) == whole.decode("utf-8", "replace")
    assert decoder.flush() == "" and decoder.push(official.encode("é")) == "é", "a flushed decoder is as new"


def test_half_a_character_waits(official):
    first, *rest = ids = official.encode("𝟘")
    assert rest, "the character must take several tokens for this test"
    decoder = official.decoder()
    assert decoder.push([first]) == "" and decoder.push(rest) == "𝟘"
    assert official.decode(ids[:-1]) == "\ufffd"


def test_control_tokens_come_from_the_file(official):
    assert official.vocab_size == 200019
    assert official.special["<|return|>"] == 200002 and official.special["<|call|>"] == 200012
    ids = [200006, *official.encode("hi"), 200007, 201000, -1]
    assert official.decode(ids) == "hi"
    assert official.decode(ids, skip_special=False) == "<|start|>hi<|end|>"
    assert official.token_bytes(200006) == official.token_bytes(10**9) == b""


def test_lone_surrogates_are_replaced_and_pairs_joined(official):
    assert official.decode(official.encode("a\ud83d b\ude00 \ud83d\ude00")) == "a\ufffd b\ufffd 😀"
    assert official._encode_slowly("\ud83d\ude00") == official.encode("😀")


@pytest.mark.parametrize("text", [" " * 10**6 + "x", " \t" * 500_000 + "\n\ny", "a" * 10**6])
def test_a_million_of_the_same_is_neither_quadratic_nor_fatal(official, oracle, text):
    """tiktoken panics on a million spaces (its regex engine's backtracking stack)."""
    ids = official.encode(text)
    assert ids == oracle.encode(text, add_special_tokens=False).ids


def test_long_runs_are_found_wherever_they_start(official):
    for start in (1, LONG_RUN - 1):
        text = "x" * start + " " * 10**6 + "y"
        assert official.decode(official.encode(text)) == text


def test_a_tiny_vocabulary_with_its_own_pattern(tmp_path):
    tokenizer = Tokenizer.from_file(written(tmp_path, tiny()))
    assert tokenizer.encode("hé <|end|>") == list("hé <|end|>".encode())
    assert tokenizer.special == {"<|start|>": 256, "<|end|>": 257, "<|call|>": 300}
    assert tokenizer.vocab_size == 301 and tokenizer.token_bytes(280) == b"", "unused ids are allowed"


def test_control_tokens_listed_in_the_vocabulary_too_are_not_text(tmp_path):
    data = tiny()
    data["model"]["vocab"] |= {"<|start|>": 256}
    assert Tokenizer.from_file(written(tmp_path, data)).encode("<|start|>") == list(b"<|start|>")


def test_merges_spelled_as_strings_are_read(tmp_path):
    data = tiny()
    data["model"] |= {"vocab": data["model"]["vocab"] | {"ab": 258}, "merges": ["a b"], "ignore_merges": False}
    assert Tokenizer.from_file(written(tmp_path, data)).encode("xab") == [ord("x"), 258]


def _unordered(data: dict[str, Any]) -> None:
    data["model"] |= {"vocab": data["model"]["vocab"] | {"ab": 258, "cd": 259}, "merges": [["c", "d"], ["a", "b"]]}


def _incomplete(data: dict[str, Any]) -> None:
    more = {"ab": 258, "bc": 259, "abc": 260}  # a + bc is not listed, yet tiktoken would merge it
    merges = [["a", "b"], ["b", "c"], ["ab", "c"]]
    data["model"] |= {"vocab": data["model"]["vocab"] | more, "merges": merges, "ignore_merges": False}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data["model"].update(type="Unigram"), "model is 'Unigram'"),
        (lambda data: data.update(normalizer={"type": "NFC"}), "normalises"),
        (lambda data: data.update(pre_tokenizer={"type": "Metaspace"}), "Metaspace"),
        (lambda data: data["model"]["vocab"].pop("a"), "no token for byte 97"),
        (lambda data: data["model"]["vocab"].update(a=98), "share an id"),
        (lambda data: data.pop("model"), "unexpected structure: KeyError"),
        (lambda data: data.update(model=[]), "unexpected structure"),
        (lambda data: data["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="("), "missing"),
        (_unordered, "not in the order"),
        (_incomplete, "lists 3 merges where its tokens allow 4"),
    ],
)
def test_another_kind_of_tokenizer_is_refused_with_its_reason(tmp_path, change, reason):
    data = tiny()
    change(data)
    with pytest.raises(CheckpointError, match="tokenizer.json is not a byte-level BPE") as caught:
        Tokenizer.from_file(written(tmp_path, data))
    assert reason in str(caught.value) and "download it again" in str(caught.value)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer.json is missing"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="tokenizer.json is not valid JSON"):
        Tokenizer.from_file(written(tmp_path, '{"model": '))
