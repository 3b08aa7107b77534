"""`simplellm chat` against a scripted model: what is shown, turns, commands, tools, Ctrl-C."""

from __future__ import annotations

import copy
import io
import json
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simplellm import RequestError
from simplellm.cli import main
from simplellm.generation import Choice, Chunk, Output, Timings
from simplellm.terminal import Chat, Printer, has_colour, run
from simplellm.text.harmony import conversation
from simplellm.text.parser import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart, fold

ROOT = Path(__file__).resolve().parent.parent
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = [ToolCallStart(0, "call_1", "weather"), ToolCallArguments(0, '{"city":'), ToolCallArguments(0, ' "Bonn"}')]


class FakeStream:
    """Gives out a scripted answer, one delta a chunk; "^C" is the user's Ctrl-C, after which it waits to be closed."""

    def __init__(self, script: list[Any], reason: str):
        self.outputs: list[Output] | None = None
        self._script, self._reason, self._closed = script, reason, threading.Event()

    def close(self) -> None:
        self._closed.set()

    def __iter__(self) -> Iterator[Chunk]:
        for delta in self._script:
            if delta == "^C":
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)  # an impatient user's
                assert self._closed.wait(10), "Ctrl-C did not close the stream"
                return
            yield Chunk(0, 0, [delta], [7], None)
        timings = Timings(0.0, 0.1, 0.2)
        choice = Choice(0, fold(self._script), [7] * len(self._script), 0, self._reason, None, timings, {})
        self.outputs = [Output(0, 9, 4, None, [choice])]


class FakeLLM:
    """Answers as scripted, and records what it was asked. A script is deltas and a finish reason, or an error."""

    def __init__(self, *scripts: Any):
        self.scripts, self.asked, self.settings = list(scripts), [], []

    def chat_stream(self, messages: list[dict], **settings: Any) -> FakeStream:
        conversation(messages)  # as the real one, refuses what is no conversation
        self.asked.append(copy.deepcopy(messages))
        self.settings.append(settings)
        script = self.scripts.pop(0)
        if isinstance(script, Exception):
            raise script
        return FakeStream(*script)


class Session:
    """A chat with a fake model; `lines` are typed: "^C" and "^D" are those keys."""

    def __init__(self, *scripts: Any, colour: bool = False, **settings: Any):
        self.llm, self.out, self.err = FakeLLM(*scripts), io.StringIO(), io.StringIO()
        self.prompts: list[str] = []
        self._lines: list[str] = []
        self.chat = Chat(self.llm, self._read, Printer(self.out, colour), Printer(self.err, colour), **settings)

    def _read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = self._lines.pop(0)
        if line in ("^C", "^D"):
            raise KeyboardInterrupt if line == "^C" else EOFError
        return line

    def type(self, *lines: str) -> int:
        self._lines = [*lines, "^D"]
        return self.chat.run()


def say(*texts: str) -> tuple[list[Any], str]:
    return [ContentDelta(text) for text in texts], "stop"


def test_parts_of_an_answer_stand_under_headings_where_there_is_no_colour() -> None:
    session = Session(([ReasoningDelta("Hm"), ReasoningDelta("m."), ContentDelta("Hel"), ContentDelta("lo")], "stop"))
    session.type("hi")
    assert session.out.getvalue() == "[reasoning]\nHmm.\n[answer]\nHello\n"
    assert re.fullmatch(
        r"\[4 tokens \(0 reasoning\) after 9 \(4 cached\), first after .* tokens per second\]\n", session.err.getvalue()
    )


def test_with_colour_reasoning_is_dimmed_and_nothing_else() -> None:
    session = Session(([ReasoningDelta("Hmm."), ContentDelta("Hello")], "stop"), colour=True)
    session.type("hi")
    assert session.out.getvalue() == "\x1b[2mHmm.\x1b[0m\nHello\n"
    assert session.err.getvalue().startswith("\x1b[2m[2 tokens") and session.err.getvalue().endswith("\x1b[0m")


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    """A model, or a tool result that it repeats, could otherwise set the window's title or clear the screen."""
    session = Session(say("a\x1b]0;b\x07\r\x7f\x9bc\td\ne"))
    session.type("hi")
    assert session.out.getvalue() == "[answer]\na␛]0;b␇␍␡\ufffdc\td\ne\n"
    assert session.chat.messages[1]["content"] == "a\x1b]0;b\x07\r\x7f\x9bc\td\ne"


