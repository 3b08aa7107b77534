"""Request bodies of OpenAI's API as arguments of LLM: what the offline API can say of a case, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simplellm.api import ChatSettings
from tests.cases.case import NotRun

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "gpt-oss-20b"

SAMPLING = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
SAMPLING |= {"logit_bias", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "n"}
CHAT_FIELDS = {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "response_format", "answer_tokens"}
OF_THE_SERVER = {"model", "stream", "stream_options", "user"}  # say nothing of the answer itself


def chat_settings(body: Mapping[str, Any], date: str | None) -> ChatSettings:
    """What a chat body says of its prompt."""
    arguments(CHAT, body)
    parallel = body.get("parallel_tool_calls", True)
    tools, choice, effort = (body.get(name) for name in ("tools", "tool_choice", "reasoning_effort"))
    return ChatSettings(tools, choice, parallel, effort, date, body.get("response_format"), body.get("answer_tokens"))


def arguments(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for chat or generate. NotRun where only a server knows what a field does."""
    if path not in (CHAT, COMPLETIONS):
        raise NotRun(f"needs an http kind for {path}")
    if body.get("model", MODEL) != MODEL:
        raise NotRun(f"needs an http kind for model {body['model']!r}")
    given = {name: value for name, value in body.items() if value is not None and name not in OF_THE_SERVER}
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    prompt = {"messages"} | CHAT_FIELDS if path == CHAT else {"prompt"}
    chat_logprobs = {"logprobs", "top_logprobs"} if path == CHAT else set()  # a number in completions
    if unknown := sorted(given.keys() - SAMPLING - prompt - chat_logprobs):
        raise NotRun(f"needs an http kind for field {unknown[0]!r}")
    given.pop("prompt", None)
    given.pop("messages", None)
    if isinstance(given.get("logit_bias"), Mapping):  # JSON has no numbers as keys
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return given


def texts(message: Mapping[str, Any]) -> list[str]:
    """A message's content as one text, if it has any."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return [text] if text else []
