"""The parser: what the cases say, the same however the ids are cut, nothing lost, and no input that makes it raise."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplellm.text.harmony import HarmonyMessage, encode
from simplellm.text.parser import (
    HEADER_LIMIT,
    ContentDelta,
    Delta,
    Message,
    Parser,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    fold,
    stop_ids,
)
from simplellm.text.tokenizer import Tokenizer
from tests import vocab

CASES = [json.loads(path.read_text()) for path in sorted((Path(__file__).parent.parent / "cases").glob("h*.json"))]
SEQUENCES = [(case, sequence["ids"]) for case in CASES for sequence in case["input"]["sequences"]]
TOOLS = {"get_weather", "python", "f"}
MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"]
WORDS = ["assistant", "analysis", "commentary", "final", " to=functions.f", "to=", " json", "user", " to=python", " code"]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of text in which marker names stand for control tokens."""
    ids: list[int] = []
    while text:
        at, marker = min(((text.find(m), m) for m in MARKERS if m in text), default=(len(text), ""))
        ids += tokenizer.encode(text[:at]) + ([tokenizer.special[marker]] if marker else [])
        text = text[at + len(marker) :]
    return ids


def numbered() -> Any:
    return (f"id{i}" for i in itertools.count()).__next__


def parse(tokenizer: Tokenizer, ids: list[int], cuts: list[int] | None = None, **options: Any) -> tuple[Parser, list[Delta]]:
    """Push `ids` in pieces of the given sizes, over and over; call ids are id0, id1, ..."""
    parser = Parser(tokenizer, **{"tools": TOOLS, "new_id": numbered()} | options)
    deltas, at = [], 0
    for size in itertools.cycle(cuts or [len(ids) + 1]):
        deltas += parser.push(ids[at : at + size])
        at += size
        if at >= len(ids):
            return parser, deltas + parser.finish()
    raise AssertionError("cuts must be given")


def outcome(parser: Parser, deltas: list[Delta]) -> Any:
    return fold(deltas), parser.repairs, parser.stopped, parser.finish_kind, parser.reasoning_tokens


def answer(tokenizer: Tokenizer, text: str, **options: Any) -> tuple[Message, Parser]:
    parser, deltas = parse(tokenizer, ids_of(tokenizer, text), **options)
    return fold(deltas), parser


def test_the_cases_are_all_here():
    assert len(CASES) == 9 and len(SEQUENCES) == 11


@pytest.mark.parametrize(("case", "ids"), SEQUENCES, ids=[case["id"] for case, _ in SEQUENCES])
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["declared", "unchecked"])
def test_shared_cases(official, case, ids, tools):
    parser, deltas = parse(official, ids, tools=tools)
    message, expect = fold(deltas), case["expect"][0]
    call = message.tool_calls[0] if message.tool_calls else None
    checks = {
        "never_raises": lambda _: True,
        "reasoning": lambda want: message.reasoning == want,
        "reasoning_contains": lambda want: all(text in message.reasoning for text in want),
        "content": lambda want: message.content == want,
        "content_not_contains": lambda want: not any(text in message.content for text in want),
        "tool_calls": lambda want: len(message.tool_calls) == want,
        "tool_name": lambda want: call is not None and call.name == want,
        "tool_args": lambda want: call is not None and json.loads(call.arguments) == want,
        "tool_args_raw": lambda want: call is not None and call.arguments == want,
        "no_tool_name_contains": lambda want: not any(want in each.name for each in message.tool_calls),
        "distinct_ids": lambda _: len({each.id for each in message.tool_calls}) == len(message.tool_calls),
        "indexes": lambda want: [delta.index for delta in deltas if isinstance(delta, ToolCallStart)] == want,
        "finish_reason": lambda want: parser.finish_kind == want,
    }
    failed = [key for key, want in expect.items() if key != "check" and not checks[key](want)]
    assert not failed, (failed, message)


def test_two_calls_count_as_one_without_parallel_tool_calls(official):
    (ids,) = (ids for case, ids in SEQUENCES if case["id"].startswith("h18"))
    parser, deltas = parse(official, ids, parallel_tool_calls=False)
    assert [call.arguments for call in fold(deltas).tool_calls] == ['{"city":"Oslo"}']
    assert parser.stopped and parser.finish_kind == "tool_calls"
    more = ids_of(official, "<|start|>assistant<|channel|>final<|message|>and")
    assert fold(parse(official, ids[:19] + more, parallel_tool_calls=False)[1]).content == ""
    assert fold(parse(official, ids[:19] + more)[1]).content == "and"


