"""The strict door: request bodies of OpenAI's API -> arguments of LLM. One table says of every field what becomes of it.

A field works, or is refused because ignoring it would change the answer, or has no effect (docs/server.md lists all three).
null is the same as absent.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simplellm.server.errors import ApiError

log = logging.getLogger("simplellm.server")

COMPLETION_TOKENS = 16  # /v1/completions without max_tokens, as OpenAI documents it
QUICK = 32_000  # bytes of a body: 4,000 token ids, or 8,000 tokens of text
QUICK_N = 8
QUICK_MESSAGES = 64  # rendering one takes about 15 us
MAX_DEPTH = 200  # of nested JSON
MAX_NAMES = 1000  # unknown fields' names that are remembered as logged

_SAMPLING = {
    "temperature": "number",
    "top_p": "number",
    "top_k": "integer",
    "min_p": "number",
    "presence_penalty": "number",
    "frequency_penalty": "number",
    "repetition_penalty": "number",
    "logit_bias": "object",
    "seed": "integer",
    "max_tokens": "integer",
    "min_tokens": "integer",
    "stop": "string or list",
    "stop_token_ids": "list",
    "ignore_eos": "boolean",
    "n": "integer",
    "priority": "integer",
    "cache_salt": "string",
}
_SERVED = {"model": "string", "stream": "boolean", "stream_options": "object"}  # handled here, not by LLM
_CHAT_OPTIONS = {
    "tools": "list",
    "tool_choice": "string or object",
    "parallel_tool_calls": "boolean",
    "reasoning_effort": "string",
    "response_format": "object",
    "current_date": "string",
    "answer_tokens": "integer",
}
HONOURED = {
    "chat": _SERVED
    | _SAMPLING
    | _CHAT_OPTIONS
    | {"messages": "list", "max_completion_tokens": "integer", "logprobs": "boolean", "top_logprobs": "integer"},
    "completions": _SERVED | _SAMPLING | {"prompt": "string or list", "logprobs": "integer", "echo": "boolean"},
}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"}
WITHOUT_EFFECT |= {"safety_identifier", "verbosity", "prediction"}

# name -> (values that ask for nothing, why another one is refused)
_SCHEMAS = "use response_format"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "the model has no audio output"),
    "modalities": ((["text"], []), "the model answers in text only"),
    "web_search_options": ((), "there is no web search"),
    "functions": (([],), "it is the old form of tools: use tools"),
    "function_call": (("none", "auto"), "it is the old form of tool_choice: use tool_choice"),
    "suffix": (("",), "the model cannot fill in before a suffix"),
    "best_of": ((1,), "use n, and choose among the answers"),
    "use_beam_search": ((False,), "there is no beam search"),
    "length_penalty": ((1, 1.0), "it belongs to beam search"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": (([],), "use logit_bias"),
    "logits_processors": (([],), "requests cannot bring code"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "documents": (([],), "put them into a message"),
    "chat_template": ((), "gpt-oss has one prompt format"),
    "chat_template_kwargs": (({},), "gpt-oss has one prompt format; reasoning_effort is a field of its own"),
    "add_generation_prompt": ((True,), "an answer always begins anew"),
    "continue_final_message": ((False,), "an answer always begins anew"),
    "truncate_prompt_tokens": ((), "a prompt is never cut: shorten it"),
    "skip_special_tokens": ((True,), "control tokens are never shown"),
    "include_stop_str_in_output": ((False,), "an answer ends before its stop string"),
    "reasoning": (({},), "use reasoning_effort"),
    "include_reasoning": ((True,), "reasoning is always sent"),
    "guided_json": ((), _SCHEMAS),
    "guided_regex": ((), _SCHEMAS),
    "guided_choice": ((), _SCHEMAS),
    "guided_grammar": ((), _SCHEMAS),
    "structured_outputs": ((), _SCHEMAS),
}

_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "number": (lambda value: isinstance(value, int | float) and not isinstance(value, bool), "a number"),
    "integer": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "boolean": (lambda value: isinstance(value, bool), "true or false"),
    "string": (lambda value: isinstance(value, str), "a string"),
    "object": (lambda value: isinstance(value, dict), "an object"),
    "list": (lambda value: isinstance(value, list), "a list"),
    "string or list": (lambda value: isinstance(value, str | list), "a string or a list"),
    "string or object": (lambda value: isinstance(value, str | dict), "a string or an object"),
}
_logged: set[str] = set()


@dataclass
class Call:
    """A request for answers."""

    kind: str  # "chat" or "completions"
    model: str | None
    prompt: Any  # messages, or one prompt or a list of them
    settings: dict[str, Any] = field(default_factory=dict)  # keywords of LLM.chat or LLM.generate
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    prompt_logprobs: bool = False
    num_bytes: int = 0  # of the body

    @property
    def quick(self) -> bool:
        """Whether to tokenise and check it takes a millisecond or two at most. A grammar may have to be made: seconds."""
        compiles = not self.settings.keys().isdisjoint(("tools", "response_format", "answer_tokens"))
        single = (
            len(self.prompt) <= QUICK_MESSAGES
            if self.kind == "chat"
            else isinstance(self.prompt, str) or isinstance(self.prompt[0] if self.prompt else 0, int)
        )
        return self.num_bytes <= QUICK and single and self.settings.get("n", 1) <= QUICK_N and not compiles

    @property
    def logprobs(self) -> bool:
        return bool(self.settings.get("logprobs"))


def read_json(data: bytes) -> dict[str, Any]:
    """A body's object. NaN, Infinity, bad UTF-8, endless nesting and numbers of thousands of digits are refused."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise ApiError(400, "the body nests too deep") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}, not an object")
    deep = data.count(b"[") + data.count(b"{") > MAX_DEPTH  # else it cannot be: most bodies need no closer look
    if deep and _depth_above(value, MAX_DEPTH):
        raise ApiError(400, f"the body nests more than {MAX_DEPTH} levels deep")
    return value


