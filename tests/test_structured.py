"""Answers under a grammar through the whole engine, from a model that draws at random what the masks allow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from simplellm.errors import EngineError, RequestError
from simplellm.generation import Output
from simplellm.text.grammar import AnswerGrammar
from simplellm.text.masks import Vocabulary
from simplellm.text.response_format import SHOWN_WHOLE
from simplellm.text.schema import compact_json
from tests import vocab
from tests.chat import FINAL, NEXT, THINK, USER, chat_settings, check_chunks, script, told, wait_until_idle
from tests.drawing import RandomLLM

CITY = {
    "type": "object",
    "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
NUMBER = {"type": "integer", "minimum": -999, "maximum": 999}
PAIR = {"type": "object", "properties": {"x": NUMBER, "y": NUMBER}, "required": ["x", "y"], "additionalProperties": False}


def json_schema(schema: Any, name: str = "city", **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema, **fields}}


def tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool("get_weather", CITY), tool("add", PAIR)]
FORMATS = {"json_schema": (json_schema(CITY), CITY), "json_object": ({"type": "json_object"}, {"type": "object"})}


@pytest.fixture(scope="module", params=[0, 1], ids=["lag 0", "lag 1"])
def llm(request: pytest.FixtureRequest) -> Iterator[RandomLLM]:
    with RandomLLM(lag=request.param, max_running=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def lag1() -> Iterator[RandomLLM]:
    with RandomLLM() as llm:
        yield llm


def ask(llm: RandomLLM, messages: Any = USER, **settings: Any) -> Output:
    """Asked both ways, which must say the same; the engine is left empty."""
    settings = {"max_tokens": 600, "seed": 1} | settings
    (output,) = llm.chat(messages, **settings).result(60)
    stream = llm.chat_stream(messages, **settings)
    chunks = list(stream)
    check_chunks(chunks, stream.outputs or [])
    assert stream.outputs and list(map(told, stream.outputs[0].choices)) == list(map(told, output.choices))
    wait_until_idle(llm)
    assert not llm._engine.worker.loop.masks, "a mask source outlives its request"
    for choice in output.choices:
        assert not choice.repairs
        assert not any(marker in choice.content + choice.reasoning for marker in ("<|", "functions."))
    return output


@pytest.mark.parametrize("kind", FORMATS)
def test_content_follows_the_format_after_free_reasoning(llm: RandomLLM, kind: str) -> None:
    response_format, schema = FORMATS[kind]
    output = ask(llm, response_format=response_format, n=6)
    ended = [choice for choice in output.choices if choice.finish_reason == "stop"]
    for choice in ended:
        jsonschema.validate(json.loads(choice.content), schema)
    assert len(ended) >= 4 and any(choice.reasoning for choice in ended)
    assert len({choice.content for choice in ended}) > 1


def test_an_earlier_answer_in_the_prompt_does_not_count(lag1: RandomLLM) -> None:
    """Case s02: a final marker inside the prompt must not count as the end of reasoning, and the schema holds in every turn."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of Italy?"},
        {"role": "assistant", "content": "Rome."},
        {"role": "user", "content": "And of Spain? Answer as JSON."},
    ]
    for turn in range(3):
        output = ask(lag1, messages, response_format=json_schema(CITY), seed=turn + 2)
        jsonschema.validate(json.loads(output.content), CITY)
        messages += [{"role": "assistant", "content": output.content}, {"role": "user", "content": "And of France?"}]


def test_required_always_yields_a_call_of_a_declared_function(llm: RandomLLM) -> None:
    output = ask(llm, tools=TOOLS, tool_choice="required", n=8)
    schemas, called = {"get_weather": CITY, "add": PAIR}, set()
    for choice in output.choices:
        assert choice.finish_reason == "tool_calls" and choice.content == ""
        (call,) = choice.tool_calls
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        called.add(call.name)
    assert called == set(schemas)


def test_named_yields_a_call_of_that_function(llm: RandomLLM) -> None:
    output = ask(llm, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}}, n=4)
    for choice in output.choices:
        assert choice.finish_reason == "tool_calls"
        assert [call.name for call in choice.tool_calls] == ["add"]
        jsonschema.validate(json.loads(choice.tool_calls[0].arguments), PAIR)