messages = st.lists(
    st.tuples(
        st.sampled_from(["analysis", "commentary", "call", "analysis call"]),
        st.text(min_size=1) | st.sampled_from(["<|end|>", '{"a": "é🙂"}', "\n\n", "to=functions.f"]),
    ),
    max_size=5,
)


@settings(max_examples=300, deadline=None)
@given(messages, st.text(min_size=1), st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_what_the_renderer_writes_is_read_back(official, spoken, last, cuts):
    harmony, want = [], Message()
    fields: dict[str, list[str]] = {"analysis": [], "commentary": [], "call": []}
    for kind, text in spoken:
        channel, is_call = ("analysis" if "analysis" in kind else "commentary"), "call" in kind
        fields["call" if is_call else channel].append(text.encode("utf-8", "replace").decode())
        harmony.append(HarmonyMessage("assistant", text, "functions.f" if is_call else None, channel))
    harmony.append(HarmonyMessage("assistant", last, None, "final"))
    ids = encode(harmony, official)[2:]  # the prompt ends with <|start|>assistant
    ids[-1] = official.special["<|return|>"]
    parser, deltas = parse(official, ids, cuts)
    want.reasoning = "\n".join(fields["analysis"])
    want.content = "\n".join([*fields["commentary"], last])
    got = fold(deltas)
    assert (got.reasoning, got.content) == (want.reasoning, want.content)
    assert [call.arguments for call in got.tool_calls] == fields["call"]
    assert {call.name for call in got.tool_calls} <= {"f"}
    assert parser.finish_kind == ("tool_calls" if fields["call"] else "stop")
    assert set(parser.repairs) <= {"call_off_channel"}


@st.composite
def sequences(draw: st.DrawFn) -> list[int]:
    """Ids that are often nearly harmony: markers, header words, text, halves of characters, ids without text."""
    tokenizer = vocab.tokenizer()
    pieces = st.one_of(
        st.sampled_from(MARKERS).map(lambda name: [tokenizer.special[name]]),
        st.sampled_from(WORDS).map(tokenizer.encode),
        st.text(max_size=5).map(tokenizer.encode),
        st.integers(0, 255).map(lambda byte: [vocab.ranks()[bytes([byte])]]),
        st.sampled_from([200000, 200018, 201000, 10**7, -1]).map(lambda token: [token]),
    )
    if draw(st.booleans()):
        return [token for piece in draw(st.lists(pieces, max_size=30)) for token in piece]
    ids = list(draw(st.sampled_from(SEQUENCES))[1])
    for _ in range(draw(st.integers(1, 4))):
        at, size = draw(st.integers(0, len(ids))), draw(st.integers(0, 2))
        ids[at : at + size] = draw(pieces)
    return ids


@settings(max_examples=600, deadline=None)
@given(sequences(), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans(), st.sampled_from([TOOLS, None, ()]))
def test_any_ids_parse_alike_however_they_are_cut(official, ids, cuts, parallel, tools):
    options = {"parallel_tool_calls": parallel, "tools": tools}
    whole, deltas = parse(official, ids, **options)
    cut, cut_deltas = parse(official, ids, cuts, **options)
    assert outcome(whole, deltas) == outcome(cut, cut_deltas)
    assert whole.push(ids) == whole.finish() == [], "a finished parser says no more"
    message = fold(deltas)
    assert all(tools is None or call.name in tools for call in message.tool_calls)
    assert not any("<|" in call.name or "\ufffd" in call.name for call in message.tool_calls)
    assert whole.finish_kind == (("tool_calls" if message.tool_calls else "stop") if whole.stopped else None)


HEADER_REPAIRS = {
    *("header_text", "unknown_channel", "undeclared_recipient", "repeated_recipient", "missing_message"),
    *("cut_off_header", "doubled_start", "bare_recipient", "other_author"),
}


def test_no_word_is_lost_in_random_sequences(official):
    """Each word is unique, so that it can be looked for. In a header it may vanish, but then a repair says so."""
    rng = random.Random(3)
    kept = total = 0
    for _ in range(4000):
        words, text = [], ""
        for number in range(rng.randint(1, 25)):
            if rng.random() < 0.45:
                words.append(f" w{number}x")
                text += words[-1]
            else:
                text += rng.choice(MARKERS[:6] + WORDS)
        message, parser = answer(official, text)
        if parser.stopped:  # what follows the end is not part of the answer
            continue
        said = message.reasoning + message.content + "".join(call.arguments for call in message.tool_calls)
        lost = [word for word in words if word.strip() not in said]
        assert not lost or HEADER_REPAIRS & set(parser.repairs), (text, message, parser.repairs)
        in_bodies = [word for part in text.split("<|message|>")[1:] for word in words if word in part.split("<|")[0]]
        assert not {*in_bodies} & {*lost}, (text, message)
        kept, total = kept + len(words) - len(lost), total + len(words)
    assert total > 5000 and kept / total > 0.8


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "repairs"),
    [
        ("Hello there<|return|>", "Hello there", "", {"missing_message", "missing_channel"}),
        ("final answer: 5", "final answer: 5", "", {"cut_off_header", "missing_channel", "unmarked_channel"}),
        ("<|message|>x<|return|>", "x", "", {"missing_channel"}),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}", "", set()),
        ("<|channel|>final json<|message|>{}<|return|>", "{}", "", set()),
        ("<|channel|>final Hello<|return|>", "Hello", "", {"missing_message"}),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>", "b", "a", {"missing_end"}),
        ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", "b", "a", {"missing_end"}),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c<|return|>", "abc", "", {"stray_marker"}),
        ("<|start|>assistant<|channel|>final<|message|>a<|return|>", "a", "", {"doubled_start"}),
        ("<|channel|>musings<|message|>a<|return|>", "", "a", {"unknown_channel"}),
        ("<|channel|>commentary to=user<|message|>a<|end|>", "a", "", set()),
        ("<|channel|>commentary to=functions.nope<|message|>{}<|call|>", "", "{}", {"undeclared_recipient"}),
        ("<|channel|>final to=nobody<|message|>a<|return|>", "a", "", {"undeclared_recipient"}),
        ("<|channel|>final<|message|>a<|endoftext|>", "a", "", set()),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assis", "", "a", {"cut_off_header"}),
        ("<|channel|>analysis<|message|>a<|end|><|start|>user<|message|>b", "", "a", {"other_author"}),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistantfinal<|message|>b", "b", "a", {"unmarked_channel"}),
        ("<|channel|>analysis<|message|>a<|end|><|end|>", "", "a", {"stray_marker"}),
    ],
)
def test_repairs(official, text, content, reasoning, repairs):
    message, parser = answer(official, text)
    assert (message.content, message.reasoning, message.tool_calls) == (content, reasoning, [])
    assert set(parser.repairs) == repairs


