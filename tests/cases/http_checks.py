"""Checks of what a server answered, and of what it was like meanwhile and afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from simplellm.server.door import Door
from tests.cases.asked import Asked, ask
from tests.cases.case import NotRun
from tests.cases.checks import Check, compare
from tests.server.harness import USER, Served

METRICS = {"kv cache use": "vllm:kv_cache_usage_perc", "aborted requests": "simplellm:requests_aborted_total"}
SAID = {"documented": (200, 401), "200 if CORS on": (200,)}  # statuses that a case leaves to docs/server.md


@dataclass
class Seen:
    """What a case's requests came to. `asked` has None for one that could not be sent."""

    server: Served
    logs: list[str]
    asked: list[Asked | None] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)  # what a kind measured besides

    def answers(self, request: int | None = None) -> list[tuple[int, Asked]]:
        """Those that came, with their numbers; or the one."""
        wanted = range(len(self.asked)) if request is None else [request]
        return [(number, asked) for number in wanted if (asked := self.asked[number]) is not None]


def checks(seen: Seen) -> dict[str, Check]:
    """All that can be checked."""
    return _of_statuses(seen) | _of_answers(seen) | _of_streams(seen) | _of_the_server(seen) | _of_measures(seen)


def _of_statuses(seen: Seen) -> dict[str, Check]:
    def status_in(values: list[int]) -> Iterator[str]:
        for number, asked in seen.answers():
            if asked.status not in values:
                yield f"request {number} gave {asked.status} {asked.text[:300]}, want {values}"

    def status(equals: int) -> Iterator[str]:
        yield from status_in([equals])

    def status_per_request(values: list[Any]) -> Iterator[str]:
        if len(values) != len(seen.asked):
            yield f"{len(values)} values for {len(seen.asked)} requests"
        for number, asked in seen.answers():
            want = SAID.get(values[number], ()) if isinstance(values[number], str) else (values[number],)
            if not want:
                raise NotRun(f"unknown check 'status_per_request' with {values[number]!r}")
            if asked.status not in want:
                yield f"request {number} gave {asked.status} {asked.text[:300]}, want {values[number]}"

    def json_has(path: str) -> Iterator[str]:
        for number, asked in seen.answers():
            held: Any = asked.data
            for name in path.split("."):
                held = held.get(name) if isinstance(held, dict) else None
            if not held:
                yield f"request {number}: no {path} in {asked.text[:300]}"

    def error_code(equals: str, request: int | None = None) -> Iterator[str]:
        for number, asked in seen.answers(request):
            if asked.error.get("code") != equals:
                yield f"request {number}: code is {asked.error.get('code')!r}, want {equals!r}"

    def error_mentions(values: list[str]) -> Iterator[str]:
        for number, asked in seen.answers():
            message = asked.error.get("message", "")
            yield from (f"request {number}: {value!r} is not in {message!r}" for value in values if value not in message)

    def never(what: str) -> Iterator[str]:
        if what != "5xx or a hang":
            raise NotRun(f"unknown check 'never' with what {what!r}")
        yield from (f"request {number} gave {asked.status}" for number, asked in seen.answers() if asked.status >= 500)

    made = [status, status_in, status_per_request, json_has, error_code, error_mentions, never]
    return {check.__name__: check for check in made}


