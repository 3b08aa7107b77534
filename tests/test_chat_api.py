"""chat and chat_stream on scripted ids of the real vocabulary, through the real engine.

Nearly every test asks both ways: the pieces of a stream add up to the message that chat gives, and nothing stays behind.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from simplellm import EngineError, RequestError
from simplellm.generation import Chunk, Output, Stream
from simplellm.request import Event, Logprob
from simplellm.text.parser import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from tests import vocab
from tests.chat import (
    CALL,
    FINAL,
    MARKERS,
    NEXT,
    PREAMBLE,
    THINK,
    TOOL,
    USER,
    both_ways,
    chat_settings,
    check_chunks,
    kinds,
    script,
    told,
    wait_until_idle,
)
from tests.scripted import ScriptedLLM, scripted_llm


@pytest.fixture(scope="module")
def llm() -> Iterator[ScriptedLLM]:
    with scripted_llm([]) as engine:
        yield engine


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "reason"),
    [
        (THINK + NEXT + FINAL, "Plan it.", "It is cold.", [], "stop"),
        (THINK + NEXT + CALL, "Plan it.", "", ['{"city":"Oslo"}'], "tool_calls"),
        (CALL, "", "", ['{"city":"Oslo"}'], "tool_calls"),
        (THINK + NEXT + PREAMBLE + NEXT + CALL, "Plan it.", "Let me check.", ['{"city":"Oslo"}'], "tool_calls"),
        (THINK + NEXT + THINK + NEXT + FINAL, "Plan it.\nPlan it.", "It is cold.", [], "stop"),
        (THINK + NEXT + PREAMBLE + NEXT + FINAL, "Plan it.", "Let me check.\nIt is cold.", [], "stop"),
        (CALL[: -len("<|call|>")] + "<|endoftext|>", "", "", ['{"city":"Oslo"}'], "tool_calls"),
        (FINAL.replace("<|return|>", "<|endoftext|>"), "", "It is cold.", [], "stop"),
        ("<|return|>", "", "", [], "stop"),
    ],
)
def test_messages(llm: ScriptedLLM, text: str, reasoning: str, content: str, calls: list[str], reason: str) -> None:
    output, chunks = both_ways(llm, script(text), logprobs=True)
    assert (output.reasoning, output.content, output.finish_reason) == (reasoning, content, reason)
    assert [(call.name, call.arguments) for call in output.tool_calls] == [("get_weather", text) for text in calls]
    assert output.token_ids == script(text), "all ids, the stop token and the headers included"
    usage = output.usage
    assert usage.completion_tokens == len(script(text)) and usage.total_tokens == usage.prompt_tokens + len(script(text))


def test_reasoning_tokens_are_those_of_the_reasoning_text(llm: ScriptedLLM) -> None:
    output, _ = both_ways(llm, script(THINK + NEXT + THINK + NEXT + PREAMBLE + NEXT + FINAL))
    assert output.usage.reasoning_tokens == 2 * len(vocab.tokenizer().encode("Plan it.")) == 6


def test_a_call_streams_its_name_once_then_its_arguments(llm: ScriptedLLM) -> None:
    output, chunks = both_ways(llm, script(THINK + NEXT + PREAMBLE + NEXT + CALL))
    assert kinds(chunks) == [ReasoningDelta, ContentDelta, ToolCallStart, ToolCallArguments]
    deltas = [delta for chunk in chunks for delta in chunk.deltas]
    (start,) = (delta for delta in deltas if isinstance(delta, ToolCallStart))
    assert (start.index, start.name) == (0, "get_weather") and start.id.startswith("call_")
    assert sum(isinstance(delta, ToolCallArguments) for delta in deltas) > 3
    assert chunks[-1].finish_reason == "tool_calls" and chunks[-1].token_ids == [200012]


def test_a_character_split_over_tokens_inside_arguments_stays_whole(llm: ScriptedLLM) -> None:
    head, tail = script(CALL.replace('{"city":"Oslo"}<|call|>', '{"city":"')), script('"}<|call|>')
    letters = [vocab.ranks()[bytes([byte])] for byte in "Ålesund 🙂".encode()]
    output, chunks = both_ways(llm, head + letters + tail)
    assert json.loads(output.tool_calls[0].arguments) == {"city": "Ålesund 🙂"}
    pieces = [d.text for chunk in chunks for d in chunk.deltas if isinstance(d, ToolCallArguments)]
    assert "🙂" in pieces and all("\ufffd" not in piece and piece for piece in pieces)
    cut, _ = both_ways(llm, head + letters[:-2], max_tokens=len(head) + len(letters) - 2)
    assert cut.tool_calls[0].arguments == '{"city":"Ålesund \ufffd' and cut.finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<|channel|>analysis<|message|>I think that", ("I think that", "", [])),
        (THINK + NEXT + PREAMBLE.replace("<|end|>", ""), ("Plan it.", "Let me check.", [])),
        (CALL.replace('"}<|call|>', ""), ("", "", ['{"city":"Oslo'])),
        (THINK + NEXT + "<|channel|>final", ("Plan it.", "", [])),
    ],
)
def test_the_budget_ends_inside(llm: ScriptedLLM, text: str, want: Any) -> None:
    """Case p04: what was said until then is told, and the reason is length."""
    output, _ = both_ways(llm, script(text) + [0] * 9, max_tokens=len(script(text)))
    assert (output.reasoning, output.content, [call.arguments for call in output.tool_calls]) == want
    assert output.finish_reason == "length" and len(output.token_ids) == len(script(text))


def test_no_tokens_at_all(llm: ScriptedLLM) -> None:
    output, chunks = both_ways(llm, script(FINAL), max_tokens=0)
    assert told(output.choices[0])[:5] == ("", "", [], "length", []) and len(chunks) == 1


@pytest.mark.parametrize("more", [NEXT + FINAL, "<|channel|>analysis<|message|>x", "x", NEXT + CALL])
def test_a_message_after_the_final_one_ends_the_request_in_the_engine(llm: ScriptedLLM, more: str) -> None:
    done = FINAL.replace("<|return|>", "<|end|>")
    steps = llm.runner.num_steps
    output, _ = both_ways(llm, script(done + more) + [0] * 5000, logprobs=True)
    assert told(output.choices[0])[:4] == ("", "It is cold.", [], "stop")
    assert output.choices[0].repairs == {"message_after_final": 1}
    assert output.token_ids[: len(script(done))] == script(done) and len(output.token_ids) <= len(script(done)) + 2
    assert llm.runner.num_steps - steps < 100, "the engine drew on"


def test_repairs_are_told(llm: ScriptedLLM) -> None:
    text = "<|channel|>musings<|message|>a<|end|><|channel|>commentary to=functions.nope<|message|>{}<|call|>"
    output, _ = both_ways(llm, script(text))
    assert output.choices[0].repairs == {"unknown_channel": 1, "missing_start": 1, "undeclared_recipient": 1}
    assert output.reasoning == "a\n{}" and output.finish_reason == "stop" and not output.tool_calls


ANSWERED = THINK + NEXT + FINAL
STOPPED = THINK + NEXT + PREAMBLE + NEXT + CALL
TWO = PREAMBLE + NEXT + FINAL


@pytest.mark.parametrize(
    ("text", "stop", "want", "kept"),
    [
        (ANSWERED, "Plan", ("Plan it.", "It is cold.", 0, "stop"), ANSWERED),
        (STOPPED, ["Oslo", "Plan"], ("Plan it.", "Let me check.", 1, "tool_calls"), STOPPED),
        (ANSWERED, "It", ("Plan it.", "", 0, "stop"), ANSWERED.split("It is")[0]),
        (ANSWERED, " cold", ("Plan it.", "It is", 0, "stop"), ANSWERED.split(" cold")[0]),
        (ANSWERED, ["s co", "d."], ("Plan it.", "It i", 0, "stop"), ANSWERED.split(" cold")[0]),
        (STOPPED, "check", ("Plan it.", "Let me ", 0, "stop"), STOPPED.split("check")[0] + "check"),
        (TWO, ".\nIt", ("", "Let me check", 0, "stop"), PREAMBLE.split(".")[0]),
        (TWO, "\nIt is", ("", "Let me check.", 0, "stop"), TWO.split("It")[0]),  # the header was given out before it began
        (STOPPED, ".\nIt", ("Plan it.", "Let me check.", 1, "tool_calls"), STOPPED),
    ],
)
def test_stop_strings_are_looked_for_in_content_only(llm: ScriptedLLM, text: str, stop: Any, want: Any, kept: str) -> None:
    """`kept`: what the ids that stay spell; a token stays if part of it does."""
    output, _ = both_ways(llm, script(text) + [0] * 3000, stop=stop, logprobs=True)
    assert (output.reasoning, output.content, len(output.tool_calls), output.finish_reason) == want
    assert llm.tokenizer.decode(output.token_ids, skip_special=False) == kept
    assert [entry.token for entry in output.logprobs] == output.token_ids


def test_a_stop_string_in_text_that_only_the_end_makes_content(llm: ScriptedLLM) -> None:
    """An answer without a header is held back until the budget ends; what then comes out is searched as well."""
    output, _ = both_ways(llm, script("Hello there"), stop=" there", max_tokens=2)
    assert (output.content, output.finish_reason) == ("Hello", "stop")


@pytest.mark.parametrize("text", [STOPPED, FINAL.replace("<|return|>", "<|end|>") + NEXT + FINAL])
@pytest.mark.parametrize("stop", [None, "check", " cold"])
def test_events_of_several_tokens_say_the_same(llm: ScriptedLLM, text: str, stop: str | None) -> None:
    """The engine gives one token an event today; a step that drafts will give more."""
    results = []
    for size in (1, 2, 3, 7, 100):
        job = llm._chat_job(USER, chat_settings(tools=[TOOL]), 0, "", {"stop": stop, "logprobs": True})
        stream, rid, ids = Stream(job), job.answers[0][0].request.rid, script(text)
        for at in range(0, len(ids), size):
            logprobs = tuple(Logprob(token, -0.5) for token in ids[at : at + size])
            stream.on_event(Event(rid, tuple(ids[at : at + size]), logprobs, (), "stop" if at + size >= len(ids) else None))
        check_chunks(list(stream), stream.outputs)
        results.append(told(stream.outputs[0].choices[0]))
    assert results == [results[0]] * len(results)


def test_held_content_comes_before_the_call_that_follows_it(llm: ScriptedLLM) -> None:
    """The preamble's "." may begin the stop string; a client that prints in order must not get it behind the call."""
    _, chunks = both_ways(llm, script(STOPPED), stop=".\nIt")
    assert kinds(chunks) == [ReasoningDelta, ContentDelta, ToolCallStart, ToolCallArguments]