def test_a_strict_function_gets_valid_arguments_under_auto(lag1: RandomLLM) -> None:
    """And a function without strict in the same call any object, if its schema cannot be compiled."""
    tools = [tool("add", PAIR, strict=True), tool("odd", {"not": {"type": "string"}})]
    output = ask(lag1, tools=tools, n=24, max_tokens=200)
    called = [call for choice in output.choices for call in choice.tool_calls if choice.finish_reason == "tool_calls"]
    assert {call.name for call in called} == {"add", "odd"}
    for call in called:
        jsonschema.validate(json.loads(call.arguments), PAIR if call.name == "add" else {"type": "object"})
    assert {choice.finish_reason for choice in output.choices} >= {"stop", "tool_calls"}


def test_a_format_beside_tools_allows_either(lag1: RandomLLM) -> None:
    output = ask(lag1, tools=TOOLS, response_format=json_schema(PAIR), n=16)
    kinds = set()
    for choice in output.choices:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.content), PAIR)
    assert kinds >= {"stop", "tool_calls"}


def test_none_never_calls(lag1: RandomLLM) -> None:
    output = ask(lag1, tools=TOOLS, tool_choice="none", response_format=json_schema(PAIR), n=8)
    assert all(not choice.tool_calls for choice in output.choices)


@pytest.mark.parametrize("settings", [{}, {"num_pages": 12}])
def test_rows_without_a_mask_do_not_notice(settings: dict[str, Any]) -> None:
    """Free answers are the same with constrained ones beside them, also where these must preempt each other."""
    with RandomLLM(max_running=8, max_context=1024, **settings) as llm:
        llm.play(script(THINK + NEXT + FINAL))
        alone = llm.chat([USER] * 6).result(30)
        free = llm.chat([USER] * 6)
        bound = llm.chat([USER] * 6, tools=TOOLS, tool_choice="required", max_tokens=300, seed=list(range(6)))
        late = llm.chat([USER] * 6)
        for outputs in (free.result(30), late.result(30)):
            assert [told(o.choices[0]) for o in outputs] == [told(o.choices[0]) for o in alone]
        crowded = bound.result(60)
        one_by_one = [
            llm.chat(USER, tools=TOOLS, tool_choice="required", max_tokens=300, seed=seed).result(30)[0] for seed in range(6)
        ]
        assert [told(o.choices[0]) for o in crowded] == [told(o.choices[0]) for o in one_by_one]
        wait_until_idle(llm)


def test_preempted_answers_are_what_they_are_alone() -> None:
    """A grammar follows what is known of a request's tokens, not the steps in which they came."""
    with RandomLLM(max_running=8, max_context=1024, num_pages=9) as llm:
        settings = {"response_format": json_schema({"type": "array", "items": CITY, "minItems": 9}), "max_tokens": 200}
        together = llm.chat([USER] * 6, seed=list(range(6)), **settings).result(60)
        assert llm._engine.scheduler.num_preemptions > 0
        alone = [llm.chat(USER, seed=seed, **settings).result(60)[0] for seed in range(6)]
        assert [told(o.choices[0]) for o in together] == [told(o.choices[0]) for o in alone]


