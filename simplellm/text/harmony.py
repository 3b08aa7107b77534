"""OpenAI chat messages -> harmony prompt ids, exactly as OpenAI's own renderer (docs/chat.md states the mapping).

Two steps: `conversation` maps to harmony messages and refuses what it cannot map, `encode` turns them into ids. Only
`encode` places control tokens; each text is encoded by itself, so no text can become one.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simplellm.errors import CheckpointError, RequestError
from simplellm.text.response_format import ResponseFormat
from simplellm.text.schema import nesting, typescript
from simplellm.text.tokenizer import Tokenizer

# gpt-oss knows three efforts; it always reasons, so `none` asks for the least it has
EFFORTS = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
CONSTRAINED_JSON = "<|constrain|>json"
FUNCTIONS = "functions"
MAX_NESTING = 100  # of a tool's schema: far above real ones, far below Python's recursion limit

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_CHANNEL_OF_TOOLS = "Calls to these tools must go to the commentary channel: 'functions'."

_DECLARED_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule for function names
_HEADER_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # of past calls: what cannot break a header
_USER_NAME = re.compile(r"[^\s<|\\/>]{1,64}")  # OpenAI's rule for participants


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """One message of the format: a header and its content."""

    author: str
    content: str
    recipient: str | None = None
    channel: str | None = None
    content_type: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; no `parameters` means that it takes none."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False  # its arguments must follow the parameters


@dataclass(frozen=True, slots=True)
class Namespace:
    """Tools under one name. OpenAI's built-in ones stand in the system message."""

    name: str
    description: str = ""
    tools: tuple[Tool, ...] = ()


def render(
    messages: Sequence[Any],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Any] | None = None,
    response_format: ResponseFormat | None = None,
    reasoning_effort: str | None = None,
    current_date: str | None = None,
    builtin: Sequence[Namespace] = (),
) -> list[int]:
    """Ids of the prompt after which the model answers: the conversation, then `<|start|>assistant`.

    `messages` and `tools` are as in OpenAI's chat completions; `current_date` is YYYY-MM-DD, today where left out.
    RequestError names the part refused, such as `messages[3].content`; CheckpointError a control token that lacks.
    """
    system = system_text(reasoning_effort, current_date, has_functions=bool(tools), builtin=builtin)
    prompt = [HarmonyMessage("system", system), *conversation(messages, declared_tools(tools), response_format)]
    start = _control(tokenizer, "<|start|>")
    return [*encode(without_old_analysis(prompt), tokenizer), start, *tokenizer.encode("assistant")]


def encode(messages: Sequence[HarmonyMessage], tokenizer: Tokenizer) -> list[int]:
    """Ids of whole messages. Texts are encoded apart from each other, as the reference does."""
    ids: list[int] = []
    for message in messages:
        ids += [_control(tokenizer, "<|start|>"), *tokenizer.encode(message.author)]
        if message.recipient:
            ids += tokenizer.encode(f" to={message.recipient}")
        if message.channel:
            ids += [_control(tokenizer, "<|channel|>"), *tokenizer.encode(message.channel)]
        if message.content_type == CONSTRAINED_JSON:
            ids += [*tokenizer.encode(" "), _control(tokenizer, "<|constrain|>"), *tokenizer.encode("json")]
        is_call = message.author == "assistant" and message.recipient
        ids += [_control(tokenizer, "<|message|>"), *tokenizer.encode(message.content)]
        ids.append(_control(tokenizer, "<|call|>" if is_call else "<|end|>"))
    return ids


def without_old_analysis(messages: Sequence[HarmonyMessage]) -> list[HarmonyMessage]:
    """All but the reasoning of finished turns: what stands before the last final message (the documented rule).

    openai-harmony 0.0.8 has it wrong from the second turn on (openai/harmony PR 96).
    """
    last_final = max((i for i, message in enumerate(messages) if message.channel == "final"), default=-1)
    return [message for i, message in enumerate(messages) if i > last_final or message.channel != "analysis"]


def system_text(
    reasoning_effort: str | None = None,
    current_date: str | None = None,
    *,
    has_functions: bool = False,
    builtin: Sequence[Namespace] = (),
) -> str:
    """The system message: who, when, how hard to think, built-in tools, channels."""
    effort = EFFORTS.get("medium" if reasoning_effort is None else str(reasoning_effort))
    if effort is None:
        raise RequestError("reasoning_effort", f"{reasoning_effort!r} is not one of {', '.join(EFFORTS)}")
    sections = [f"{_IDENTITY}\nCurrent date: {_date(current_date)}", f"Reasoning: {effort}"]
    if builtin:
        sections.append(tools_text(builtin))
    sections.append(f"{_CHANNELS}\n{_CHANNEL_OF_TOOLS}" if has_functions else _CHANNELS)
    return "\n\n".join(sections)