def _of_answers(seen: Seen) -> dict[str, Check]:
    def field_is(name: str) -> Check:
        def check(equals: Any) -> Iterator[str]:
            for number, asked in seen.answers():
                yield from compare(asked.seen, {name: equals}, f"request {number}: ")

        return check

    def content_is_null_or_empty_but_key_present() -> Iterator[str]:
        for number, asked in seen.answers():
            messages = [choice.get("message") or choice.get("delta") for choice in asked._choices()]
            if asked.seen["content"] or not any("content" in message for message in messages):
                yield f"request {number}: {messages}"

    def if_200(text_equals_prompt: bool, prompt_logprobs_len_equals_prompt_tokens: bool) -> Iterator[str]:
        if not text_equals_prompt or not prompt_logprobs_len_equals_prompt_tokens:
            raise NotRun("unknown check 'if_200' with what is false")
        for _, asked in seen.answers():
            if asked.status == 200:
                (choice,) = asked.data["choices"]
                if choice["text"] != asked.body["prompt"]:
                    yield f"text is {choice['text']!r}"
                if len(choice["logprobs"]["token_logprobs"]) != asked.data["usage"]["prompt_tokens"]:
                    yield f"{len(choice['logprobs']['token_logprobs'])} log-probabilities"

    def prompt_contains_tool_result_once() -> Iterator[str]:
        for number, asked in seen.answers():
            prompt = seen.server.http.post("/v1/chat/completions/render", json=asked.body).json()["prompt"]
            for message in asked.body["messages"]:
                texts = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
                if message["role"] == "tool":
                    parts = message["content"]
                    texts.append(parts if isinstance(parts, str) else "".join(part["text"] for part in parts))
                yield from (f"request {number}: {text!r} in {prompt!r}" for text in texts if text and prompt.count(text) != 1)

    found = [content_is_null_or_empty_but_key_present, if_200, prompt_contains_tool_result_once]
    fields = ("finish_reason", "reasoning", "content", "tool_calls", "tool_name")
    return {check.__name__: check for check in found} | {name: field_is(name) for name in fields}


def _of_streams(seen: Seen) -> dict[str, Check]:
    def streamed() -> list[tuple[int, Asked]]:
        if not (found := [(number, asked) for number, asked in seen.answers() if asked.events]):
            raise NotRun("no request streams")
        return found

    def sse_tool_call(
        index: int, name_once: str, concat_arguments_json: Any, id_in_first_chunk_only_or_constant: bool = True
    ) -> Iterator[str]:
        if not id_in_first_chunk_only_or_constant:
            raise NotRun("unknown check 'sse_tool_call' with other ids")
        for number, asked in streamed():
            deltas = [call for choice in asked._choices() for call in choice["delta"].get("tool_calls") or ()]
            own = [call for call in deltas if call["index"] == index]
            ids = {call["id"] for call in own if call.get("id")}
            names = [call["function"]["name"] for call in own if call["function"].get("name")]
            arguments = "".join(call["function"].get("arguments") or "" for call in own)
            if names != [name_once] or len(ids) != 1 or not own[0].get("id"):
                yield f"request {number}: names {names}, ids {ids}, want {name_once!r} once with an id"
            if _parsed(arguments) != concat_arguments_json:
                yield f"request {number}: arguments {arguments!r}, want {concat_arguments_json}"

    def concat(name: str) -> Check:
        def check(equals: str) -> Iterator[str]:
            for _, asked in streamed():
                if asked.seen[name] != equals:
                    yield f"{asked.seen[name]!r}, want {equals!r}"

        return check

    def same_as_non_stream() -> Iterator[str]:
        for _, asked in seen.answers():
            other = ask(seen.server, {"path": asked.path, "json": {**asked.body, "stream": not asked.body.get("stream")}})
            yield from compare(other.seen, asked.seen, "the other way ")

    def sse_contains_object(chat: dict[str, dict[str, str]], responses: str) -> Iterator[str]:
        """An asterisk is any value that is not empty. `responses` tells of a path that is not there yet."""
        if responses != "event response.failed with error.code and error.message":
            raise NotRun(f"unknown check 'sse_contains_object' with responses {responses!r}")
        for number, asked in streamed():
            if not any(_holds(event, chat) for event in asked.events):
                yield f"request {number}: no {chat} in {asked.text[-300:]!r}"

    def connection_closed_cleanly() -> Iterator[str]:
        for number, asked in streamed():
            if not asked.text.endswith("data: [DONE]\n\n"):
                yield f"request {number} ends with {asked.text[-100:]!r}"

    named = {check.__name__: check for check in (sse_tool_call, same_as_non_stream, sse_contains_object)}
    named["connection_closed_cleanly"] = connection_closed_cleanly
    return named | {"sse_content_concat": concat("content"), "sse_reasoning_concat": concat("reasoning")}