def test_turns_pile_up_and_the_reasoning_is_kept() -> None:
    session = Session(([ReasoningDelta("Hmm."), ContentDelta("Hello")], "stop"), say("Bye"), system="Be brief.", effort="low")
    assert session.type("hi", "", "  ", "bye") == 0
    assert session.llm.asked[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello", "reasoning": "Hmm."},
        {"role": "user", "content": "bye"},
    ]
    assert [settings["reasoning_effort"] for settings in session.llm.settings] == ["low", "low"]
    assert session.llm.settings[0]["tools"] is None


def test_a_tool_loop_feeds_calls_reasoning_and_results_back() -> None:
    session = Session(([ReasoningDelta("Look."), *CALL], "tool_calls"), say("Sun"), tools=TOOLS)
    session.type("weather?", "sunny", "  20 degrees", "", "/quit")
    assert session.out.getvalue() == '[reasoning]\nLook.\n[call of weather]\n{"city": "Bonn"}\n[answer]\nSun\n'
    assert session.prompts == ["> ", "| ", "| ", "| ", "> "]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    assert session.llm.asked[1][1:] == [
        {"role": "assistant", "content": None, "reasoning": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny\n  20 degrees"},
    ]
    assert session.llm.settings[0]["tools"] == TOOLS


@pytest.mark.parametrize(("keys", "result"), [(["20", "^D"], "20"), ([""], ""), (["^D"], None), (["20", "^C"], None)])
def test_a_result_ends_with_the_input_or_is_left_out(keys: list[str], result: str | None) -> None:
    session = Session((CALL, "tool_calls"), say("Sun"), say("Fine"), tools=TOOLS)
    session.type("weather?", *keys, "never mind")
    assert [message["content"] for message in session.llm.asked[1] if message["role"] == "tool"] == (
        [] if result is None else [result]
    )
    assert len(session.llm.asked) == (2 if result is None else 3)


def test_a_call_cut_off_is_dropped_and_what_was_said_before_is_kept() -> None:
    session = Session(([ContentDelta("I look."), *CALL[:2]], "length"), tools=TOOLS)
    session.type("weather?")
    assert session.chat.messages[1:] == [{"role": "assistant", "content": "I look."}]
    assert "cut off at the limit" in session.err.getvalue() and "unfinished call is dropped" in session.err.getvalue()


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    handler = signal.getsignal(signal.SIGINT)
    session = Session(([ReasoningDelta("Hmm."), ContentDelta("Hel"), "^C", ContentDelta("lo")], "stop"), say("Yes"))
    session.type("hi", "and?")
    assert session.llm.asked[1][1] == {"role": "assistant", "content": "Hel", "reasoning": "Hmm."}
    assert "[stopped, and kept as far as it went: 2 tokens" in session.err.getvalue()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_stopped_answer_is_called_so_however_fast_the_engine_was() -> None:
    """Its last events may be in before the line is written: then the stream has outputs, and looked like a whole answer."""
    session = Session(([ContentDelta("Hel")], "abort"))
    session.type("hi")
    assert "[stopped, and kept as far as it went: 1 tokens" in session.err.getvalue()


def test_ctrl_c_before_the_first_word_keeps_no_answer() -> None:
    session = Session((["^C"], "stop"), say("Yes"))
    session.type("hi", "and?")
    assert [message["role"] for message in session.llm.asked[1]] == ["user", "user"]


def test_ctrl_c_twice_at_the_prompt_leaves_but_not_with_a_line_between() -> None:
    session = Session(say("Hello"))
    session.type("^C", "hi", "^C", "^C", "never read")
    assert len(session.llm.asked) == 1 and session.err.getvalue().count("leaves") == 2 and len(session.prompts) == 4


def test_a_refused_message_is_one_line_and_the_chat_goes_on() -> None:
    full = RequestError("prompt", "9000 tokens leave no room in a context of 4096")
    session = Session(say("Hello"), full, say("Fine"))
    assert session.type("hi", "very long", "short") == 0
    assert [message["content"] for message in session.llm.asked[2]] == ["hi", "Hello", "short"]
    assert session.err.getvalue().split("\n")[1] == f"{full} (the message is not kept)"
    assert Session(full).type("very long") == 1


def test_retry_answers_the_last_message_again_with_another_seed() -> None:
    session = Session((CALL, "tool_calls"), say("Sun"), say("Rain"), say("Snow"), tools=TOOLS, sampling={"seed": 5})
    session.type("/retry", "weather?", "20", "", "/retry", "/retry")
    assert "no message to answer" in session.err.getvalue()
    assert session.llm.asked[2] == session.llm.asked[3] == [{"role": "user", "content": "weather?"}]
    assert [settings["seed"] for settings in session.llm.settings] == [5, 5, 6, 7]
    assert session.chat.messages[-1]["content"] == "Snow" and len(session.chat.messages) == 2


def test_a_retry_that_fails_leaves_the_old_answer() -> None:
    session = Session(say("Hello"), RequestError("prompt", "no"))
    session.type("hi", "/retry")
    assert [message["content"] for message in session.chat.messages] == ["hi", "Hello"]


def test_save_writes_openais_form_and_load_goes_on_with_it(tmp_path: Path) -> None:
    file = tmp_path / "my talk.json"
    first = Session(([ReasoningDelta("Hm."), *CALL], "tool_calls"), say("Sün"), tools=TOOLS, system="Be brief.")
    first.type("weather?", "20", "", f"/save {file}")
    assert json.loads(file.read_text("utf-8")) == first.chat.messages and "Sün" in file.read_text("utf-8")
    second = Session(say("More"))
    second.type(f"/load {file}", "more?")
    assert second.llm.asked[0] == [*first.chat.messages, {"role": "user", "content": "more?"}]


def test_a_command_that_fails_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('[{"role": "tool", "tool_call_id": "x", "content": "y"}]')
    lines = [
        "/save",
        "/save /no/such/folder/x",
        "/load ~no-such-user/x",
        f"/load {tmp_path}/bad.json",
        "/effort huge",
        "/frobnicate 3",
    ]
    session = Session(say("Hello"))
    session.type("hi", *lines)
    told = session.err.getvalue().split("\n")[1:-1]
    wanted = [
        "FILE: is missing",
        "FILE: cannot write /no/such/folder/x: No such",
        "cannot read ~no-such-user/x",
        "'x' is the id of no tool call",
        "'huge' is not one",
    ]
    assert len(told) == 6 and all(words in line for words, line in zip([*wanted, "/frobnicate"], told, strict=True))
    assert len(session.chat.messages) == 2


def test_system_effort_and_clear() -> None:
    session = Session(*[say("ok")] * 4)
    session.type("one", "/system Be brief.", "/effort high", "two", "/clear", "three", "/system", "/help", "four")
    contents = [[message["content"] for message in asked] for asked in session.llm.asked]
    assert contents[1:] == [["Be brief.", "one", "ok", "two"], ["Be brief.", "three"], ["three", "ok", "four"]]
    assert [settings["reasoning_effort"] for settings in session.llm.settings] == [None, "high", "high", "high"]
    assert "/retry" in session.err.getvalue()


def test_a_space_before_a_slash_makes_it_a_message() -> None:
    session = Session(say("A folder"))
    session.type(" /usr/bin is what?")
    assert session.chat.messages[0]["content"] == "/usr/bin is what?"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"effort": "huge"}, "reasoning_effort: 'huge'"),
        ({"tools": "no-such-file"}, "tools: cannot read no-such-file"),
        ({"tools": str(ROOT / "pyproject.toml")}, "as JSON"),
        ({"tools": str(ROOT / "simplellm/builtin/config.json")}, "tools: is an object, not a list"),
    ],
)
def test_a_mistake_in_the_options_is_known_before_anything_is_loaded(settings: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        run("no-such-checkpoint", {}, **settings)


def test_two_models_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "one", "--model", "two"]) == 1
    assert capsys.readouterr().err == "simplellm: model: PATH is one and --model is two, give one of them\n"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_colour", "term", "colour"),
    [
        (Screen, "", "xterm", True),
        (Screen, "1", "xterm", False),
        (Screen, "", "dumb", False),
        (io.StringIO, "", "xterm", False),
    ],
)
def test_colour_is_for_terminals_that_were_not_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], no_colour: str, term: str, colour: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setenv("TERM", term)
    assert has_colour(stream()) is colour
