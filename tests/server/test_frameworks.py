"""Other people's programs against the scripted model: openai-agents, langchain-openai and litellm, each through a tool loop,
whole and streaming; and schemathesis, which asks all that the OpenAPI document allows, and what it forbids."""

from __future__ import annotations

import asyncio
import functools
import importlib
import operator
import os
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings

from tests.chat import CALL, FINAL, NEXT, THINK, script
from tests.frameworks import installed
from tests.scripted import scripted_llm
from tests.server.harness import MODEL, Served

QUESTION, RESULT = "Weather in Oslo?", "-3 degrees"
WHOLE_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network at its import


class Recorded:
    """A server whose model thinks and calls, then, with the result, answers. `prompts` are those that it was given."""

    def __init__(self, server: Served):
        self.url, self.prompts = server.url + "/v1", list[str]()
        server.play(script(THINK + NEXT + CALL), script(FINAL))
        submit, decode = server.front.submit, server.llm.tokenizer.decode

        def record(feed: Any) -> None:
            self.prompts += [decode(ids, skip_special=False) for ids in feed.prompts]
            submit(feed)

        server.front.submit = record  # type: ignore[method-assign]

    def check(self, answer: str, with_reasoning: bool = False) -> None:
        """Call and result were in the second prompt, once; the reasoning, too, where the client sends it back."""
        assert answer == "It is cold." and len(self.prompts) == 2
        first, second = self.prompts
        assert QUESTION in first and "get_weather" in first and RESULT not in first
        result = f"<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{RESULT}"
        assert second.count(result) == len(re.findall(r'<\|message\|>{"city": ?"Oslo"}<\|call\|>', second)) == 1, second
        assert ("Plan it." in second) or not with_reasoning


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with scripted_llm([]) as llm, Served(llm) as server:
        yield Recorded(server)
        server.wait_until_idle()


@WHOLE_OR_NOT
def test_openai_agents(recorded: Recorded, stream: bool) -> None:
    agents = installed("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        assert city == "Oslo"
        return RESULT

    async def run() -> str:
        client = openai.AsyncOpenAI(base_url=recorded.url, api_key="none", max_retries=0, _strict_response_validation=True)
        model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        agent = agents.Agent(name="forecaster", instructions="Be brief.", model=model, tools=[get_weather])
        if stream:
            result = agents.Runner.run_streamed(agent, QUESTION)
            kinds = [event.type async for event in result.stream_events()]
            assert "raw_response_event" in kinds
        else:
            result = await agents.Runner.run(agent, QUESTION)
        await client.close()
        return result.final_output

    recorded.check(asyncio.run(run()))


def langchain(url: str) -> Any:
    options: dict[str, Any] = {"base_url": url, "api_key": "none", "max_retries": 0, "stream_usage": True}
    return installed("langchain_openai").ChatOpenAI(model=MODEL, **options)


@WHOLE_OR_NOT
def test_langchain(recorded: Recorded, stream: bool) -> None:
    model = langchain(recorded.url)
    tools = importlib.import_module("langchain_core.tools")

    @tools.tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        assert city == "Oslo"
        return RESULT

    bound = model.bind_tools([get_weather])

    def ask(messages: list[Any]) -> Any:
        if not stream:
            return bound.invoke(messages)
        return functools.reduce(operator.add, bound.stream(messages))

    messages: list[Any] = [("user", QUESTION), ask([("user", QUESTION)])]
    (call,) = messages[-1].tool_calls
    assert messages[-1].response_metadata["finish_reason"] == "tool_calls"
    answer = ask([*messages, get_weather.invoke(call)])
    assert answer.usage_metadata["output_tokens"] == len(script(FINAL))
    recorded.check(answer.content)


CITY = {"title": "capital", "description": "A city.", "type": "object", "properties": {"city": {"type": "string"}}}
AS_JSON = THINK + NEXT + '<|channel|>final <|constrain|>json<|message|>{"city":"Oslo"}<|return|>'
AS_CALL = CALL.replace("get_weather", "capital")


WAYS = {"json_schema": AS_JSON, "json_mode": AS_JSON, "function_calling": AS_CALL}


@pytest.mark.parametrize("method", WAYS)
def test_langchain_structured_output(method: str) -> None:
    with scripted_llm([]) as llm, Served(llm) as server:
        model = langchain(server.url + "/v1").with_structured_output(CITY | {"required": ["city"]}, method=method)
        server.play(script(WAYS[method]))
        assert model.invoke(QUESTION) == {"city": "Oslo"}


@WHOLE_OR_NOT
@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_litellm(recorded: Recorded, provider: str, stream: bool) -> None:
    litellm = installed("litellm")
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}

    def ask(messages: list[Any]) -> Any:
        told = litellm.completion(
            model=f"{provider}/{MODEL}", api_base=recorded.url, api_key="none", messages=messages, tools=[tool],
            stream=stream, max_retries=0, reasoning_effort="low",
        )  # fmt: skip
        return litellm.stream_chunk_builder(list(told), messages=messages) if stream else told

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = ask(messages).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and first.message.reasoning_content == "Plan it."
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    answer = ask([*messages, first.message.model_dump(exclude_none=True), result])
    recorded.check(answer.choices[0].message.content, with_reasoning=True)


PATHS = ["/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions", "/tokenize", "/detokenize"]
PATHS += ["/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics", "/version", "/openapi.json"]


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with scripted_llm(script(FINAL)) as llm, Served(llm, max_body_mb=1) as server:
        yield server
        server.wait_until_idle()
        server.alive()


@pytest.mark.parametrize("path", PATHS)
def test_nothing_that_is_sent_makes_a_5xx(plain: Served, path: str) -> None:
    """Bodies and parameters made from the document, by its rules and against them."""
    schemathesis = installed("schemathesis")
    document = schemathesis.openapi.from_dict(plain.http.get("/openapi.json").json())
    operations = [found.ok() for found in document.get_all_operations()]
    assert sorted(operation.path for operation in operations) == sorted(PATHS)
    (operation,) = [one for one in operations if one.path == path]

    @settings(max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
        | operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
    )
    def ask(case: Any) -> None:
        response = case.call(base_url=plain.url)
        assert response.status_code < 500, response.text
        assert response.status_code < 400 or "message" in response.json()["error"]

    ask()