def chat_call(body: Mapping[str, Any]) -> Call:
    """What a /v1/chat/completions body asks for. Raises ApiError."""
    given = _sort(body, "chat")
    messages = given.pop("messages", None)
    if messages is None or not all(isinstance(message, dict) for message in messages):
        raise ApiError(400, "messages: a list of message objects is needed", param="messages")
    longest = given.pop("max_completion_tokens", None)
    if longest is not None:
        given["max_tokens"] = longest
    if given.get("response_format", {}).get("type") == "text":
        del given["response_format"]
    return _call("chat", messages, given)


def completion_call(body: Mapping[str, Any]) -> Call:
    """What a /v1/completions body asks for. Raises ApiError."""
    given = _sort(body, "completions")
    if "prompt" not in given:
        raise ApiError(400, "prompt: text, token ids, or a list of such is needed", param="prompt")
    prompt, num_top, echo = given.pop("prompt"), given.pop("logprobs", None), given.pop("echo", False)
    given.setdefault("max_tokens", max(COMPLETION_TOKENS, given.get("min_tokens", 0)))
    if num_top is not None:
        given |= {"logprobs": True, "top_logprobs": num_top}
        if echo:
            given["prompt_logprobs"] = num_top
    call = _call("completions", prompt, given)
    call.echo, call.prompt_logprobs = echo, echo and num_top is not None
    if call.stream and call.prompt_logprobs and given.get("n", 1) > 1:
        raise ApiError(400, "n: with echo and logprobs a stream holds one answer per prompt; leave out stream", param="n")
    return call


def _call(kind: str, prompt: Any, given: dict[str, Any]) -> Call:
    model, stream, options = given.pop("model", None), given.pop("stream", False), given.pop("stream_options", {})
    usage = options.get("include_usage") or False
    _check("stream_options.include_usage", usage, "boolean")
    return Call(kind, model, prompt, given, stream, usage)


def _sort(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Fields that work, their kinds checked; the others are refused or noted."""
    known, given = HONOURED[kind], {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            _check(name, value, known[name])
            given[name] = value
        elif name in REFUSED:
            neutral, why = REFUSED[name]
            if value not in neutral:
                raise ApiError(400, f"{name} is not supported: {why}", param=name[:64], code="unsupported_parameter")
        else:
            _note(name)
    _check_lists(given)
    return given


def _check(name: str, value: Any, kind: str) -> None:
    fits, what = _KINDS[kind]
    if not fits(value):
        raise ApiError(400, f"{name}: {_short(value)} is not {what}", param=name, code="invalid_type")


def _check_lists(given: dict[str, Any]) -> None:
    """What LLM reads as one value per prompt must not come from outside; JSON's keys become ids."""
    for name, kind in (("stop", "string"), ("stop_token_ids", "integer")):
        if isinstance(given.get(name), list):
            for value in given[name]:
                _check(name, value, kind)
    if "logit_bias" in given:
        given["logit_bias"] = {_token_id(name): bias for name, bias in given["logit_bias"].items()}


def _token_id(name: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", name):
        raise ApiError(400, f"logit_bias: {_short(name)} is not a token id", param="logit_bias", code="invalid_value")
    return int(name)


def _note(name: str) -> None:
    """One log line per name, however often it comes."""
    if name not in _logged and len(_logged) < MAX_NAMES:
        _logged.add(name)
        kind = "has no effect" if name in WITHOUT_EFFECT else "is unknown and has no effect"
        log.info("field %s %s", _short(name), kind)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _depth_above(value: Any, limit: int) -> bool:
    """Whether `value` nests deeper than `limit`, found without recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > limit:
            return True
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = [item for item in below if isinstance(item, dict | list)]
    return False
