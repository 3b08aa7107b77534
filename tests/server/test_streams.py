"""What streams are made of: steps over the link, merged where the front is behind; events cut from the first of their kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from simplellm.generation import Chunk
from simplellm.request import Event, Logprob
from simplellm.server import link
from simplellm.server.answers import Answers, event
from simplellm.server.metrics import BETWEEN, Tally
from simplellm.server.protocol import Call, chat_call, completion_call
from simplellm.text.parser import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from simplellm.text.tokenizer import Tokenizer
from tests import vocab
from tests.scripted import scripted_llm
from tests.server.harness import Served, events

SCORED = Event(2, (5,), (Logprob(5, -1.0),), (Logprob(4, -2.0),))
STEPS = [
    [Event(1, (10,)), SCORED],
    [Event(1, (11,)), Event(2, (6,)), Event(3, (7,), finish_reason="stop", stop_token=7)],
    [Event(2, (8,)), Event(1, (12,), finish_reason="length")],
    [Event(2, finish_reason="error", error="lost")],
]


def test_steps_that_wait_are_merged_by_request() -> None:
    """Neighbouring plain tokens are one event; whatever says more stays as it is, and nothing changes its order."""
    batch = [link.squeeze(step) for step in STEPS]
    assert batch[0] == ([1, 2], [10, SCORED]) and batch[1][1][:2] == [11, 6]
    assert list(link.merged(batch)) == [
        Event(1, (10, 11)), Event(1, (12,), finish_reason="length"),
        SCORED, Event(2, (6, 8)), Event(2, finish_reason="error", error="lost"),
        Event(3, (7,), finish_reason="stop", stop_token=7),
    ]  # fmt: skip
    for step, squeezed in zip(STEPS, batch, strict=True):
        assert list(link.merged([squeezed])) == step, "one step alone comes out as it went in"


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
def test_messages_come_whole_however_they_are_cut(size: int) -> None:
    messages = [[], ["a" * 300], link.squeeze(STEPS[0]), ("said",)]
    data, batches = b"".join(map(link.pack, messages)), list[list[Any]]()
    wire = link.Wire(batches.append, lambda: None)
    for at in range(0, len(data), size):
        wire.data_received(data[at : at + size])
    assert [message for batch in batches for message in batch] == messages
    assert size < 1000 or len(batches) == 1, "what has come is handed over together"


TEXTS = ["Hi", ' "quoted" \\ \n\t', "naïve 😀\u2028", "\ud800", "", "</s>"]
KINDS: dict[str, Callable[[str], Delta]] = {
    "content": ContentDelta,
    "reasoning": ReasoningDelta,
    "arguments": partial(ToolCallArguments, 1),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(Path(vocab.tokenizer_json()))


def both(tokenizer: Tokenizer, call: Call, chunks: list[Chunk]) -> None:
    """`events` and `parts` tell the same, chunk by chunk, to the byte."""
    quick, slow = (Answers(call, 'a "model"', "f", tokenizer, [(1, 2)]) for _ in range(2))
    slow.id, slow._head = quick.id, quick._head
    quick.content = slow.content = {0: [True] * 100, 1: [True] * 100}
    for chunk in chunks:
        assert quick.events(chunk) == b"".join(map(event, slow.parts(chunk)))


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_event_that_is_cut_from_another_is_the_same_to_the_byte(tokenizer: Tokenizer, kind: str, usage: bool) -> None:
    call = chat_call({"messages": [{"role": "user", "content": "a"}], "n": 2, "stream_options": {"include_usage": usage}})
    made = [KINDS[kind](text) for text in TEXTS]
    chunks = [Chunk(0, i % 2, [delta], [7], None) for i, delta in enumerate(made * 2)]
    chunks += [Chunk(0, 0, made, [7] * 6, None), Chunk(0, 0, [*made, ContentDelta("else")], [7], None)]
    chunks += [Chunk(0, 1, [ToolCallStart(1, "id", "name")], [7], None), Chunk(0, 1, [], [7], None)]
    chunks += [Chunk(0, 1, [ToolCallArguments(0, "{}")], [7], None), Chunk(0, 0, made[:1], [7], None, "stop")]
    both(tokenizer, call, chunks)


def test_events_of_text_and_of_log_probabilities_are_the_same_too(tokenizer: Tokenizer) -> None:
    made: list[Delta] = [ContentDelta(text) for text in TEXTS]
    call = completion_call({"prompt": "a"})
    both(tokenizer, call, [Chunk(0, 0, deltas, [7], None) for deltas in (made, made[:1], made[1:2], [], made[2:])])
    scored = [Logprob(7, -1.0), Logprob(8, -2.0)]
    chunks = [Chunk(0, 0, made[:1], [7, 8], scored), Chunk(0, 0, made[1:3], [7, 8], scored), Chunk(0, 0, [], [], [], "stop")]
    both(tokenizer, completion_call({"prompt": "a", "logprobs": 0}), chunks)
    both(tokenizer, chat_call({"messages": [], "logprobs": True}), chunks)


def test_what_is_made_in_the_loops_thread() -> None:
    """One short prompt with few answers, and no grammar."""

    def quick(body: dict[str, Any], num_bytes: int = 100) -> bool:
        call = (chat_call if "messages" in body else completion_call)(body)
        call.num_bytes = num_bytes
        return call.quick

    fast: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": [1, 2]}, {"prompt": []}, {"messages": [], "n": 2}]
    assert all(map(quick, fast))
    slow: list[dict[str, Any]] = [{"prompt": ["a"] * 9}, {"prompt": [[1], [2]]}, {"prompt": "a", "n": 100}]
    slow += [{"messages": [], "response_format": {"type": "json_object"}}, {"messages": [], "tools": [{}]}]
    slow += [{"messages": [{}] * 65}, {"messages": [], "answer_tokens": 5}]
    assert not any(map(quick, slow)) and not quick({"prompt": "a"}, 10**6)


def test_the_tally_is_prometheus_histogram() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("a:b_seconds", "told", BETWEEN, "m")
    ours.register(tally)
    histogram = Histogram("a:b_seconds", "told", ("model_name",), registry=theirs, buckets=BETWEEN).labels("m")
    for value in (0.0005, 0.001, 0.0011, 0.5, 10, 11):
        tally.observe(value)
        histogram.observe(value)
    tally.observe(0.25, 2)  # two tokens that came together after half a second
    histogram.observe(0.25)
    histogram.observe(0.25)
    mine, other = (
        [line for line in generate_latest(one).decode().splitlines() if "_created" not in line] for one in (ours, theirs)
    )
    assert mine == other


def test_a_front_that_is_behind_sends_fewer_larger_chunks() -> None:
    """Steps that come while the loop is busy are one chunk a stream; its text is whole, as is its end."""
    with scripted_llm([17196] * 200) as llm, Served(llm) as server:
        hear, held = server.front.hear, list[Any]()

        def behind(messages: list[Any]) -> None:
            held.extend(messages)
            tokens = [new for (_, news), _, _ in held for new in news]
            if len(tokens) >= 50 or any(isinstance(new, Event) for new in tokens) or any(said for _, _, said in held):
                hear(list(held))
                held.clear()

        server.call(lambda: setattr(server.front.send.__self__, "_take", behind))  # type: ignore[attr-defined]
        response = server.complete(max_tokens=200, ignore_eos=True, stream=True)
        chunks = [chunk["choices"][0] for chunk in events(response)]
        assert len(chunks) < 20 and chunks[-1]["finish_reason"] == "length"
        assert "".join(chunk["text"] for chunk in chunks) == llm.tokenizer.decode([17196] * 200)