def test_random_answers_stop_strings_and_budgets(llm: ScriptedLLM) -> None:
    """Anything the model writes is told alike both ways, leaves the engine empty, and shows no stop string."""
    rng = random.Random(5)
    pieces = [*MARKERS[:6], *MARKERS[:3], "assistant", "analysis", "commentary", "final", " to=functions.get_weather"]
    pieces += ["abc", " ab", "b\n", "🙂", "a", '{"a":', THINK, NEXT + PREAMBLE, NEXT + CALL, NEXT + FINAL]
    half = [vocab.ranks()[bytes([byte])] for byte in "🙂".encode()[:3]]
    for _ in range(120):
        ids = [
            token for _ in range(rng.randint(1, 15)) for token in (script(rng.choice(pieces)) if rng.random() < 0.9 else half)
        ]
        stops = rng.sample(["ab", "b\n", "c", "a\nb", "🙂a", "me ch", ".\nL", "\ufffd"], rng.randint(0, 2))
        settings = {"max_tokens": rng.choice([None, 3, 20]), "logprobs": True, "ignore_eos": rng.random() < 0.2}
        output, _ = both_ways(llm, ids, stop=stops, **settings | ({"max_tokens": 40} if settings["ignore_eos"] else {}))
        assert not any(stop in output.content for stop in stops if "\n" not in stop)
        assert output.token_ids == (ids + [199999] * 40)[: len(output.token_ids)]


