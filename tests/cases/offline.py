"""Kind python: request bodies go through LLM.chat, generate or their streams, without a server.

A refusal at the door (RequestError) stands for status 400, an answer for 200, anything else for 500.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from simplellm import LLM, RequestError
from simplellm.generation import Chunk, Output
from simplellm.text.parser import ToolCallArguments, ToolCallStart
from tests.cases import bodies
from tests.cases.case import Case, NotRun, Verdict, verdict
from tests.cases.checks import Check, compare, make
from tests.cases.harmony import describe, parsed_json
from tests.cases.models import Models
from tests.cases.render import Prompt, prompt_checks

LONGEST = 60  # seconds for one answer


@dataclass
class Answered:
    """What came of one request."""

    body: dict[str, Any]
    status: int
    error: str = ""
    outputs: list[Output] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


def run(case: Case, models: Models) -> Verdict:
    """`input` is a request, or has `requests`. What stands in the way of one request leaves the others' checks."""
    requests = case.input.get("requests", [case.input])
    missing = [f"needs an http kind for input.{name}" for name in ("inject", "server_flags") if name in case.input]
    script = case.input.get("scripted_output_ids")
    if case.needs == "scripted_model" and script is None:
        raise NotRun("; ".join(missing) or "has no scripted_output_ids")
    llm = models.tiny if script is None else models.scripted
    if script is not None:
        models.scripted.play(script)
    answers: list[Answered | None] = []
    for request in requests:
        try:
            answers.append(ask(llm, request))
        except NotRun as reason:
            answers.append(None)
            missing.append(str(reason))
    if not any(answers):
        return verdict(case, [], missing)
    failed, unknown = make(case.expect, checks(llm, answers, models))
    told = verdict(case, failed, missing + unknown)
    made = len(case.expect) - len(unknown)
    if told.status == "not run" and made:
        return Verdict(told.status, case.id, f"{told.why} ({made} of {len(case.expect)} checks pass offline)")
    return told


def ask(llm: LLM, request: dict[str, Any]) -> Answered:
    """Send one body, streaming or not as it says."""
    if request.get("method", "POST") != "POST":
        raise NotRun(f"needs an http kind for {request['method']} {request.get('path')}")
    if not isinstance(body := request.get("json"), dict):
        raise NotRun(f"unknown input: no json body among {', '.join(request)}")
    path = request.get("path", bodies.CHAT if "messages" in body else bodies.COMPLETIONS)
    settings = bodies.arguments(path, body)
    prompt, answer = body.get("messages" if path == bodies.CHAT else "prompt"), Answered(body, 200)
    try:
        if body.get("stream"):
            stream = (llm.chat_stream if path == bodies.CHAT else llm.stream)(prompt, **settings)
            answer.chunks = list(stream)
            answer.outputs = stream.outputs or []
        else:
            answer.outputs = (llm.chat if path == bodies.CHAT else llm.generate)(prompt, **settings).result(LONGEST)
    except RequestError as error:
        return Answered(body, 400, str(error))
    except Exception as error:
        return Answered(body, 500, repr(error))
    return answer


