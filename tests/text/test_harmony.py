"""The renderer: equal to OpenAI's own, token for token, and clear about what it refuses."""

from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

import pytest

from simplellm.errors import CheckpointError, RequestError
from simplellm.text import harmony
from simplellm.text.harmony import MAX_NESTING, Namespace, Tool, render
from simplellm.text.schema import typescript
from simplellm.text.tokenizer import Tokenizer
from tests import vocab
from tests.text import generate

HERE = Path(__file__).parent
CASES = [json.loads(line) for line in (HERE / "data/harmony-cases.jsonl").read_text(encoding="utf-8").splitlines()]
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def shared_case(name: str) -> Any:
    return json.loads((HERE.parent / f"cases/{name}.json").read_text(encoding="utf-8"))


def prompt(tokenizer: Tokenizer, messages: list[Any], **options: Any) -> str:
    return tokenizer.decode(render(messages, tokenizer, **options), skip_special=False)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def _builtin(case: dict[str, Any]) -> list[Namespace]:
    """Namespaces that the case's system message declares."""
    declared = case["harmony_messages"][0]["content"][0].get("tools") or {}
    return [
        Namespace(
            each["name"],
            each["description"],
            tuple(Tool(one["name"], one["description"], one["parameters"]) for one in each["tools"]),
        )
        for each in declared.values()
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_equals_the_recorded_tokens(official, case):
    request = dict(case["request"])
    ids = render(request.pop("messages"), official, **request, current_date=case["current_date"], builtin=_builtin(case))
    assert ids == case.get("tokens_doc_rule", case["tokens"])


def test_equals_openai_harmony_on_thousands_of_conversations(official, reference_harmony):
    from openai_harmony import Conversation, RenderConversationConfig, Role

    rng = random.Random(7)
    as_given = RenderConversationConfig(auto_drop_analysis=False)  # its dropping is wrong from the second turn on
    for _ in range(2000):
        request, messages = generate.conversation(rng)
        ids = render(**request, tokenizer=official, current_date=generate.DATE)
        wanted = Conversation.from_json(json.dumps({"messages": messages}))
        assert ids == reference_harmony.render_conversation_for_completion(wanted, Role.ASSISTANT, as_given), request


def test_schemas_equal_openai_harmony_on_thousands(reference_harmony):
    from openai_harmony import Conversation

    rng = random.Random(11)
    for _ in range(3000):
        schema = generate.schema(rng)
        functions = {"name": "functions", "tools": [{"name": "f", "description": "", "parameters": schema}]}
        content = {"type": "developer_content", "tools": {"functions": functions}}
        wanted = Conversation.from_json(json.dumps({"messages": [{"role": "developer", "content": [content]}]}))
        text = reference_harmony.decode_utf8(reference_harmony.render_conversation(wanted))
        assert f"type f = (_: {typescript(schema)}) => any;\n\n}} // namespace" in text, schema


@pytest.mark.parametrize("request_number", range(5))
def test_every_shape_of_history_that_clients_send_is_accepted(official, request_number):
    body = shared_case("t04-history-shapes")["input"]["requests"][request_number]["json"]
    text = prompt(official, body["messages"], tools=body["tools"])
    for call in (call for message in body["messages"] for call in message.get("tool_calls") or []):
        assert text.count(call["function"]["arguments"]) == 1, "arguments verbatim, once"
    for result in (message["content"] for message in body["messages"] if message["role"] == "tool"):
        shown = result if isinstance(result, str) else result[0]["text"]
        assert text.count(f"to=assistant<|channel|>commentary<|message|>{shown}<|end|>") == 1, "result verbatim, once"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_of_the_running_tool_loop_stays_and_of_finished_turns_goes(official, field):
    body = shared_case("t08-reasoning-in-history")["input"]["json"]
    renamed = [{field if k == "reasoning_content" else k: v for k, v in m.items()} for m in body["messages"]]
    text = prompt(official, renamed, tools=body["tools"])
    assert "<|channel|>analysis<|message|>LIVE-THOUGHT<|end|>" in text
    assert "OLD-THOUGHT" not in text


def test_marker_text_in_content_results_and_names_stays_text(official):
    body = shared_case("p12-special-token-text")["input"]["json"]
    ids = render(body["messages"], official)
    assert ids.count(official.special["<|start|>"]) == len(body["messages"]) + 2, "system and the generation prompt too"
    assert official.special["<|return|>"] not in ids
    marked = tool(description="<|end|>", parameters={"type": "object", "properties": {"<|call|>": {"title": "<|call|>"}}})
    tricky = [USER, {"role": "assistant", "reasoning": "<|return|>", "tool_calls": [CALL]}]
    tricky.append({"role": "tool", "tool_call_id": "c1", "content": "<|start|>"})
    ids = render(tricky, official, tools=[marked])
    assert [ids.count(official.special[name]) for name in ("<|start|>", "<|return|>", "<|call|>")] == [7, 0, 1]


@pytest.mark.parametrize(
    ("effort", "line"),
    [(None, "medium"), ("low", "low"), ("medium", "medium"), ("high", "high")]
    + [("none", "low"), ("minimal", "low"), ("xhigh", "high"), ("max", "high")],
)
def test_efforts_of_the_api_map_to_the_three_that_the_model_knows(official, effort, line):
    assert f"\n\nReasoning: {line}\n\n" in prompt(official, [USER], reasoning_effort=effort)


def test_the_date_is_todays_for_each_call_unless_given(official, monkeypatch):
    """A date taken at import time goes stale in a server."""

    class Fixed(datetime.date):
        day_shown = datetime.date(2031, 1, 2)

        @classmethod
        def today(cls):
            return cls.day_shown

    monkeypatch.setattr(harmony.datetime, "date", Fixed)
    assert "\nCurrent date: 2031-01-02\n" in prompt(official, [USER])
    Fixed.day_shown = datetime.datetime(2031, 1, 3).date()
    assert "\nCurrent date: 2031-01-03\n" in prompt(official, [USER])
    assert "\nCurrent date: 2025-06-28\n" in prompt(official, [USER], current_date="2025-06-28")


def test_a_participants_name_is_in_the_header(official):
    assert "<|start|>user:Ann<|message|>hi<|end|>" in prompt(official, [USER | {"name": "Ann"}])


def test_a_call_id_used_again_means_the_latest_call(official):
    def turn(name: str) -> list[Any]:
        call = CALL | {"function": {"name": name, "arguments": "{}"}}
        return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "r"}]

    text = prompt(official, [USER, *turn("one"), *turn("two")])
    assert text.count("<|start|>functions.one to=assistant") == text.count("<|start|>functions.two to=assistant") == 1