def developer_text(instructions: str | None, tools: Sequence[Tool] = (), response_format: ResponseFormat | None = None) -> str:
    """The developer message: instructions verbatim, then the functions, then the answer's format."""
    sections = [] if instructions is None else ["# Instructions", instructions]
    if tools:
        sections.append(tools_text([Namespace(FUNCTIONS, tools=tuple(tools))]))
    if response_format is not None and response_format.shown:
        sections.append(response_format.shown)
    return "\n\n".join(sections)


def tools_text(namespaces: Sequence[Namespace]) -> str:
    """The `# Tools` section."""
    blocks = [_namespace_text(namespace) for namespace in sorted(namespaces, key=lambda each: each.name)]
    return "\n\n".join(["# Tools", *blocks])


def declared_tools(tools: Sequence[Any] | None) -> list[Tool]:
    """OpenAI's `tools` list, checked: plain functions, valid distinct names, parameters that are JSON objects."""
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise RequestError("tools", f"is {_kind(tools)}, not a list")
    declared: dict[str, Tool] = {}
    for number, entry in enumerate(tools):
        tool = _declared_tool(entry, f"tools[{number}]")
        if tool.name in declared:
            raise RequestError(f"tools[{number}].function.name", f"{tool.name!r} is declared twice")
        declared[tool.name] = tool
    return list(declared.values())


def conversation(
    messages: Sequence[Any], tools: Sequence[Tool] = (), response_format: ResponseFormat | None = None
) -> list[HarmonyMessage]:
    """Harmony messages of an OpenAI conversation, reasoning included, the system message not."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages", "is empty" if messages in ([], ()) else f"is {_kind(messages)}, not a list")
    rest = list(enumerate(messages))
    instructions = None
    if isinstance(messages[0], Mapping) and messages[0].get("role") in ("system", "developer"):
        instructions = _text(messages[0], "messages[0]") or None
        rest = rest[1:]
    developer = developer_text(instructions, tools, response_format)
    mapped = [HarmonyMessage("developer", developer)] if developer else []
    calls: dict[str, str] = {}  # id of a call -> name of its function
    for number, message in rest:
        mapped += _mapped(message, f"messages[{number}]", calls)
    return mapped


def _mapped(message: Any, at: str, calls: dict[str, str]) -> list[HarmonyMessage]:
    if not isinstance(message, Mapping):
        raise RequestError(at, f"is {_kind(message)}, not an object with role and content")
    match message.get("role"):
        case "user":
            return [HarmonyMessage(_user(message, at), _text(message, at))]
        case "assistant":
            return _assistant(message, at, calls)
        case "tool":
            function = _function_answered(message, at, calls)
            return [HarmonyMessage(function, _text(message, at), recipient="assistant", channel="commentary")]
        case "system" | "developer":
            return [HarmonyMessage("developer", developer_text(_text(message, at)))]
        case role:
            raise RequestError(f"{at}.role", f"{role!r} is not one of system, developer, user, assistant, tool")


def _assistant(message: Mapping[str, Any], at: str, calls: dict[str, str]) -> list[HarmonyMessage]:
    """Reasoning, then what was said, then the calls. A text beside calls is a preamble."""
    tool_calls = message.get("tool_calls") or []
    if not isinstance(tool_calls, list | tuple):
        raise RequestError(f"{at}.tool_calls", f"is {_kind(tool_calls)}, not a list")
    if message.get("function_call"):
        raise RequestError(f"{at}.function_call", "is no longer supported: use tool_calls")
    reasoning = _reasoning(message, at)
    if "content" not in message and not tool_calls and not reasoning:
        raise RequestError(f"{at}.content", "is missing, and there are neither tool_calls nor reasoning")
    content = "" if message.get("content") is None else _text(message, at)
    parts = [HarmonyMessage("assistant", reasoning, channel="analysis")] if reasoning else []
    if content:
        parts.append(HarmonyMessage("assistant", content, channel="commentary" if tool_calls else "final"))
    return parts + [_call(call, f"{at}.tool_calls[{i}]", calls) for i, call in enumerate(tool_calls)]


def _call(call: Any, at: str, calls: dict[str, str]) -> HarmonyMessage:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        raise RequestError(f"{at}.function", "is missing: an object with name and arguments belongs here")
    if not isinstance(key := call.get("id"), str) or not key:
        raise RequestError(f"{at}.id", "is missing: tool results refer to it")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
        raise RequestError(f"{at}.function.name", f"{name!r} is not a name of {_HEADER_NAME.pattern}")
    if arguments is not None and not isinstance(arguments, str):
        raise RequestError(f"{at}.function.arguments", f"is {_kind(arguments)}, not a string that holds JSON")
    calls[key] = name
    return HarmonyMessage("assistant", arguments or "", f"{FUNCTIONS}.{name}", "commentary", CONSTRAINED_JSON)


def _function_answered(message: Mapping[str, Any], at: str, calls: Mapping[str, str]) -> str:
    key = message.get("tool_call_id")
    if not isinstance(key, str):
        raise RequestError(f"{at}.tool_call_id", "is missing: a tool message names the call that it answers")
    if key not in calls:
        raise RequestError(f"{at}.tool_call_id", f"{key!r} is the id of no tool call before it")
    return f"{FUNCTIONS}.{calls[key]}"


def _user(message: Mapping[str, Any], at: str) -> str:
    name = message.get("name")
    if name is None:
        return "user"
    if not isinstance(name, str) or not _USER_NAME.fullmatch(name):
        raise RequestError(f"{at}.name", f"{name!r} is not a name of {_USER_NAME.pattern}")
    return f"user:{name}"


def _reasoning(message: Mapping[str, Any], at: str) -> str:
    for field in ("reasoning", "reasoning_content"):
        if value := message.get(field):
            if not isinstance(value, str):
                raise RequestError(f"{at}.{field}", f"is {_kind(value)}, not a string")
            return value
    return ""


def _text(message: Mapping[str, Any], at: str) -> str:
    """A message's content: a string, or text parts joined without a separator."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{at}.content", "is missing")
    if not isinstance(content, list | tuple):
        raise RequestError(f"{at}.content", f"is {_kind(content)}, neither a string nor a list of text parts")
    return "".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(at, f"is {_kind(part)}, not an object with type and text")
    if part.get("type") != "text":
        raise RequestError(f"{at}.type", f"{part.get('type')!r} is not 'text': gpt-oss reads nothing else")
    if not isinstance(text := part.get("text"), str):
        raise RequestError(f"{at}.text", f"is {_kind(text)}, not a string")
    return text