@pytest.mark.parametrize(
    ("text", "arguments", "repairs"),
    [
        ("<|channel|>commentary to=f<|message|>{}<|call|>", "{}", {"bare_recipient"}),
        ("<|channel|>commentary to=functions.functions.f<|message|>{}<|call|>", "{}", {"bare_recipient"}),
        ("<|channel|>final to=functions.f<|message|>{}<|call|>", "{}", {"call_off_channel"}),
        (" to=functions.f<|channel|>commentary to=functions.f json<|message|>{}<|call|>", "{}", {"repeated_recipient"}),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|call|>", "", {"missing_message"}),
        ('<|channel|>commentary to=functions.f json {"a":1}<|call|>', '{"a":1}', {"missing_message"}),
        ("<|channel|>commentary to=functions.f<|message|>{}<|return|>", "{}", {"call_not_called"}),
        ("<|channel|>commentary functions.f<|message|>{}<|call|>", "{}", set()),
        ("<|channel|>commentary<|channel|>commentary to=functions.f<|message|>{}<|call|>", "{}", {"repeated_channel"}),
    ],
)
def test_repaired_calls(official, text, arguments, repairs):
    message, parser = answer(official, text)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", arguments)]
    assert set(parser.repairs) == repairs and parser.finish_kind == "tool_calls"