def test_a_slow_grammar_holds_up_nobody(lag1: RandomLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case s04: compiled off the loop. Others answer while it is compiled; then it answers, too."""
    release, began, compiled = threading.Event(), threading.Event(), Vocabulary.compile

    def compile_late(self: Vocabulary, source: Any) -> Any:
        began.set()
        assert release.wait(30)
        return compiled(self, source)

    monkeypatch.setattr(Vocabulary, "compile", compile_late)
    slow: list[Any] = []
    schema = {"const": "slow"}
    thread = threading.Thread(target=lambda: slow.append(ask(lag1, response_format=json_schema(schema))))
    thread.start()
    assert began.wait(30)
    lag1.play(script(FINAL))
    assert lag1.chat(USER).result(30)[0].content == "It is cold."
    assert not slow
    release.set()
    thread.join(30)
    assert json.loads(slow[0].content) == "slow"


def test_a_request_whose_rules_are_not_compiled_sits_out(lag1: RandomLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose front has checked the rules compiles them anew: until then the row waits, the others run."""
    release, compiled = threading.Event(), Vocabulary.compile
    monkeypatch.setattr(Vocabulary, "compile", lambda *given: release.wait(30) and compiled(*given))
    monkeypatch.setattr(lag1._grammars, "check", lambda rules: None)
    waiting = lag1.chat(USER, response_format=json_schema({"const": "late"}), max_tokens=100, seed=1)
    lag1.play(script(FINAL))
    assert lag1.chat([USER] * 3).result(30)[2].content == "It is cold."
    assert not waiting.done()
    release.set()
    assert json.loads(waiting.result(30)[0].content) == "late"
    bad = lag1.chat(USER, response_format=json_schema({"not": {}}))  # nobody has checked it
    with pytest.raises(EngineError, match="response_format: cannot be compiled"):
        bad.result(30)
    wait_until_idle(lag1)


def test_a_failing_grammar_fails_its_own_request(lag1: RandomLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = lag1.chat(USER, response_format=json_schema(CITY), max_tokens=600, seed=1)
    assert healthy.result(30)[0].content
    mask = AnswerGrammar.mask

    def fail(self: AnswerGrammar, room: int) -> bytes | None:
        if self.num_tokens == 5:
            raise EngineError("too complex")
        return mask(self, room)

    monkeypatch.setattr(AnswerGrammar, "mask", fail)
    lag1.play(script(THINK + NEXT + FINAL))
    free = lag1.chat([USER] * 3)
    with pytest.raises(EngineError, match="too complex"):
        lag1.chat(USER, response_format=json_schema(CITY), max_tokens=600, seed=1).result(30)
    with pytest.raises(EngineError, match="too complex"):
        list(lag1.chat_stream(USER, response_format=json_schema(CITY), max_tokens=600, seed=1))
    assert all(output.content == "It is cold." for output in free.result(30))
    wait_until_idle(lag1)
    assert not lag1._engine.worker.loop.masks


def test_the_other_answers_of_a_failed_call_are_not_sampled_on(lag1: RandomLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, failing = AnswerGrammar.mask, list[AnswerGrammar]()

    def fail(self: AnswerGrammar, room: int) -> bytes | None:
        if self.num_tokens == 5 and (not failing or self in failing):
            failing.append(self)
            raise EngineError("too complex")
        return mask(self, room)

    monkeypatch.setattr(AnswerGrammar, "mask", fail)
    with pytest.raises(EngineError, match="too complex"):
        lag1.chat(USER, response_format={"type": "regex", "regex": "[a-z]{100000}"}, n=4).result(30)
    steps = lag1.runner.num_steps
    wait_until_idle(lag1)
    assert lag1.runner.num_steps < steps + 100


def test_cancelling_forgets_the_mask(lag1: RandomLLM) -> None:
    stream = lag1.chat_stream(USER, response_format={"type": "regex", "regex": "[a-z]{5000}"}, seed=3)
    next(stream)
    stream.close()
    wait_until_idle(lag1)
    assert not lag1._engine.worker.loop.masks


def test_answer_tokens_leave_room_for_an_answer(lag1: RandomLLM) -> None:
    """Reasoning that would use up the budget is closed in time, with tools and without."""
    plain = ask(lag1, answer_tokens=24, max_tokens=64, n=8)
    assert all(len(choice.token_ids) <= 64 for choice in plain.choices)
    assert all(choice.content for choice in plain.choices)
    assert any(choice.reasoning for choice in plain.choices)
    called = ask(lag1, answer_tokens=200, max_tokens=220, n=8, tools=TOOLS, tool_choice="required")
    assert all(choice.finish_reason == "tool_calls" for choice in called.choices)
    at_once = ask(lag1, answer_tokens=40, max_tokens=40, n=4)
    assert not any(choice.reasoning for choice in at_once.choices)


@pytest.mark.parametrize(
    ("response_format", "text"),
    [
        ({"type": "choice", "choice": ["ja", "nein (a.b)"]}, {"ja", "nein (a.b)"}),
        ({"type": "regex", "regex": "x|y"}, {"x", "y"}),
        ({"type": "grammar", "grammar": 'start: "p" | "q"'}, {"p", "q"}),
    ],
)
def test_other_formats(lag1: RandomLLM, response_format: dict[str, Any], text: set[str]) -> None:
    output = ask(lag1, response_format=response_format, n=8)
    assert {choice.content for choice in output.choices if choice.finish_reason == "stop"} == text


def test_text_is_no_constraint(lag1: RandomLLM) -> None:
    lag1.play(script(FINAL))
    assert lag1.chat(USER, response_format={"type": "text"}).result(30)[0].content == "It is cold."


def test_the_model_is_shown_the_schema() -> None:
    """Where OpenAI's guide puts it: last in the developer message."""
    response_format = json_schema(CITY, name="capital_of", description="A country\nand its capital")
    settings = chat_settings(tools=TOOLS, response_format=response_format)
    prompt = settings.render([{"role": "system", "content": "Be brief."}, *USER], vocab.tokenizer())
    shown = vocab.tokenizer().decode(prompt, skip_special=False)
    section = (
        "} // namespace functions\n\n# Response Formats\n\n## capital_of\n\n// A country\n// and its capital\n"
        '{"type":"object","properties":{"country":{"type":"string"},"capital":{"type":"string"}},'
        '"required":["country","capital"],"additionalProperties":false}<|end|>'
    )
    bare = chat_settings(response_format=response_format).render(USER, vocab.tokenizer())
    assert "<|start|>developer<|message|># Response Formats\n\n## capital_of\n" in vocab.tokenizer().decode(bare, False)
    assert section in shown and "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools" in shown


def shown(schema: Any) -> str:
    """The schema as the model sees it."""
    prompt = chat_settings(response_format=json_schema(schema)).render(USER, vocab.tokenizer())
    return vocab.tokenizer().decode(prompt, skip_special=False).partition("## city\n\n")[2].partition("<|end|>")[0]


def test_of_a_long_schema_the_model_is_shown_the_upper_levels(lag1: RandomLLM) -> None:
    """Case s04: the prompt stays short. What is not shown holds all the same."""
    deep = {"type": "object", "properties": {f"q{i}": {"enum": ["x" * 300, "y"]} for i in range(120)}}
    schema = {"type": "object", "properties": {"a": deep, "b": NUMBER}, "required": ["b"], "additionalProperties": False}
    assert len(json.dumps(schema)) > SHOWN_WHOLE
    names = {"type": "object", "properties": {f"q{i}": {} for i in range(120)}}
    assert json.loads(shown(schema)) == schema | {"properties": {"a": names, "b": NUMBER}}
    output = ask(lag1, response_format=json_schema(schema), n=2)
    for choice in output.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.content), schema)
    assert any(choice.finish_reason == "stop" for choice in output.choices)


def test_a_schema_is_shown_whole_up_to_a_length() -> None:
    for length, whole in ((SHOWN_WHOLE, True), (SHOWN_WHOLE + 1, False)):
        schema = {"description": "", "type": "object"}
        schema["description"] = "d" * (length - len(compact_json(schema)))
        assert (shown(schema) == compact_json(schema)) is whole
    assert shown({"properties": {f"p{i}": {} for i in range(9000)}}) == '{"properties":{}}'
    assert shown({"description": "d" * 40_000}) == "{}", "not even its first level fits"


REFUSED = [
    ({"type": "json_schema"}, "json_schema is missing"),
    ({"type": "json_schema", "json_schema": {"name": "n"}}, "schema is missing"),
    ({"type": "json_schema", "json_schema": {"schema": {}}}, "name None"),
    ({"type": "json_schema", "json_schema": {"name": "n o", "schema": {}}}, "name 'n o'"),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "description": 5}}, "description 5"),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": "yes"}}, "strict 'yes'"),
    (json_schema([]), "not a JSON object"),
    (json_schema({"type": "objct"}), "objct"),
    (json_schema({"not": {}}), '"not"'),
    (json_schema({"enum": ["x" * 300_000]}), "at most 200000"),
    ({"type": "xml"}, "'xml' is not one of text, json_object, json_schema"),
    ({}, "None is not one of"),
    ("json_object", "not an object"),
    ({"type": "regex"}, "regex None"),
    ({"type": "regex", "regex": "(a"}, "unclosed"),
    ({"type": "choice", "choice": []}, "not a list of strings"),
    ({"type": "choice", "choice": "ab"}, "not a list of strings"),
    ({"type": "grammar", "grammar": "%%%"}, "cannot be compiled"),
]


