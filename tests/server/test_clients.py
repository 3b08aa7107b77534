"""The official client, strict about types, on every endpoint and stream; a stream adds up to what the whole answer says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from simplellm import LLM
from tests.chat import CALL, FINAL, NEXT, PREAMBLE, THINK, TOOL, script
from tests.scripted import scripted_llm
from tests.server.harness import MODEL, USER, Served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with scripted_llm([]) as llm, Served(llm) as served:
        yield served


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    """The built-in model."""
    with LLM(device="cpu", progress=False) as llm, Served(llm) as served:
        yield served


def whole(server: Served, *texts: str, **body: Any) -> Any:
    server.play(*map(script, texts))
    return server.client().chat.completions.create(model=MODEL, messages=USER, **body)


def streamed(server: Served, *texts: str, **body: Any) -> list[Any]:
    server.play(*map(script, texts))
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return list(server.client().chat.completions.create(model=MODEL, messages=USER, **body))


def folded(chunks: list[Any]) -> list[Any]:
    """Choices made of chunks: what a client adds up."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        whole = choices.setdefault(choice.index, {"content": "", "reasoning": "", "calls": {}, "logprobs": [], "reason": None})
        delta = choice.delta.model_dump()
        assert whole["reason"] is None, "something follows the finish reason"
        assert delta.get("reasoning") == delta.get("reasoning_content")
        whole["content"] += delta.get("content") or ""
        whole["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            new = {"id": call["id"], "name": call["function"]["name"], "arguments": ""}
            known = whole["calls"].setdefault(call["index"], new)
            assert call["id"] in (None, known["id"]) and call["function"].get("name") in (None, known["name"])
            known["arguments"] += call["function"]["arguments"]
        whole["logprobs"] += [entry.model_dump() for entry in (choice.logprobs.content if choice.logprobs else ())]
        whole["reason"] = choice.finish_reason
    return [choices[index] for index in sorted(choices)]


def told(completion: Any) -> list[Any]:
    """The same of a whole answer."""
    choices = []
    for choice in completion.choices:
        message = choice.message.model_dump()
        calls = [
            {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for call in message.get("tool_calls") or ()
        ]
        logprobs = [entry.model_dump() for entry in (choice.logprobs.content if choice.logprobs else ())]
        assert message.get("reasoning") == message.get("reasoning_content")
        choices.append(
            {
                "content": message["content"] or "",
                "reasoning": message.get("reasoning") or "",
                "calls": dict(enumerate(calls)),
                "logprobs": logprobs,
                "reason": choice.finish_reason,
            }
        )
    return choices


def without_ids(choices: list[Any]) -> list[Any]:
    return [choice | {"calls": [call | {"id": ""} for call in choice["calls"].values()]} for choice in choices]


ANSWERS = {
    "answer": THINK + NEXT + FINAL,
    "call": THINK + NEXT + PREAMBLE + NEXT + CALL,
    "no reasoning": FINAL,
    "two parts": THINK + NEXT + PREAMBLE + NEXT + THINK + NEXT + FINAL,
    "emoji": FINAL.replace("cold", "🥶 naïve"),
    "nothing": "<|return|>",
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_adds_up_to_the_whole_answer(server: Served, name: str, logprobs: bool) -> None:
    body: dict[str, Any] = {"tools": [TOOL]} | ({"logprobs": True, "top_logprobs": 2} if logprobs else {})
    completion, chunks = whole(server, ANSWERS[name], **body), streamed(server, ANSWERS[name], **body)
    assert without_ids(folded(chunks)) == without_ids(told(completion))
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == completion.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1) and chunks[-1].choices == []
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant"
    server.wait_until_idle()


def test_what_an_answer_says(server: Served) -> None:
    completion = whole(server, THINK + NEXT + PREAMBLE + NEXT + CALL, tools=[TOOL])
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me check."
    assert choice.message.reasoning == "Plan it." and choice.message.tool_calls[0].id.startswith("call_")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    usage = completion.usage
    assert (
        usage.completion_tokens_details.reasoning_tokens == 3
        and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    )
    assert completion.model == MODEL and completion.object == "chat.completion"


def test_a_call_without_content_says_null(server: Served) -> None:
    assert whole(server, CALL, tools=[TOOL]).choices[0].message.content is None
    assert whole(server, "<|return|>").choices[0].message.content == ""


def test_logprobs_are_of_the_contents_tokens(server: Served) -> None:
    completion = whole(server, THINK + NEXT + FINAL, logprobs=True, top_logprobs=3)
    entries = completion.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == "It is cold."
    assert b"".join(bytes(entry.bytes) for entry in entries) == b"It is cold."
    assert all(len(entry.top_logprobs) == 3 and entry.logprob < 0 for entry in entries)


def test_n_answers_have_indexes_and_share_the_prompts_count(server: Served) -> None:
    texts = [FINAL.replace("cold", word) for word in ("cold", "warm", "wet")]
    completion = whole(server, *texts, n=3)
    assert [choice.message.content for choice in completion.choices] == ["It is cold.", "It is warm.", "It is wet."]
    assert completion.usage.completion_tokens == sum(len(script(text)) for text in texts)
    assert without_ids(folded(streamed(server, *texts, n=3))) == without_ids(told(completion))


def test_stop_strings_and_the_limit_end_an_answer(server: Served) -> None:
    (choice,) = whole(server, THINK + NEXT + FINAL, stop=" is").choices
    assert (choice.message.content, choice.finish_reason) == ("It", "stop")
    (choice,) = whole(server, THINK + NEXT + FINAL, max_completion_tokens=5, max_tokens=99).choices
    assert (choice.message.content, choice.message.reasoning, choice.finish_reason) == ("", "Plan it", "length")
    server.wait_until_idle()


def test_the_stream_helper_and_a_parsed_answer(server: Served) -> None:
    server.play(script(THINK + NEXT + CALL))
    with server.client().chat.completions.stream(model=MODEL, messages=USER, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"city":"Oslo"}'


def test_a_tool_loop(server: Served) -> None:
    """The client sends back what it got, its result with it: reasoning, call and result are in the next prompt."""
    first = whole(server, THINK + NEXT + CALL, tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "-3 degrees"}
    messages = [*USER, first.model_dump(exclude_none=True), result]
    server.play(script(FINAL))
    second = server.client().chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "It is cold."
    prompt = server.http.post("/v1/chat/completions/render", json={"messages": messages, "tools": [TOOL]}).json()["prompt"]
    assert "Plan it." in prompt and '{"city":"Oslo"}' in prompt and "-3 degrees" in prompt


def test_models(server: Served) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(f"openai/{MODEL}").id == f"openai/{MODEL}"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_text_completions(real: Served) -> None:
    client = real.client()
    body: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": 9, "temperature": 0, "logprobs": 2}
    completion = client.completions.create(**body)
    lax = real.client(strict=False)  # its type forbids the null that OpenAI itself sends as finish_reason in a text stream
    chunks = list(lax.completions.create(stream=True, stream_options={"include_usage": True}, **body))
    (choice,) = completion.choices
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == choice.text
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason == "length"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks[:-1] if chunk.choices[0].logprobs]
        assert sum(parts, []) == getattr(choice.logprobs, name) and len(sum(parts, [])) == 9
    assert chunks[-1].usage.completion_tokens == completion.usage.completion_tokens == 9


def test_echo_scores_the_prompt(real: Served) -> None:
    """The first token has no score: null, as OpenAI sent it, which the client's types forbid."""
    client = real.client(strict=False)
    body: dict[str, Any] = {"model": MODEL, "prompt": "Your answer: Yes", "max_tokens": 0, "echo": True, "logprobs": 1}
    completion = client.completions.create(**body)
    (choice,) = completion.choices
    assert choice.text == body["prompt"] == "".join(choice.logprobs.tokens)
    assert len(choice.logprobs.token_logprobs) == completion.usage.prompt_tokens
    assert choice.logprobs.token_logprobs[0] is None and all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    streamed = list(client.completions.create(stream=True, **(body | {"max_tokens": 2})))
    assert "".join(chunk.choices[0].text for chunk in streamed).startswith(body["prompt"])
    assert streamed[0].choices[0].logprobs.token_logprobs[: completion.usage.prompt_tokens] == choice.logprobs.token_logprobs


def test_prompts_may_be_lists_and_ids(real: Served) -> None:
    client = real.client()
    ids = real.http.post("/tokenize", json={"prompt": "Once"}).json()["tokens"]
    for prompt, count in ((["Once", "Twice"], 2), (ids, 1), ([ids, ids], 2)):
        completion = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0, n=2)
        assert [choice.index for choice in completion.choices] == list(range(2 * count))
        assert completion.choices[0].text == completion.choices[1].text
    one = client.completions.create(model=MODEL, prompt="Once", max_tokens=3, temperature=0).choices[0].text
    assert one == client.completions.create(model=MODEL, prompt=ids, max_tokens=3, temperature=0).choices[0].text


