"""Kind harmony_tokens: each list of ids goes through the output parser, token by token, as after `<|start|>assistant`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from simplellm.text.parser import Message, Parser, ToolCallStart, fold
from tests.cases.case import Case, NotRun, Verdict, verdict
from tests.cases.checks import compare, make
from tests.cases.models import Models

Seen = dict[str, Any]

FIELD_VALUES = {"true": True, "false": False}


def run(case: Case, models: Models) -> Verdict:
    """`input.tools` declares functions; without it any well-formed name is one."""
    if case.input.get("start_role", "assistant") != "assistant":
        raise NotRun(f"unknown start_role {case.input['start_role']!r}")
    tools = None if "tools" not in case.input else {tool["function"]["name"] for tool in case.input["tools"]}
    sequences = [sequence["ids"] for sequence in case.input["sequences"]]

    def parse(ids: list[int], **fields: Any) -> Seen:
        names = () if fields.pop("tool_choice", "auto") == "none" else tools
        parser = Parser(models.tokenizer, names, **fields)
        deltas = [delta for token in ids for delta in parser.push([token])] + parser.finish()
        indexes = [delta.index for delta in deltas if isinstance(delta, ToolCallStart)]
        return describe(fold(deltas), parser.finish_kind or "length") | {"indexes": indexes}

    def parsed(never_raises: bool = True, **wants: Any) -> Iterator[str]:
        if not never_raises:
            raise NotRun("unknown check 'parsed' with never_raises false")
        for number, ids in enumerate(sequences):
            yield from _told(number, parse, ids, {}, wants)

    def when(request_field: str, **wants: Any) -> Iterator[str]:
        fields = _request_field(request_field)
        for number, ids in enumerate(sequences):
            yield from _told(number, parse, ids, fields, wants)

    def same_result_for_all_sequences() -> Iterator[str]:
        first, *others = [parse(ids) for ids in sequences]
        for number, other in enumerate(others, 1):
            yield from compare(other, first, f"sequence {number} against 0: ")

    def never(what: str) -> Iterator[str]:
        for number, ids in enumerate(sequences):
            for clause in re.split(r",\s*(?:or\s+)?|\s+or\s+", what):
                if _never(clause)(parse(ids)):
                    yield f"sequence {number}: {clause}"

    checks = {
        "parsed": parsed,
        "when": when,
        "same_result_for_all_sequences": same_result_for_all_sequences,
        "never": never,
    }
    return verdict(case, *make(case.expect, checks))


def describe(message: Message, finish_reason: str) -> Seen:
    """What can be asked of an answer, by name. Those of a call are the first call's."""
    calls = message.tool_calls
    return {
        "reasoning": message.reasoning,
        "content": message.content,
        "tool_calls": len(calls),
        "tool_name": calls[0].name if calls else None,
        "tool_names": [call.name for call in calls],
        "tool_args": parsed_json(calls[0].arguments) if calls else None,
        "tool_args_raw": calls[0].arguments if calls else None,
        "distinct_ids": len({call.id for call in calls}) == len(calls),
        "finish_reason": finish_reason,
    }


def _told(number: int, parse: Any, ids: list[int], fields: Mapping[str, Any], wants: Mapping[str, Any]) -> list[str]:
    try:
        seen = parse(ids, **fields)
    except Exception as error:
        return [f"sequence {number}: raised {error!r}"]
    return compare(seen, wants, f"sequence {number}: ")


def _request_field(text: str) -> dict[str, Any]:
    """`NAME=VALUE` as a request would have it, for the fields that the parser knows of."""
    name, _, value = text.partition("=")
    if name == "parallel_tool_calls" and value in FIELD_VALUES:
        return {name: FIELD_VALUES[value]}
    if name == "tool_choice" and value in ("none", "auto"):
        return {name: value}
    raise NotRun(f"unknown check 'when' with request_field {text!r}")


def _never(clause: str) -> Any:
    """Whether an answer is what should never be. A parser that raises fails before it is asked."""
    match clause:
        case "empty response":
            return lambda seen: not (seen["reasoning"] or seen["content"] or seen["tool_calls"])
        case "lost call":
            return lambda seen: seen["tool_calls"] == 0
        case "a 500 because json parsing failed" | "raises":
            return lambda seen: False
    raise NotRun(f"unknown check 'never' with what {clause!r}")


def parsed_json(text: str) -> Any:
    """What arguments say; program text stays text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return f"(not JSON) {text}"
