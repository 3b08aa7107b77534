"""Kind render: a chat request's prompt, as ids of the real vocabulary. Nothing is generated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simplellm.errors import RequestError
from simplellm.text.harmony import conversation, declared_tools, without_old_analysis
from simplellm.text.tokenizer import Tokenizer
from tests.cases import bodies
from tests.cases.case import Case, NotRun, Verdict, verdict
from tests.cases.checks import Check, make
from tests.cases.models import Models

DATE = "2025-06-28"


class Prompt:
    """A rendered prompt: ids, text with control tokens spelled, and the ids of each message's content."""

    def __init__(self, body: Mapping[str, Any], tokenizer: Tokenizer):
        self.body = body
        self.ids = bodies.chat_settings(body, DATE).render(body.get("messages"), tokenizer)
        self.text = tokenizer.decode(self.ids, skip_special=False)
        self.contents = [tokenizer.decode(ids) for ids in _contents(self.ids, tokenizer)]


def run(case: Case, models: Models) -> Verdict:
    """One request, `input.json`."""
    if case.input.get("path") != bodies.CHAT:
        raise NotRun(f"needs an http kind for {case.input.get('path')}")
    try:
        prompt = Prompt(case.input["json"], models.tokenizer)
    except RequestError as error:
        return verdict(case, [f"refused: {error}"], [])
    return verdict(case, *make(case.expect, prompt_checks(prompt) | _render_checks(prompt, models.tokenizer)))


def prompt_checks(prompt: Prompt) -> dict[str, Check]:
    """Checks of what a prompt holds."""

    def prompt_contains(value: str, channel: str | None = None) -> Iterator[str]:
        where = prompt.text if channel is None else "".join(_on_channel(prompt.text, channel))
        if value not in where:
            yield f"{value!r} is not in {prompt.text!r}" + (f" on channel {channel}" if channel else "")

    def prompt_not_contains(value: str) -> Iterator[str]:
        if value in prompt.text:
            yield f"{value!r} is in {prompt.text!r}"

    def prompt_contains_tool_result_once() -> Iterator[str]:
        for text, author in _calls_and_results(prompt.body["messages"]):
            if text and (number := prompt.contents.count(text)) != 1:
                yield f"{author} {text!r} is {number} times the content of a message"

    return {
        "prompt_contains": prompt_contains,
        "prompt_not_contains": prompt_not_contains,
        "prompt_contains_tool_result_once": prompt_contains_tool_result_once,
    }


def _render_checks(prompt: Prompt, tokenizer: Tokenizer) -> dict[str, Check]:
    messages = prompt.body["messages"]

    def prompt_ids_count(id: int, equals: int | str) -> Iterator[str]:
        if equals == "number of messages + 1 generation prompt":
            mapped = without_old_analysis(conversation(messages, declared_tools(prompt.body.get("tools"))))
            equals = 1 + len(mapped) + 1  # the system message comes first
        elif not isinstance(equals, int):
            raise NotRun(f"unknown check 'prompt_ids_count' with equals {equals!r}")
        if prompt.ids.count(id) != equals:
            yield f"id {id} is there {prompt.ids.count(id)} times, want {equals}"

    def prompt_ids_not_contain_inside_content(ids: list[int]) -> Iterator[str]:
        """Each message's text is the whole content of a message again: then no id in it had another meaning."""
        for text in (part for message in messages for part in bodies.texts(message)):
            encoded = tokenizer.encode(text)
            if text not in prompt.contents or set(encoded) & set(ids):
                yield f"{text!r} is not the content of a message of {prompt.text!r}"

    def accepts_field_names(values: list[str]) -> Iterator[str]:
        names = {"reasoning", "reasoning_content", *values}
        for name in values:
            renamed = [{name if key in names else key: value for key, value in message.items()} for message in messages]
            if Prompt({**prompt.body, "messages": renamed}, tokenizer).ids != prompt.ids:
                yield f"another prompt with the field called {name!r}"

    def same_prompt_from(other: str) -> Iterator[str]:
        raise NotRun(f"needs /v1/responses, which is not there yet: same_prompt_from {other!r}")

    return {
        "prompt_ids_count": prompt_ids_count,
        "prompt_ids_not_contain_inside_content": prompt_ids_not_contain_inside_content,
        "accepts_field_names": accepts_field_names,
        "same_prompt_from": same_prompt_from,
    }


def _contents(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """What stands between each `<|message|>` and the next control token."""
    special = set(tokenizer.special.values())
    content: list[int] | None = None
    for token in ids:
        if token in special:
            if content is not None:
                yield content
            content = [] if token == tokenizer.special["<|message|>"] else None
        elif content is not None:
            content.append(token)


def _on_channel(text: str, channel: str) -> list[str]:
    """Contents of the messages on a channel."""
    parts = (part.partition("<|message|>") for part in text.split("<|start|>"))
    return [content for header, _, content in parts if re.search(rf"<\|channel\|>{re.escape(channel)}(?!\w)", header)]


def _calls_and_results(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for message in messages:
        for call in message.get("tool_calls") or []:
            yield call["function"]["arguments"], "arguments"
        if message["role"] == "tool":
            yield "".join(bodies.texts(message)), "result"