def test_n_choices_each_with_their_own_script(llm: ScriptedLLM) -> None:
    first, second = THINK + NEXT + FINAL, THINK + NEXT + THINK + NEXT + CALL
    output, chunks = both_ways(llm, script(first), script(second), n=2, logprobs=True)
    assert [choice.index for choice in output.choices] == [0, 1] == sorted({chunk.choice for chunk in chunks})
    assert [choice.finish_reason for choice in output.choices] == ["stop", "tool_calls"]
    assert output.usage.completion_tokens == len(script(first)) + len(script(second))
    assert output.usage.reasoning_tokens == 3 * 3
    stopped, _ = both_ways(llm, script(first), script(second), n=2, stop="is")
    assert [choice.content for choice in stopped.choices] == ["It ", ""]


def test_logprobs_are_of_the_tokens_beside_them(llm: ScriptedLLM) -> None:
    output, chunks = both_ways(llm, script(STOPPED), logprobs=True, top_logprobs=2)
    assert [entry.token for entry in output.logprobs] == output.token_ids == script(STOPPED)
    positions = range(output.prompt_tokens, output.prompt_tokens + len(output.token_ids))
    assert [entry.logprob for entry in output.logprobs] == [-position / 1000 for position in positions]
    assert all(len(entry.top) == 2 for entry in output.logprobs)
    assert all([entry.token for entry in chunk.logprobs] == chunk.token_ids for chunk in chunks)


