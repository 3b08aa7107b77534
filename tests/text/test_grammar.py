"""Masks: whatever is drawn under one is valid, holds no marker, and ends in the way that was asked for."""

from __future__ import annotations

import json
import pickle
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import jsonschema
import pytest

from simplellm.errors import EngineError, RequestError
from simplellm.text import grammar as grammar_module
from simplellm.text.grammar import AnswerGrammar, Call, Grammars, Rules
from simplellm.text.masks import ANY_OBJECT, ConstrainedText, Source
from simplellm.text.parser import Parser, fold
from tests import drawing, vocab
from tests.chat import script
from tests.drawing import allowed, draw

V = drawing.VOCAB_SIZE
ROOM = 10**6


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return drawing.grammars()


def special(name: str) -> int:
    return vocab.tokenizer().special[name]


def walk(grammar: AnswerGrammar, rng: random.Random, limit: int = 300, haste: float = 0.3) -> list[int]:
    """Ids drawn at random until the answer ends, at most `limit`."""
    ids: list[int] = []
    while len(ids) < limit and not (ids and ids[-1] in (special("<|return|>"), special("<|call|>"))):
        grammar.advance(ids[grammar.num_tokens :])
        while (mask := grammar.mask(ROOM)) is None:
            time.sleep(0.001)
        assert len(mask) == V // 8
        ids.append(draw(mask, rng, haste))
    return ids


def content_of(ids: list[int]) -> str:
    return fold(Parser(vocab.tokenizer(), set()).push(ids)).content


def after(grammars: Grammars, rules: Rules, text: str) -> list[int]:
    """What may follow `text`, taken in token by token as an engine does."""
    grammars.check(rules)
    grammar = grammars.new(rules)
    for token in script(text):
        assert grammar.mask(ROOM) is not None
        grammar.advance([token])
    mask = grammar.mask(ROOM)
    assert mask is not None
    return allowed(mask)


def spelled(ids: list[int]) -> set[str]:
    return {vocab.tokenizer().decode([token], skip_special=False) for token in ids}


def json_rules(schema: Any, **fields: Any) -> Rules:
    return Rules(content=Source.of_schema(schema, "response_format"), **fields)


def call(name: str, schema: Any = None, strict: bool = False) -> Call:
    return Call(name, ANY_OBJECT if schema is None else Source.of_schema(schema, "tools"), "tools", strict)


THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
}
SCHEMAS = {
    "city": {"type": "object", "properties": {"country": {"type": "string"}, "capital": {"type": "string"}}}
    | {"required": ["country", "capital"], "additionalProperties": False},
    "nested": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Nested",
        "type": "object",
        "properties": {
            "who": {"type": "object", "properties": {"näme": {"type": "string", "minLength": 1}}, "required": ["näme"]},
            "list": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}, "maxItems": 3},
        },
        "required": ["who", "list"],
    },
    "enums": {"type": "object", "properties": {"e": {"enum": ["ja", "größer", "<|end|>", 7, None]}, "c": {"const": "日本"}}}
    | {"required": ["e", "c"]},
    "numbers": {
        "type": "object",
        "properties": {
            "i": {"type": "integer", "minimum": -5, "maximum": 130},
            "x": {"type": "number", "exclusiveMinimum": 0},
            "m": {"type": "integer", "multipleOf": 7},
        },
        "required": ["i", "x", "m"],
        "additionalProperties": False,
    },
    "any of": {
        "type": "array",
        "items": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}, NODE["properties"]["v"]]},
    }
    | {"minItems": 1, "maxItems": 4},
    "one of": {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in ("a", "b")]},
    "recursive": {"$defs": {"n": NODE | {"required": ["v", "next"], "additionalProperties": False}}, "$ref": "#/$defs/n"},
    "pattern": {"type": "string", "pattern": "^[a-zé]{2,5}-[0-9]+$"},
    "format": {"type": "object", "properties": {"d": {"type": "string", "format": "date"}}, "required": ["d"]},
    "all of": {"allOf": [{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}]},
    "object": {"type": "object"},
    "anything": {},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_follows_the_schema(grammars: Grammars, name: str) -> None:
    """A model that draws at random cannot break it, cannot write a marker, and stops when it is complete."""
    schema = SCHEMAS[name]
    rules = json_rules(schema)
    grammars.check(rules)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    num_ended = 0
    for seed in range(8):
        ids = walk(grammars.new(rules), random.Random(seed))
        if ids[-1] != special("<|return|>"):
            continue
        num_ended += 1
        parser = Parser(vocab.tokenizer(), set())
        validator.validate(json.loads(fold(parser.push(ids)).content))
        assert not parser.repairs and parser.finish_kind == "stop"
    assert num_ended >= 5


