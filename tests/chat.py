"""Answers in harmony as scripts, and the check that nearly every chat test makes: both ways of asking say the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from simplellm.api import ChatSettings
from simplellm.generation import Chunk, Output
from simplellm.text.parser import fold
from tests import vocab
from tests.scripted import ScriptedLLM

USER = [{"role": "user", "content": "Weather in Oslo?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"]

THINK = "<|channel|>analysis<|message|>Plan it.<|end|>"
NEXT = "<|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me check.<|end|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>'
FINAL = "<|channel|>final<|message|>It is cold.<|return|>"


def script(text: str) -> list[int]:
    """Ids of text in which the names of control tokens stand for them."""
    tokenizer, ids = vocab.tokenizer(), []
    while text:
        at, marker = min(((text.find(name), name) for name in MARKERS if name in text), default=(len(text), ""))
        ids += tokenizer.encode(text[:at]) + ([tokenizer.special[marker]] if marker else [])
        text = text[at + len(marker) :]
    return ids


def wait_until_idle(llm: ScriptedLLM) -> None:
    deadline = time.monotonic() + 30
    while llm._engine.scheduler.busy:
        assert time.monotonic() < deadline, "requests are left in the engine"
        time.sleep(0.001)
    llm._engine.scheduler.audit()


def told(choice: Any) -> Any:
    """What a choice says, but for the calls' random ids."""
    calls = [(call.name, call.arguments) for call in choice.tool_calls]
    return choice.reasoning, choice.content, calls, choice.finish_reason, choice.token_ids, choice.logprobs, choice.repairs


def check_chunks(chunks: Sequence[Chunk], outputs: list[Output]) -> None:
    """The chunks of each choice add up to it: message, ids, log-probabilities, one finish reason at the end."""
    for output in outputs:
        for choice in output.choices:
            own = [chunk for chunk in chunks if (chunk.index, chunk.choice) == (output.index, choice.index)]
            assert fold(delta for chunk in own for delta in chunk.deltas) == choice.message
            assert [token for chunk in own for token in chunk.token_ids] == choice.token_ids
            assert [chunk.finish_reason for chunk in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == choice.finish_reason
            assert "".join(chunk.text for chunk in own) == choice.content
            assert "".join(chunk.reasoning for chunk in own) == choice.reasoning
            assert all(chunk.deltas or chunk.token_ids or chunk.finish_reason for chunk in own), "an empty chunk"
            if choice.logprobs is not None:
                assert [entry for chunk in own for entry in chunk.logprobs] == choice.logprobs
            else:
                assert all(chunk.logprobs is None for chunk in own)


def both_ways(llm: ScriptedLLM, *scripts: list[int], messages: Any = USER, **settings: Any) -> tuple[Output, list[Chunk]]:
    """chat and chat_stream on the same scripts: equal, and the engine is left empty."""
    settings = {"tools": [TOOL]} | settings
    llm.play(*scripts)
    outputs = llm.chat(messages, **settings).result(30)
    wait_until_idle(llm)
    llm.play(*scripts)
    stream = llm.chat_stream(messages, **settings)
    chunks = list(stream)
    check_chunks(chunks, stream.outputs)
    wait_until_idle(llm)
    assert [list(map(told, output.choices)) for output in stream.outputs] == [list(map(told, o.choices)) for o in outputs]
    return outputs[0], chunks


def chat_settings(**settings: Any) -> ChatSettings:
    return ChatSettings(**(dict.fromkeys(ChatSettings.__dataclass_fields__) | {"parallel_tool_calls": True} | settings))


def kinds(chunks: Sequence[Chunk]) -> list[type]:
    """The kinds of deltas in order, each run of one kind once."""
    every = [type(delta) for chunk in chunks for delta in chunk.deltas]
    return [kind for at, kind in enumerate(every) if at == 0 or every[at - 1] != kind]