def checks(llm: LLM, asked: list[Answered | None], models: Models) -> dict[str, Check]:
    """Checks of one answer are made of every one that was given."""
    answers = [(number, answer) for number, answer in enumerate(asked) if answer is not None]

    def status_in(values: list[int]) -> Iterator[str]:
        for number, answer in answers:
            if answer.status not in values:
                yield f"request {number} gave {answer.status} {answer.error}, want {values}"

    def status(equals: int) -> Iterator[str]:
        yield from status_in([equals])

    def status_per_request(values: list[Any]) -> Iterator[str]:
        for number, answer in answers:
            if not isinstance(values[number], int):
                raise NotRun(f"unknown check 'status_per_request' with {values[number]!r}")
            if answer.status != values[number]:
                yield f"request {number} gave {answer.status} {answer.error}, want {values[number]}"

    def json_has(path: str) -> Iterator[str]:
        if path != "error.message":
            raise NotRun(f"needs an http kind: json_has {path!r}")
        yield from (f"request {number} says nothing" for number, answer in answers if not answer.error)

    def never(what: str) -> Iterator[str]:
        if what != "5xx or a hang":
            raise NotRun(f"unknown check 'never' with what {what!r}")
        yield from (f"request {number} gave {answer.error}" for number, answer in answers if answer.status >= 500)

    def alive_after(within_s: float) -> Iterator[str]:
        if not llm.chat([{"role": "user", "content": "hi"}], max_tokens=1).result(within_s):
            yield "no answer"

    def prompt_contains_tool_result_once() -> Iterator[str]:
        for _, answer in answers:
            prompt = Prompt(answer.body, models.tokenizer)
            yield from prompt_checks(prompt)["prompt_contains_tool_result_once"]()

    found = [status, status_in, status_per_request, json_has, never, alive_after, prompt_contains_tool_result_once]
    return {check.__name__: check for check in found} | answer_checks(llm, [answer for _, answer in answers])


def answer_checks(llm: LLM, answers: list[Answered]) -> dict[str, Check]:
    """Checks of what an answer says."""

    def field_is(name: str) -> Check:
        def check(equals: Any) -> Iterator[str]:
            for answer in answers:
                yield from compare(seen(answer), {name: equals})

        return check

    def content_is_null_or_empty_but_key_present() -> Iterator[str]:
        yield from (f"it is {text!r}" for answer in answers if (text := seen(answer)["content"]))

    def sse_tool_call(
        index: int, name_once: str, concat_arguments_json: Any, id_in_first_chunk_only_or_constant: bool = True
    ) -> Iterator[str]:
        if not id_in_first_chunk_only_or_constant:
            raise NotRun("unknown check 'sse_tool_call' with other ids")
        for answer in _streamed(answers):
            deltas = [delta for chunk in answer.chunks for delta in chunk.deltas]
            starts = [delta for delta in deltas if isinstance(delta, ToolCallStart) and delta.index == index]
            pieces = [delta.text for delta in deltas if isinstance(delta, ToolCallArguments) and delta.index == index]
            if [start.name for start in starts] != [name_once] or not starts[0].id:
                yield f"call {index} is announced as {starts}, want {name_once!r} once with an id"
            if parsed_json("".join(pieces)) != concat_arguments_json:
                yield f"arguments {pieces}, want {concat_arguments_json}"

    def sse_concat(name: str) -> Check:
        def check(equals: str) -> Iterator[str]:
            for answer in _streamed(answers):
                text = "".join(getattr(chunk, name) for chunk in answer.chunks)
                if text != equals:
                    yield f"{text!r}, want {equals!r}"

        return check

    def same_as_non_stream() -> Iterator[str]:
        for answer in answers:
            other = ask(llm, {"json": {**answer.body, "stream": not answer.body.get("stream", False)}})
            yield from compare(seen(other), seen(answer), "the other way ")

    return {
        "content_is_null_or_empty_but_key_present": content_is_null_or_empty_but_key_present,
        "sse_tool_call": sse_tool_call,
        "sse_content_concat": sse_concat("text"),
        "sse_reasoning_concat": sse_concat("reasoning"),
        "same_as_non_stream": same_as_non_stream,
    } | {name: field_is(name) for name in ("finish_reason", "reasoning", "content", "tool_calls", "tool_name")}


def seen(answer: Answered) -> dict[str, Any]:
    """The first choice's fields; of a refused request, that it was."""
    if not answer.outputs:
        return describe_failure(answer)
    choice = answer.outputs[0].choices[0]
    return describe(choice.message, choice.finish_reason)


def describe_failure(answer: Answered) -> dict[str, Any]:
    names = ("reasoning", "content", "tool_calls", "tool_name", "finish_reason")
    return dict.fromkeys(names, f"(status {answer.status}: {answer.error})")


def _streamed(answers: list[Answered]) -> list[Answered]:
    streamed = [answer for answer in answers if answer.chunks]
    if not streamed:
        raise NotRun("no request streams")
    return streamed