def _of_the_server(seen: Seen) -> dict[str, Check]:
    server = seen.server

    def alive_after(within_s: float) -> Iterator[str]:
        began = time.monotonic()
        health = server.http.get("/health").status_code
        headers = {"x-api-key": server.settings.keys[0]} if server.settings.keys else None
        told = ask(server, {"json": {"messages": USER, "max_tokens": 1}, "headers": headers})
        if health != 200 or told.status != 200 or time.monotonic() - began > within_s:
            yield f"health {health}, a plain request {told.status} after {time.monotonic() - began:.1f} s"

    def metric_back_to_zero(name: str, within_s: float) -> Iterator[str]:
        deadline = time.monotonic() + within_s
        while value := server.metric(_metric(name)):
            if time.monotonic() > deadline:
                yield f"{name} is {value}"
                return
            time.sleep(0.05)

    def key_never_in_logs() -> Iterator[str]:
        yield from (f"{line!r}" for line in seen.logs if any(key in line for key in (*server.settings.keys, "secret-2")))

    def constant_time_compare() -> Iterator[str]:
        names = {name for const in Door._check_key.__code__.co_consts if hasattr(const, "co_names") for name in const.co_names}
        if "compare_digest" not in names | set(Door._check_key.__code__.co_names):
            yield "keys are not compared by hmac.compare_digest"

    made = [alive_after, metric_back_to_zero, key_never_in_logs, constant_time_compare]
    return {check.__name__: check for check in made}


def _of_measures(seen: Seen) -> dict[str, Check]:
    """Of kinds that measure: what must hold of each of their notes."""

    def each(name: str, wrong: Any) -> list[str]:
        if not seen.notes:
            raise NotRun("nothing was measured")
        return [f"request {i}: {name} is {note[name]}" for i, note in enumerate(seen.notes) if wrong(note[name])]

    def running_requests_zero_within_s(value: float) -> list[str]:
        return each("idle_s", lambda seconds: seconds > value)

    def kv_use_back_to_before() -> list[str]:
        return each("kv_use", lambda more: more != 0)

    def counter_increments(name: str) -> list[str]:
        _metric(name)
        return each("aborted", lambda number: number < 1)

    def next_request_same_session_normal() -> list[str]:
        return each("next", lambda status: status != 200)

    def other_requests_unaffected() -> list[str]:
        return each("beside", lambda text: '"finish_reason":"stop"' not in text or '"error"' in text)

    def light_p95_not_worse_than(factor: float) -> Iterator[str]:
        alone, beside = (sorted(seen.notes[0][name])[-2] for name in ("alone", "beside"))
        if beside > factor * alone:
            yield f"{beside:.3f} s beside the heavy one, {alone:.3f} s alone"

    def heavy_finishes_within_s(value: float, status_in: list[int]) -> Iterator[str]:
        statuses = [asked.status for _, asked in seen.answers()]
        if seen.notes[0]["heavy_s"] > value or not statuses or statuses[0] not in status_in:
            yield f"{statuses} after {seen.notes[0]['heavy_s']:.1f} s"

    made = [running_requests_zero_within_s, kv_use_back_to_before, counter_increments, next_request_same_session_normal]
    made += [other_requests_unaffected, light_p95_not_worse_than, heavy_finishes_within_s]
    return {check.__name__: check for check in made}


def _metric(name: str) -> str:
    if name not in METRICS:
        raise NotRun(f"unknown metric {name!r}")
    return METRICS[name]


def _holds(value: Any, wanted: Any) -> bool:
    """Whether all that is wanted is there."""
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(_holds(value.get(key), want) for key, want in wanted.items())
    return bool(value) if wanted == "*" else value == wanted


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return f"(not JSON) {text}"