def test_an_answer_cut_off_while_reasoning_may_be_sent_back(official):
    messages = [USER, {"role": "assistant", "content": None, "reasoning": "hm"}, USER]
    assert "<|channel|>analysis<|message|>hm<|end|><|start|>user" in prompt(official, messages)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range((levels - 1) // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_schema_at_the_nesting_limit_renders(official):
    assert "a?: {" in prompt(official, [USER], tools=[tool(parameters=nested(MAX_NESTING))])


REFUSED: list[tuple[list[Any], dict[str, Any], str, str]] = [
    ([], {}, "messages", "empty"),
    ([USER, "hi"], {}, "messages[1]", "a string, not an object"),
    ([USER, {"role": "robot", "content": ""}], {}, "messages[1].role", "'robot' is not one of"),
    ([USER, {"content": "x"}], {}, "messages[1].role", "None"),
    ([{"role": "user"}], {}, "messages[0].content", "missing"),
    ([{"role": "system"}, USER], {}, "messages[0].content", "missing"),
    ([{"role": "user", "content": 5}], {}, "messages[0].content", "a number"),
    ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0].content[0].text", "missing"),
    ([{"role": "user", "content": ["x"]}], {}, "messages[0].content[0]", "a string"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[0].content[0].type", "'image_url'"),
    ([{"role": "user", "content": "x", "name": "a to=b"}], {}, "messages[0].name", "'a to=b'"),
    ([USER, {"role": "assistant"}], {}, "messages[1].content", "missing"),
    ([USER, {"role": "assistant", "content": 1}], {}, "messages[1].content", "a number"),
    ([USER, {"role": "assistant", "content": "x", "reasoning": []}, {"role": "tool"}], {}, "messages[2].tool_call_id", ""),
    ([USER, {"role": "assistant", "reasoning_content": {"a": 1}}], {}, "messages[1].reasoning_content", "an object"),
    ([USER, {"role": "assistant", "tool_calls": "f"}], {}, "messages[1].tool_calls", "a string"),
    ([USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}], {}, "messages[1].tool_calls[0].function", "missing"),
    ([{"role": "assistant", "tool_calls": [CALL | {"id": None}]}], {}, "messages[0].tool_calls[0].id", "missing"),
    (
        [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f<|call|>"}}]}],
        {},
        "messages[0].tool_calls[0].function.name",
        "f<|call|>",
    ),
    (
        [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]}],
        {},
        "messages[0].tool_calls[0].function.arguments",
        "an object, not a string",
    ),
    ([{"role": "assistant", "function_call": {"name": "f"}}], {}, "messages[0].function_call", "tool_calls"),
    ([USER, {"role": "tool", "tool_call_id": "zz", "content": ""}], {}, "messages[1].tool_call_id", "'zz'"),
    ([USER], {"reasoning_effort": "huge"}, "reasoning_effort", "'huge' is not one of none, minimal, low"),
    ([USER], {"reasoning_effort": ["low"]}, "reasoning_effort", "is not one of"),
    ([USER], {"current_date": "today"}, "current_date", "'today'"),
    ([USER], {"tools": {"type": "function"}}, "tools", "an object, not a list"),
    ([USER], {"tools": ["f"]}, "tools[0]", "a string"),
    ([USER], {"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    ([USER], {"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ([USER], {"tools": [tool(name="a b")]}, "tools[0].function.name", "'a b'"),
    ([USER], {"tools": [tool(name="x" * 65)]}, "tools[0].function.name", "{1,64}"),
    ([USER], {"tools": [tool(), tool()]}, "tools[1].function.name", "declared twice"),
    ([USER], {"tools": [tool(description=5)]}, "tools[0].function.description", "a number"),
    ([USER], {"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "a list, not a JSON Schema"),
    ([USER], {"tools": [tool(parameters=nested(5000))]}, "tools[0].function.parameters", "100 levels"),
]


@pytest.mark.parametrize(("messages", "options", "field", "reason"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_cannot_be_rendered_is_refused_by_name(official, messages, options, field, reason):
    with pytest.raises(RequestError) as caught:
        render(messages, official, **options)
    assert caught.value.field == field and reason in caught.value.problem


def test_a_tokenizer_without_a_control_token_is_named(tmp_path):
    letters = {letter: byte for byte, letter in enumerate(vocab.byte_letters())}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(vocab.byte_level(letters, [], {256: "<|start|>"}, r"\s+|\S+")))
    with pytest.raises(CheckpointError, match=r"no control token <\|message\|>"):
        render([USER], Tokenizer.from_file(path))