def _declared_tool(entry: Any, at: str) -> Tool:
    if not isinstance(entry, Mapping):
        raise RequestError(at, f"is {_kind(entry)}, not an object with type and function")
    if entry.get("type") != "function":
        raise RequestError(f"{at}.type", f"{entry.get('type')!r} is not 'function', the only type supported")
    if not isinstance(function := entry.get("function"), Mapping):
        raise RequestError(f"{at}.function", "is missing: an object with name, description, parameters belongs here")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _DECLARED_NAME.fullmatch(name):
        raise RequestError(f"{at}.function.name", f"{name!r} is not a name of {_DECLARED_NAME.pattern}")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{at}.function.description", f"is {_kind(description)}, not a string")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"{at}.function.parameters", f"is {_kind(parameters)}, not a JSON Schema object")
    if not isinstance(strict := function.get("strict") or False, bool):
        raise RequestError(f"{at}.function.strict", f"is {_kind(strict)}, neither true nor false")
    if nesting(parameters) > MAX_NESTING:
        raise RequestError(f"{at}.function.parameters", f"is nested more than {MAX_NESTING} levels deep")
    return Tool(name, description or "", parameters, strict)


def _namespace_text(namespace: Namespace) -> str:
    prefix = "// " if namespace.tools else ""
    lines = [f"## {namespace.name}\n", *(prefix + line for line in _lines(namespace.description))]
    if not namespace.tools:
        return "\n".join(lines)
    lines.append(f"namespace {namespace.name} {{\n")
    for tool in namespace.tools:
        argument = "" if tool.parameters is None else f"_: {typescript(tool.parameters)}"
        lines += [f"// {line}" for line in _lines(tool.description)]
        lines.append(f"type {tool.name} = ({argument}) => any;\n")
    return "\n".join([*lines, f"}} // namespace {namespace.name}"])


def _lines(text: str) -> list[str]:
    *ended, last = text.split("\n")
    return [line.removesuffix("\r") for line in ended] + ([last] if last else [])


def _date(current_date: str | None) -> str:
    if current_date is None:
        return datetime.date.today().isoformat()
    try:
        return datetime.datetime.strptime(current_date, "%Y-%m-%d").date().isoformat()
    except (TypeError, ValueError):
        raise RequestError("current_date", f"{current_date!r} is not a date such as 2025-06-28") from None


def _control(tokenizer: Tokenizer, name: str) -> int:
    try:
        return tokenizer.special[name]
    except KeyError:
        raise CheckpointError(f"tokenizer.json has no control token {name}, which chat needs: not a gpt-oss file") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "missing" if value is None else names.get(type(value), f"a {type(value).__name__}")