def test_stops_are_return_call_and_end_of_text_but_never_end(official):
    """`<|end|>` as a stop loses the answer; `<|call|>` missing lets the model invent the result."""
    assert stop_ids(official) == {200002, 200012, 199999}
    parser = Parser(official, TOOLS)
    parser.push(ids_of(official, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"))
    parser.push(ids_of(official, "<|end|>"))
    assert not parser.stopped, "the second <|end|> is none either"
    parser.push(ids_of(official, "<|start|>assistant<|channel|>final<|message|>c<|return|>"))
    assert parser.stopped and parser.finish_kind == "stop"


def test_a_message_after_the_final_one_ends_the_answer(official):
    first = "<|channel|>final<|message|>Done.<|end|>"
    message, parser = answer(official, first)
    assert message.content == "Done." and not parser.stopped, "the stop token may still come"
    for more in ("<|start|>assistant<|channel|>final<|message|>Again.", "<|channel|>final<|message|>Again.", "Again."):
        message, parser = answer(official, first + more)
        assert message.content == "Done." and parser.stopped and parser.finish_kind == "stop"
        assert parser.repairs["message_after_final"] == 1


def test_an_empty_final_message_is_no_answer(official):
    message, parser = answer(official, "<|channel|>final<|message|><|end|><|start|>assistant<|channel|>final<|message|>x")
    assert message.content == "x" and not parser.stopped


@pytest.mark.parametrize("case", ["reasoning", "content", "arguments"])
def test_a_cut_off_message_yields_its_text(official, case):
    head = {"reasoning": "analysis", "content": "final", "arguments": "commentary to=functions.f"}[case]
    message, parser = answer(official, f"<|channel|>{head}<|message|>{{")
    said = {"reasoning": message.reasoning, "content": message.content}
    said["arguments"] = "".join(call.arguments for call in message.tool_calls)
    assert said == dict.fromkeys(said, "") | {case: "{"}
    assert not parser.stopped and parser.finish_kind is None and not parser.repairs


def test_a_character_cut_in_half_ends_as_a_replacement(official):
    ids = ids_of(official, "<|channel|>final<|message|>𝟘")[:-1]
    parser, deltas = parse(official, ids, [1])
    assert fold(deltas).content == "\ufffd" and "\ufffd" not in "".join(d.text for d in deltas[:-1])


def test_a_long_answer_without_a_header_streams(official):
    """It is held back only until it cannot be a header."""
    text = "🙂é" * HEADER_LIMIT
    parser = Parser(official, TOOLS)
    deltas = [delta for token in official.encode(text) for delta in parser.push([token])]
    assert len(deltas) > 10 and fold(deltas + parser.finish()).content == text


def test_a_character_across_the_header_limit_stays_whole(official):
    ranks = vocab.ranks()
    parts = [ranks[b" \xf0\x9f"], ranks[b"\x99"], ranks[b"\x82"]]
    parser, deltas = parse(official, official.encode("a" * HEADER_LIMIT) + parts, [1])
    assert fold(deltas).content == "a" * HEADER_LIMIT + " 🙂"


def test_an_endless_header_is_shown_rather_than_lost(official):
    message, _ = answer(official, "<|channel|>commentary to=functions." + "x" * HEADER_LIMIT + " and more")
    assert message.reasoning.endswith("x and more")


def test_streams_piece_by_piece_and_the_name_once(official):
    text = "<|channel|>analysis<|message|>So so.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>"
    parser = Parser(official, TOOLS)
    kinds = Counter(type(d) for token in ids_of(official, text + '{"a": [1, 2]}<|call|>') for d in parser.push([token]))
    assert kinds[ToolCallStart] == 1 and kinds[ToolCallArguments] > 3 and kinds[ReasoningDelta] == 3
    assert kinds[ContentDelta] == 0 and parser.reasoning_tokens == 3


def test_call_ids_differ_between_parsers(official):
    ids = ids_of(official, "<|channel|>commentary to=functions.f<|message|>{}<|call|>")
    calls = [fold(Parser(official, TOOLS).push(ids)).tool_calls[0].id for _ in range(3)]
    assert len(set(calls)) == 3 and all(call.startswith("call_") for call in calls)


def test_a_tiny_vocabulary_parses_the_same(tmp_path):
    """One token per byte: headers are long, names arrive letter by letter."""
    letters = {letter: byte for byte, letter in enumerate(vocab.byte_letters())}
    added = {300 + i: name for i, name in enumerate(MARKERS)}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(vocab.byte_level(letters, [], added, r"\s+|\S+")))
    text = "<|channel|>analysis<|message|>é<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    message, parser = answer(Tokenizer.from_file(path), text + "<|constrain|>json<|message|>{}<|call|>")
    assert message.reasoning == "é" and [call.name for call in message.tool_calls] == ["get_weather"]
    assert not parser.repairs and parser.finish_kind == "tool_calls"