def test_ignore_eos_runs_to_the_budget_and_tells_the_answer_once(llm: ScriptedLLM) -> None:
    output, _ = both_ways(llm, script(THINK + NEXT + FINAL + NEXT + FINAL), ignore_eos=True, max_tokens=60)
    assert told(output.choices[0])[:4] == ("Plan it.", "It is cold.", [], "length")
    assert output.usage.completion_tokens == 60 and output.usage.reasoning_tokens == 3
    calls, _ = both_ways(llm, script(CALL + NEXT + CALL), ignore_eos=True, max_tokens=len(script(CALL + NEXT + CALL)))
    assert [call.name for call in calls.tool_calls] == ["get_weather"] * 2 and calls.tool_calls[0].id != calls.tool_calls[1].id
    alone, _ = both_ways(llm, script(CALL + NEXT + CALL), ignore_eos=True, max_tokens=50, parallel_tool_calls=False)
    assert len(alone.tool_calls) == 1


def test_stop_token_ids_end_an_answer_anywhere(llm: ScriptedLLM) -> None:
    ids = script(THINK + NEXT + FINAL)
    output, _ = both_ways(llm, ids, stop_token_ids=[200007])
    assert told(output.choices[0])[:4] == ("Plan it.", "", [], "stop") and output.token_ids == script(THINK)