def test_reasoning_is_free_and_only_its_end_leads_out(grammars: Grammars) -> None:
    """A grammar applied from the first token on keeps the model from thinking (vllm 23120)."""
    free = set(after(grammars, json_rules(SCHEMAS["city"]), "<|channel|>analysis<|message|>Well"))
    tokenizer = vocab.tokenizer()
    assert free == {token for token in range(V) if tokenizer.token_bytes(token)} | {special("<|end|>")}


def test_the_way_from_reasoning_to_the_answer_is_one_track(grammars: Grammars) -> None:
    rules = json_rules(SCHEMAS["city"])
    assert spelled(after(grammars, rules, "")) == {"<|channel|>"}
    assert spelled(after(grammars, rules, "<|channel|>")) == {"analysis", "final"}
    assert spelled(after(grammars, rules, "<|channel|>analysis<|message|>Hm.<|end|>")) == {"<|start|>"}
    assert spelled(after(grammars, rules, "<|channel|>analysis<|message|>Hm.<|end|><|start|>")) == {"assistant"}
    assert spelled(after(grammars, rules, THINK)) == {"<|channel|>"}
    assert spelled(after(grammars, rules, f"{THINK}<|channel|>final")) == {"<|message|>", " ", "<|constrain|>", " json"}
    assert spelled(after(grammars, rules, f"{THINK}<|channel|>final<|message|>")) == {'{"'}
    done = f'{THINK}<|channel|>final <|constrain|>json<|message|>{{"country": "I","capital":"R"}}'
    assert spelled(after(grammars, rules, done)) == {"<|return|>"}


def test_reasoning_messages_before_a_constrained_answer_are_bounded(grammars: Grammars) -> None:
    """Kept from answering as it likes, a model could think until the budget is gone."""
    rules = json_rules(SCHEMAS["city"])
    assert "analysis" in spelled(after(grammars, rules, THINK * 3 + "<|channel|>"))
    assert spelled(after(grammars, rules, THINK * 4 + "<|channel|>")) == {"final"}
    assert "analysis" in spelled(after(grammars, Rules(calls=(call("f", strict=True),)), THINK * 9 + "<|channel|>"))


def test_a_demanded_call_leaves_no_other_way(grammars: Grammars) -> None:
    rules = Rules(calls=(call("get_weather"), call("get")), final=False)
    first = spelled(after(grammars, rules, THINK))
    assert first == {"<|channel|>", " to"}
    assert spelled(after(grammars, rules, f"{THINK}<|channel|>")) == {"analysis", "comment"}
    assert spelled(after(grammars, rules, f"{THINK}<|channel|>commentary")) == {" to"}
    named = after(grammars, rules, f"{THINK}<|channel|>commentary to=functions.get")
    assert spelled(named) == {"_weather", "<|message|>", " ", "<|constrain|>", " json"}
    assert spelled(after(grammars, rules, f"{THINK} to=functions.get")) == {"_weather", "<|channel|>"}
    arguments = f"{THINK} to=functions.get<|channel|>commentary <|constrain|>json<|message|>"
    assert spelled(after(grammars, rules, arguments)) >= {"{", "{}"}
    assert spelled(after(grammars, rules, arguments + "{}")) == {"<|call|>"}