@pytest.mark.parametrize(("response_format", "says"), REFUSED)
def test_a_format_that_cannot_be_honoured_is_refused(lag1: RandomLLM, response_format: Any, says: str) -> None:
    """Case b07 and its like; nothing is queued."""
    with pytest.raises(RequestError) as refused:
        lag1.chat(USER, response_format=response_format)
    assert refused.value.field == "response_format" and says in refused.value.problem
    assert not lag1._engine.scheduler.busy


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "nope"}}, "tools": TOOLS},
            "tool_choice",
            "'nope' is not decl",
        ),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "is not 'auto', 'none', 'required' or"),
        ({"tools": [tool("f", {"not": {}}, strict=True)]}, "tools[0].function.parameters", '"not"'),
        ({"tools": [tool("f", {}, strict="yes")]}, "tools[0].function.strict", "neither true nor false"),
        ({"answer_tokens": 5}, "answer_tokens", "at least 16"),
        ({"answer_tokens": True}, "answer_tokens", "at least 16"),
        ({"answer_tokens": 20, "ignore_eos": True}, "ignore_eos", "does not go with"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 5}, "min_tokens", "does not go with"),
    ],
)
def test_other_refusals(lag1: RandomLLM, arguments: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        lag1.chat(USER, **arguments)
    assert refused.value.field == field and says in refused.value.problem