def test_tool_choice_none_hides_the_tools_and_takes_no_calls(llm: ScriptedLLM) -> None:
    output, _ = both_ways(llm, script(CALL), tool_choice="none")
    assert not output.tool_calls and output.finish_reason == "stop" and output.reasoning == '{"city":"Oslo"}'
    plain, _ = both_ways(llm, script(CALL), tools=None)
    told_of = both_ways(llm, script(CALL), tool_choice="auto")[0]
    assert output.prompt_tokens == plain.prompt_tokens < told_of.prompt_tokens
    assert len(told_of.tool_calls) == 1 and not plain.tool_calls


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"tool_choice": "maybe"}, "tool_choice", "'maybe' is not 'auto', 'none', 'required'"),
        ({"tool_choice": ["auto"]}, "tool_choice", "is not 'auto'"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "neither true nor false"),
        ({"tools": TOOL}, "tools", "not a list"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "not 'function'"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "declared twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
        ({"tool_choice": "none", "tools": [5]}, "tools[0]", "not an object"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort", "minimal, low, medium, high"),
        ({"reasoning_effort": ["low"]}, "reasoning_effort", "not one of"),
        ({"current_date": "tomorrow"}, "current_date", "not a date"),
        ({"messages": []}, "messages", "empty list"),
        ({"messages": "hi"}, "messages", "str is no list"),
        ({"messages": None}, "messages", "NoneType is no list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
        ({"messages": [*USER, {"role": "tool", "content": "x", "tool_call_id": "c9"}]}, "messages[1].tool_call_id", "'c9'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "'image_url'"),
        ({"messages": [{"role": "user", "content": "word " * 140_000}]}, "prompt", "leave no room in a context of 131072"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ],
)
@pytest.mark.parametrize("way", ["chat", "chat_stream"])
def test_what_is_refused_names_field_and_reason(llm: ScriptedLLM, way: str, settings: Any, field: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        getattr(llm, way)(**({"messages": USER, "tools": [TOOL]} | settings))
    assert refused.value.field == field and words in refused.value.problem and refused.value.index is None
    assert not llm._engine.scheduler.busy


def test_a_list_of_conversations(llm: ScriptedLLM) -> None:
    texts = [THINK + NEXT + FINAL, CALL, FINAL]
    output, chunks = both_ways(llm, *map(script, texts), messages=[USER, tuple(USER), [*USER, *USER]])
    assert output.index == 0 and {chunk.index for chunk in chunks} == {0, 1, 2}
    llm.play(*map(script, texts))
    outputs = llm.chat([USER, USER, USER], tools=[TOOL], max_tokens=[1, 100, 2]).result(30)
    assert [output.finish_reason for output in outputs] == ["length", "tool_calls", "length"]
    assert len(llm.chat([USER], max_tokens=1).result(30)) == 1, "one conversation in a list"


@pytest.mark.parametrize(
    ("bad", "field"),
    [([], "messages"), ([5], "messages[0]"), ([*USER, {"role": "assistant"}], "messages[1].content")],
)
def test_a_bad_conversation_among_many_is_named_by_its_index(llm: ScriptedLLM, bad: Any, field: str) -> None:
    with pytest.raises(RequestError, match="^prompt 2: messages") as refused:
        llm.chat([USER, USER, bad])
    assert (refused.value.index, refused.value.field) == (2, field)
    assert not llm._engine.scheduler.busy, "nothing is queued, the good ones neither"


def test_efforts_and_date_reach_the_prompt(llm: ScriptedLLM) -> None:
    def prompt(**settings: Any) -> str:
        llm.play(script(FINAL))
        (answer,) = llm._chat_job(USER, chat_settings(**settings), 0, "", {}).answers[0]
        return llm.tokenizer.decode(answer.request.prompt, skip_special=False)

    assert "Reasoning: high" in prompt(reasoning_effort="xhigh") and "Reasoning: low" in prompt(reasoning_effort="none")
    assert "Reasoning: medium" in prompt() and "Current date: 2025-06-28" in prompt(current_date="2025-06-28")


def test_a_tool_loop_over_two_turns(llm: ScriptedLLM) -> None:
    """The second prompt holds reasoning, preamble, call and result, and hits the first one's pages."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief. " * 200}, *USER]
    llm.play(script(THINK + NEXT + PREAMBLE + NEXT + CALL), script(THINK + NEXT + FINAL))
    first = llm.chat(messages, tools=[TOOL], cache_salt="loop").result(30)[0]
    assert first.cached_tokens == 0
    (call,) = first.tool_calls
    function = {"name": call.name, "arguments": call.arguments}
    messages.append({"role": "assistant", "content": first.content, "reasoning": first.reasoning})
    messages[-1]["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"t": -3}'})
    job = llm._chat_job(messages, chat_settings(tools=[TOOL]), 0, "loop", {})
    prompt = llm.tokenizer.decode(job.answers[0][0].request.prompt, skip_special=False)
    assert prompt.endswith(
        "<|channel|>analysis<|message|>Plan it.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me check.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"city":"Oslo"}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{"t": -3}<|end|>'
        "<|start|>assistant"
    )
    llm.play(script(THINK + NEXT + FINAL))
    second = llm.chat(messages, tools=[TOOL], cache_salt="loop").result(30)[0]
    assert (second.content, second.finish_reason) == ("It is cold.", "stop")
    assert second.usage.cached_tokens == first.prompt_tokens // 128 * 128 > 0
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_async_streams_side_by_side(llm: ScriptedLLM) -> None:
    async def read() -> tuple[list[Chunk], list[Output]]:
        stream = llm.chat_stream(USER, tools=[TOOL], logprobs=True)
        return [chunk async for chunk in stream], stream.outputs

    async def main() -> None:
        llm.play(script(STOPPED))
        for chunks, outputs in await asyncio.gather(*(read() for _ in range(5))):
            check_chunks(chunks, outputs)
            assert outputs[0].finish_reason == "tool_calls"
        assert (await llm.chat(USER, tools=[TOOL]))[0].content == "Let me check."

    asyncio.run(main())


def test_closing_a_stream_ends_the_request_and_gives_nothing_more(llm: ScriptedLLM) -> None:
    llm.play(script(THINK + NEXT + FINAL)[:-1] + [0] * 100_000)
    with llm.chat_stream(USER, max_tokens=100_000) as stream:
        seen = [next(stream) for _ in range(5)]
    assert seen and list(stream) == []
    wait_until_idle(llm)
    llm.chat(USER, max_tokens=1).result(30)  # the last event of what went before it is out by now
    assert list(stream) == [] and stream.outputs[0].finish_reason == "abort"


def test_what_was_complete_stays_so_when_the_engine_ends(llm: ScriptedLLM) -> None:
    """A stop string ended the answer, and the engine was stopped before it heard of that: the answer is whole all the same."""
    job = llm._chat_job(USER, chat_settings(), 0, "", {"stop": " cold"})
    stream, rid = Stream(job), job.answers[0][0].request.rid
    for token in script(FINAL):
        stream.on_event(Event(rid, (token,)))
    stream.on_event(Event(rid, finish_reason="error", error="the engine was stopped"))
    assert "".join(chunk.text for chunk in stream) == "It is" and list(stream) == []
    assert stream.outputs[0].finish_reason == "stop"


def test_an_error_in_a_step_reaches_who_waits_after_what_was_said() -> None:
    """Case p06, as far as there is one engine for all: chunks first, then the error, for chat and chat_stream alike."""
    with scripted_llm([*script(FINAL)[:6], RuntimeError("injected")]) as own:
        stream, text = own.chat_stream(USER), ""
        with pytest.raises(EngineError, match="RuntimeError: injected"):
            for chunk in stream:
                text += chunk.text
        assert text and "It is cold.".startswith(text) and stream.outputs is None
        with pytest.raises(EngineError, match="injected"):
            own.chat(USER).result(30)