def test_every_random_turn_calls_a_declared_function_with_valid_arguments(grammars: Grammars) -> None:
    schemas = {"add": SCHEMAS["numbers"], "find-it": SCHEMAS["city"], "no_arguments": {"type": "object", "maxProperties": 0}}
    rules = Rules(calls=tuple(call(name, schema) for name, schema in schemas.items()), final=False)
    grammars.check(rules)
    called = set()
    for seed in range(30):
        ids = walk(grammars.new(rules), random.Random(seed), limit=2000)
        parser = Parser(vocab.tokenizer(), set(schemas))
        (made,) = fold(parser.push(ids)).tool_calls
        jsonschema.validate(json.loads(made.arguments), schemas[made.name])
        assert not parser.repairs and parser.finish_kind == "tool_calls" and ids[-1] == special("<|call|>")
        called.add(made.name)
    assert called == set(schemas)


def test_with_a_strict_function_everything_else_stays_possible(grammars: Grammars) -> None:
    rules = Rules(calls=(call("f", SCHEMAS["city"], strict=True),))
    assert spelled(after(grammars, rules, "<|channel|>")) == {"analysis", "comment", "final"}
    preamble = after(grammars, rules, "<|channel|>commentary<|message|>I look")
    assert special("<|end|>") in preamble and special("<|return|>") not in preamble
    final = after(grammars, rules, "<|channel|>final<|message|>It is")
    assert special("<|return|>") in final and special("<|end|>") not in final and len(final) > 199_000
    header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    assert spelled(after(grammars, rules, header)) == {'{"'}


@pytest.mark.parametrize(("calls", "way"), [((), "final"), ((call("f"),), "commentary to=functions.f")])
def test_near_the_end_of_the_budget_reasoning_is_closed_and_answered(grammars: Grammars, calls: Any, way: str) -> None:
    """Cut off while it thinks, an answer is empty (vllm 41902)."""
    rules = Rules(calls, final=not calls, reserve=32)
    grammars.check(rules)
    grammar, rng, ids = grammars.new(rules), random.Random(0), script("<|channel|>analysis<|message|>")
    for token in ids:
        grammar.mask(ROOM)
        grammar.advance([token])
    for room in range(100, 0, -1):
        ids.append(draw(grammar.mask(room) or b"", rng, haste=0 if room > 32 else 1))
        grammar.advance(ids[-1:])
        if ids[-1] in (special("<|return|>"), special("<|call|>")):
            break
    answer = script("<|end|><|start|>assistant<|channel|>" + way)
    start = len(ids[:3]) + 68
    assert ids.index(special("<|end|>")) == start
    assert ids[start : start + len(answer)] in (
        answer,
        script("<|end|><|start|>assistant to=functions.f<|channel|>")[: len(answer)],
    )


def test_regex_and_grammar(grammars: Grammars) -> None:
    for source, accepts in (
        (Source("regex", "[ab]{3}|ü"), lambda text: text == "ü" or (len(text) == 3 and set(text) <= set("ab"))),
        (Source("grammar", 'start: "x" (" y")+'), lambda text: text.split(" ")[0] == "x" and set(text.split(" ")[1:]) == {"y"}),
    ):
        rules = Rules(content=source)
        grammars.check(rules)
        for seed in range(5):
            ids = walk(grammars.new(rules), random.Random(seed))
            assert accepts(content_of(ids)), content_of(ids)