def test_seeded_answers_repeat_and_streams_draw_the_same(real: Served) -> None:
    client = real.client()
    body: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 12, "seed": 7, "logprobs": True}
    once, again = (told(client.chat.completions.create(**body)) for _ in range(2))
    assert once == again == folded(list(client.chat.completions.create(stream=True, **body)))
    real.wait_until_idle()


def test_tokenize_detokenize_and_render_agree(real: Served) -> None:
    post = real.http.post
    told = post("/tokenize", json={"prompt": "naïve <|end|> 🥶", "model": MODEL}).json()
    assert told["count"] == len(told["tokens"]) and told["max_model_len"] == real.llm.config.max_context
    assert post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "naïve <|end|> 🥶"}
    rendered = post("/v1/chat/completions/render", json={"messages": USER, "current_date": "2026-01-02"}).json()
    asked = post("/tokenize", json={"messages": USER, "current_date": "2026-01-02"}).json()
    assert rendered["prompt_token_ids"] == asked["tokens"] and "2026-01-02" in rendered["prompt"]
    assert rendered["prompt"].endswith("<|start|>assistant")


def test_the_async_client(server: Served) -> None:
    import asyncio

    async def ask() -> str:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", _strict_response_validation=True)
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        await client.close()
        return text

    server.play(script(THINK + NEXT + FINAL))
    assert asyncio.run(ask()) == "It is cold."


