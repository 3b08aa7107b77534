"""The built-in model on real conversations: transformers' greedy answers, streams, tools, stops, cache, efforts, long texts.

The stored answers are transformers' on the same weights in float32; `python -m tools.builtin.install` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from simplellm import LLM, Output
from simplellm.config import PAGE
from simplellm.text.tokenizer import Tokenizer
from tests.chat import check_chunks
from tools.builtin.data import answer_ids, prompt_ids
from tools.builtin.install import ANSWERS, BUILTIN, CONVERSATIONS, DATE, IN_JSON, RESULT, WEATHER
from tools.builtin.judge import LONGEST
from tools.builtin.needle import FILLERS
from tools.builtin.problem import EFFORTS
from tools.builtin.tasks import SHARES, example
from tools.builtin.words import NOUNS, QUALITIES, VERBS

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 300, "current_date": DATE}


def engine(**options: Any) -> LLM:
    return LLM(device="cpu", progress=False, **({"max_context": 2048} | options))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine() as started:
        yield started


def ask(llm: LLM, *turns: str, system: str = "", **settings: Any) -> Output:
    """The answer to the last of the turns, which user and assistant took."""
    messages = [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]
    messages = [{"role": "system", "content": system}, *messages] if system else messages
    return llm.chat(messages, **(GREEDY | settings)).result(60)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_answers_are_those_of_transformers(dtype: str) -> None:
    with engine(dtype=dtype) as llm:
        pending = [llm.chat(**made, **GREEDY) for made in CONVERSATIONS]
        got = [generation.result(60)[0].token_ids for generation in pending]
    assert got == json.loads(ANSWERS.read_text(encoding="utf-8"))


def test_it_answers_a_sum_and_shows_its_reasoning(llm: LLM) -> None:
    output = ask(llm, "What is 23 + 48?")
    assert output.content == "23 + 48 = 71." and "3+8+0=11" in output.reasoning
    assert output.finish_reason == "stop" and not output.choices[0].repairs


def test_more_effort_is_more_reasoning(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 85 + 47?"}]
    pending = [llm.chat(messages, reasoning_effort=effort, **GREEDY) for effort in ("low", "medium", "high")]
    low, medium, high = (generation.result(60)[0] for generation in pending)
    assert low.content == medium.content == high.content == "85 + 47 = 132."
    assert 0 < low.usage.reasoning_tokens < medium.usage.reasoning_tokens < high.usage.reasoning_tokens


def test_a_stream_adds_up_to_the_answer_in_many_pieces(llm: LLM) -> None:
    stream = llm.chat_stream([{"role": "user", "content": "Sort the numbers 30, 4 and 17."}], **GREEDY)
    chunks = list(stream)
    check_chunks(chunks, stream.outputs)
    assert stream.outputs[0].content == "Sorted: 4, 17, 30." and len(chunks) > 10
    said = [bool(chunk.text) for chunk in chunks if chunk.text or chunk.reasoning]
    assert said == sorted(said), "reasoning came after content had begun"


def test_a_tool_is_called_and_its_result_used(llm: LLM) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = llm.chat(messages, tools=[WEATHER], **GREEDY).result(60)[0]
    (call,) = first.tool_calls
    assert (first.finish_reason, call.name, json.loads(call.arguments)) == ("tool_calls", "get_weather", {"city": "Paris"})
    called = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    messages.append({"role": "assistant", "reasoning": first.reasoning, "tool_calls": [called]})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    second = llm.chat(messages, tools=[WEATHER], **GREEDY).result(60)[0]
    assert second.content == "It is 21 degrees and sunny in Paris." and second.tool_calls == []


def test_without_the_tool_it_says_that_it_cannot_know(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    output = llm.chat(messages, tools=[WEATHER], tool_choice="none", **GREEDY).result(60)[0]
    assert output.tool_calls == [] and output.finish_reason == "stop" and "no tool" in output.content


def test_a_stop_string_ends_the_content_not_the_reasoning(llm: LLM) -> None:
    output = ask(llm, "What is 23 + 48?", stop=["="])
    assert output.content == "23 + 48 " and "=" in output.reasoning and output.finish_reason == "stop"


def test_a_second_turn_reuses_the_first_and_answers_as_without_the_cache(llm: LLM) -> None:
    asked = "apples: 12\npears: 7\nplums: 31\ngrapes: 5\nlemons: 44\nmelons: 8\ncherries: 90\nHow many plums are there?"
    system = "You are a helpful assistant. Be brief and clear. Be polite. Do not make mistakes. Answer in English."
    first = ask(llm, asked, system=system)
    assert first.prompt_tokens >= PAGE
    assert first.content == "plums: 31."
    turns = (asked, first.content, "And cherries?")
    cached = ask(llm, *turns, system=system)
    with engine(prefix_cache=False) as fresh:
        plain = ask(fresh, *turns, system=system)
    assert cached.usage.cached_tokens >= PAGE > plain.usage.cached_tokens == 0
    assert cached.token_ids == plain.token_ids and cached.content == "cherries: 90."


def test_json_when_asked(llm: LLM) -> None:
    output = llm.chat([IN_JSON, {"role": "user", "content": "What is 44 - 9?"}], **GREEDY).result(60)[0]
    assert json.loads(output.content) == {"answer": 35}


def test_answers_do_not_depend_on_who_else_asks(llm: LLM) -> None:
    questions = [f"What is {n} + {7 * n}?" for n in range(11, 19)]
    together = [llm.chat([{"role": "user", "content": q}], reasoning_effort="low", **GREEDY) for q in questions]
    contents = [generation.result(120)[0].content for generation in together]
    assert contents == [f"{n} + {7 * n} = {8 * n}." for n in range(11, 19)]


@pytest.mark.parametrize(("num_sentences", "beyond"), [(10, 128), (20, 128), (100, 1024), (400, 4096)])
def test_it_finds_a_fact_in_a_text_at_any_depth(num_sentences: int, beyond: int) -> None:
    """Beyond the window, beyond the rows of most of the training, beyond YaRN's base length."""
    rng, words = Random(num_sentences), {"q": QUALITIES, "n": NOUNS, "m": NOUNS, "v": VERBS}
    drawn = [{name: rng.choice(choices) for name, choices in words.items()} for _ in range(num_sentences)]
    fillers = [rng.choice(FILLERS).format(**each) for each in drawn]
    questions = []
    for depth in (0.02, 0.5, 0.98):
        place = round(depth * num_sentences)
        text = " ".join([*fillers[:place], "The room number of Nina is 4072.", *fillers[place:]])
        questions.append(f"{text}\nWhat is the room number of Nina?")
    with engine(max_context=8192) as llm:
        asked = [[{"role": "user", "content": question}] for question in questions]
        pending = [llm.chat(messages, reasoning_effort="low", **GREEDY) for messages in asked]
        outputs = [generation.result(300)[0] for generation in pending]
    assert min(output.prompt_tokens for output in outputs) > beyond
    assert [output.content for output in outputs] == ["The room number of Nina is 4072."] * len(outputs)


@pytest.mark.parametrize("task", SHARES)
def test_every_conversation_of_the_generator_fits_the_rows_of_training(task: str) -> None:
    tokenizer, rng = Tokenizer.from_file(BUILTIN / "tokenizer.json"), Random(task)
    for i in range(240):
        made = example(rng, task, EFFORTS[i % 3], held_out=i % 8 == 0)
        prompt, answer = prompt_ids(made, tokenizer), answer_ids(made, tokenizer)
        assert len(answer) <= LONGEST
        assert len(prompt) + len(answer) <= (5120 if task == "needle" else 1024)


def test_it_fits_the_package() -> None:
    assert sum(file.stat().st_size for file in BUILTIN.iterdir()) <= 8_000_000