def test_a_grammar_cannot_ask_for_a_marker(grammars: Grammars) -> None:
    """llguidance's grammars can name control tokens; content never holds one."""
    rules = Rules(content=Source("grammar", 'start: "a" <|call|> "b"'))
    grammars.check(rules)
    grammar = grammars.new(rules)
    grammar.advance(script("<|channel|>final<|message|>a"))
    with pytest.raises(EngineError, match="no token can follow"):
        grammar.mask(ROOM)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "objct"}, "objct"),
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "object", "if": {}, "then": {}}, '"if", "then"'),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"type": "string", "format": "xyz"}, "xyz"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "string", "pattern": "(a"}, "unclosed"),
        ({"x-guidance": {"lenient": True}, "not": {}}, '"not"'),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(grammars: Grammars, schema: Any, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        grammars.check(json_rules(schema))
    assert refused.value.field == "response_format" and says in refused.value.problem and "<state>" not in refused.value.problem
    with pytest.raises(RequestError, match="cannot be compiled"):
        grammars.check(Rules(calls=(call("f", schema, strict=True),)))
    grammars.check(Rules(calls=(call("f", schema),)))  # not strict: any object


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (True, "not a JSON object"),
        ({"const": "x" * 200_001}, "at most 200000"),
        ({"enum": [float("nan")]}, "not JSON"),
        ({"enum": [{1, 2}]}, "not JSON"),
    ],
)
def test_what_is_no_schema_is_refused(schema: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Source.of_schema(schema, "response_format")


def test_a_deep_schema_is_refused_before_it_can_overflow_a_stack() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested more than 100"):
        Source.of_schema(schema, "response_format")


def test_too_many_properties_fail_at_the_door_not_in_the_answer(grammars: Grammars) -> None:
    """Two thousand that may come in any number are more than a matcher follows; it says so only once it is asked."""
    with pytest.raises(RequestError, match="cannot be compiled: .*2000"):
        grammars.check(json_rules({"type": "object", "properties": {f"p{i}": {} for i in range(2500)}}))


class ByHand(Executor):
    """Runs what it is given when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        self.waiting.append((future, work))
        return future

    def run(self) -> None:
        for future, work in self.waiting:
            future.set_result(work())
        self.waiting.clear()


def test_large_schemas_are_masked_beside_the_engine(grammars: Grammars) -> None:
    """Their masks may take long: until one is there, the row sits out and nobody waits."""
    schema = {"enum": [f"value number {i}" for i in range(1500)]}
    rules = json_rules(schema)
    turn, by_hand = grammars.start(rules).result(), ByHand()
    body = turn.answers[special("<|channel|>")][vocab.tokenizer().encode("final")[0]][special("<|message|>")]
    text = ConstrainedText(turn.vocabulary, body.compiled, body.end, by_hand)
    for _ in range(3):
        assert text.mask() is None and text.mask() is None and len(by_hand.waiting) == 1
        by_hand.run()
        mask = text.mask()
        assert mask is not None
        text.advance(allowed(mask)[0])
    assert json.loads(content_of(walk(grammars.new(rules), random.Random(0)))) in schema["enum"]


class Stuck:
    """Stands for a schema that never gets ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.release = threading.Event()
        monkeypatch.setattr("simplellm.text.masks.Vocabulary.compile", lambda *_: self.release.wait(30))


def test_compiling_is_bounded_in_time_and_its_rows_sit_out(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.01)
    rules = json_rules({"const": "never seen"})
    try:
        with pytest.raises(RequestError, match="response_format: not compiled within 0.01 s"):
            grammars.check(rules)
        assert grammars.new(rules).mask(ROOM) is None
    finally:
        stuck.release.set()


def test_what_masks_forbid_fails_this_answer(grammars: Grammars) -> None:
    """It cannot happen but by a fault elsewhere, and then must not pass as valid."""
    grammars.check(json_rules(SCHEMAS["city"]))
    for text in ("<|channel|>final<|message|>no JSON", "<|message|>", f"{THINK}<|channel|>commentary", THINK[:-9]):
        grammar = grammars.new(json_rules(SCHEMAS["city"]))
        with pytest.raises(EngineError):
            grammar.advance([*script(text), special("<|call|>")])
            grammar.mask(ROOM)


def test_rules_travel(grammars: Grammars) -> None:
    """A server's front checks them, its engine compiles them, in another process."""
    rules = Rules((call("f", SCHEMAS["city"], strict=True),), False, ANY_OBJECT, reserve=20)
    again = pickle.loads(pickle.dumps(rules))
    assert again == rules and grammars.start(again) is grammars.start(rules)


def test_rules_compile_once(grammars: Grammars) -> None:
    first, second = json_rules({"const": 1}), json_rules({"const": 1})
    assert grammars.start(first) is grammars.start(second)