PLACES = {"city": {"enum": ["Oslo", "Bergen"]}}
CITY = {"type": "object", "properties": PLACES, "required": ["city"], "additionalProperties": False}
ROOM: dict[str, Any] = {"max_tokens": 120, "extra_body": {"answer_tokens": 60}}


@pytest.mark.parametrize("stream", [False, True])
def test_schemas_and_demanded_calls_hold_on_a_random_model(real: Served, stream: bool) -> None:
    """Whatever it would rather say: the content is one of two objects, the call is of the named function."""
    client = real.client()
    formats = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
    named = {"type": "function", "function": {"name": "weather"}}
    required: dict[str, Any] = {"tools": [tool], "tool_choice": "required"}
    for demand in ({"response_format": formats}, {"tools": [tool, TOOL], "tool_choice": named}, required):
        answer = client.chat.completions.create(model=MODEL, messages=USER, stream=stream, seed=3, **ROOM, **demand)
        (choice,) = folded(list(answer)) if stream else told(answer)
        calls = [call["arguments"] for call in choice["calls"].values()]
        (text,) = calls or [choice["content"]]
        assert json.loads(text)["city"] in ("Oslo", "Bergen") and bool(calls) is ("tools" in demand)
        assert choice["reason"] == ("tool_calls" if calls else "stop")
    real.wait_until_idle()


def test_an_answer_is_parsed_into_a_model(real: Served) -> None:
    class City(pydantic.BaseModel):
        city: Literal["Oslo", "Bergen"]

    parsed = real.client().chat.completions.parse(model=MODEL, messages=USER, response_format=City, **ROOM)
    assert parsed.choices[0].message.parsed.city in ("Oslo", "Bergen")
