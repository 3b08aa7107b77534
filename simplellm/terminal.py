"""`simplellm chat`: a conversation in the terminal, or in a pipe, where every line of standard input is a message.

Answers stream to stdout; what is said about them goes to stderr. Reasoning is dimmed; where there is no colour, headings
tell the parts apart. Ctrl-C ends an answer, not the program. `Chat` gets its input and its streams from outside.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

from simplellm.api import LLM
from simplellm.errors import RequestError, SimpleLLMError
from simplellm.generation import Stream
from simplellm.text.harmony import conversation, declared_tools, system_text
from simplellm.text.parser import ContentDelta, Delta, Message, ReasoningDelta, ToolCallArguments, ToolCallStart, fold

ReadLine = Callable[[str], str]  # from a prompt to a line; EOFError at the end, KeyboardInterrupt for Ctrl-C, as `input`

HELP = """\
/retry        answer the last message again, with another seed
/system TEXT  set the system message; without TEXT there is none
/effort X     reasoning effort: low, medium or high
/save FILE    write the conversation, as JSON in OpenAI's message format
/load FILE    go on with a conversation so written
/clear        forget the conversation, but for the system message
/quit         leave, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with a slash needs a space before it."""

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# A model may write any byte, and a terminal obeys some of them: C0 and DEL are shown as pictures, C1 as U+FFFD
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_VISIBLE |= {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)

HISTORY_LINES = 1000


class Printer:
    """Writes an answer as it comes, reasoning dimmed. Without colour each part stands under a heading; a call always."""

    def __init__(self, stream: TextIO, colour: bool):
        self._stream, self._colour = stream, colour
        self._part = ""
        self._mid_line = False

    def show(self, delta: Delta) -> None:
        match delta:
            case ReasoningDelta(text):
                self._enter("reasoning", heading=not self._colour)
                self._write(text, dim=True)
            case ContentDelta(text):
                self._enter("answer", heading=not self._colour)
                self._write(text)
            case ToolCallStart(_, key, name):
                self._enter(f"call of {name}", heading=True, key=key)
            case ToolCallArguments(_, text):
                self._write(text)

    def note(self, text: str) -> None:
        """Lines about an answer, dimmed."""
        self.end()
        self._write(text + "\n", dim=True)

    def end(self) -> None:
        """What follows begins on a line of its own."""
        if self._mid_line:
            self._write("\n")
        self._part = ""

    def _enter(self, part: str, heading: bool, key: str = "") -> None:
        if self._part == part + key:
            return
        self.end()
        self._part = part + key
        if heading:
            self._write(f"[{part}]\n")

    def _write(self, text: str, dim: bool = False) -> None:
        if text:
            self._mid_line = not text.endswith("\n")
            text = text.translate(_VISIBLE)
            self._stream.write(f"{DIM}{text}{PLAIN}" if dim and self._colour else text)
            self._stream.flush()


class Chat:
    """A conversation with `llm`, typed line by line. `messages` holds it in OpenAI's form, reasoning and calls included."""

    def __init__(
        self,
        llm: LLM,
        read: ReadLine,
        answers: Printer,
        notes: Printer,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        effort: str | None = None,
        system: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ):
        self.messages: list[dict[str, Any]] = []
        self._llm, self._read, self._answers, self._notes = llm, read, answers, notes
        self._tools, self._effort, self._sampling = list(tools), effort, dict(sampling or {})
        self._failed = False
        self._set_system(system or "")

    def run(self) -> int:
        """Talk until /quit, the input's end, or Ctrl-C twice at the prompt. The exit code: 1 if the last answer failed."""
        going, interrupted = True, False
        while going:
            try:
                line = self._read("> ")
                interrupted = False
                going = self._obey(line)
            except KeyboardInterrupt:
                going, interrupted = not interrupted, True
                if going:
                    self._notes.note("Ctrl-C again, or Ctrl-D, leaves")
            except EOFError:
                going = False
        return int(self._failed)

    def _obey(self, line: str) -> bool:
        """Do what a line says; False if it says to leave."""
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if line.startswith("/"):
            try:
                return self._command(command, rest)
            except SimpleLLMError as error:
                self._notes.note(str(error))
        elif line.strip():
            self._turn([*self.messages, {"role": "user", "content": line.strip()}])
        return True

    def _command(self, command: str, rest: str) -> bool:
        match command:
            case "/quit" | "/exit":
                return False
            case "/help":
                self._notes.note(HELP)
            case "/retry":
                self._retry()
            case "/system":
                self._set_system(rest)
                self._notes.note("the system message is set" if rest else "there is no system message now")
            case "/effort":
                if rest:
                    system_text(rest)  # refuses what is none
                    self._effort = rest
                self._notes.note(f"reasoning effort: {self._effort or 'medium'}")
            case "/save":
                self._save(rest)
            case "/load":
                self._load(rest)
            case "/clear":
                self.messages = self._system()
                self._notes.note("the conversation is forgotten")
            case _:
                self._notes.note(f"there is no command {command}: /help lists them, and a space before it makes it a message")
        return True

    def _system(self) -> list[dict[str, Any]]:
        return [message for message in self.messages[:1] if message["role"] in ("system", "developer")]

    def _set_system(self, text: str) -> None:
        rest = self.messages[len(self._system()) :]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def _retry(self) -> None:
        asked = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if asked is None:
            self._notes.note("there is no message to answer yet")
            return
        if self._sampling.get("seed") is not None:
            self._sampling["seed"] += 1
        self._turn(self.messages[: asked + 1])

    def _save(self, name: str) -> None:
        path = _path(name)
        text = json.dumps(self.messages, indent=2, ensure_ascii=False)
        try:
            path.write_text(text + "\n", encoding="utf-8", errors="replace")
        except OSError as error:
            raise RequestError("FILE", f"cannot write {path}: {error.strerror}") from None
        self._notes.note(f"{len(self.messages)} messages are in {path}")

    def _load(self, name: str) -> None:
        messages = _read_json(_path(name), "messages")
        conversation(messages)  # refuses what is none
        self.messages = messages
        self._notes.note(f"{len(messages)} messages are loaded")

    def _turn(self, messages: list[dict[str, Any]]) -> None:
        """Answer `messages`, calls and their results included. If it fails, the conversation stays as it was."""
        before, self.messages = self.messages, messages
        try:
            while calls := self._answer():
                if not all(self._ask_result(call) for call in calls):
                    break
            self._failed = False
        except SimpleLLMError as error:
            self._answers.end()
            self._notes.note(f"{error} (the message is not kept)")
            self.messages, self._failed = before, True

    def _answer(self) -> list[dict[str, Any]]:
        """Stream one answer and keep it, whole or stopped by Ctrl-C; the calls it makes."""
        began, first, num_tokens = time.perf_counter(), 0.0, 0
        deltas: list[Delta] = []
        settings = {"tools": self._tools or None, "reasoning_effort": self._effort, **self._sampling}
        stream = self._llm.chat_stream(self.messages, **settings)
        with _on_interrupt(stream.close):
            for chunk in stream:
                first = first or time.perf_counter()
                num_tokens += len(chunk.token_ids)
                for delta in chunk.deltas:
                    deltas.append(delta)
                    self._answers.show(delta)
        self._answers.end()
        self._notes.note(_account(stream, num_tokens, began, first))
        message = fold(deltas)
        complete = stream.outputs is not None and stream.outputs[0].finish_reason == "tool_calls"
        if message.tool_calls and not complete:
            message.tool_calls = []
            self._notes.note("the unfinished call is dropped")
        kept = as_openai(message)
        if kept["content"] or len(kept) > 2:
            self.messages.append(kept)
        return list(kept.get("tool_calls", ()))

    def _ask_result(self, call: Mapping[str, Any]) -> bool:
        """Have the user type a call's result; False if they give none."""
        self._notes.note(f"type what {call['function']['name']} returns, then an empty line")
        lines: list[str] = []
        try:
            while line := self._read("| "):
                lines.append(line)
        except (EOFError, KeyboardInterrupt) as end:
            if not lines or isinstance(end, KeyboardInterrupt):
                self._notes.note("the call stays without a result")
                return False
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "\n".join(lines)})
        return True


def as_openai(message: Message) -> dict[str, Any]:
    """An answer as a message of OpenAI's chat completions, with `reasoning`."""
    kept: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if message.reasoning:
        kept["reasoning"] = message.reasoning
    if message.tool_calls:
        kept["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return kept


def run(
    path: str | None,
    options: Mapping[str, Any],
    *,
    tools: str | None = None,
    effort: str | None = None,
    system: str | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> int:
    """Load the checkpoint in `path` with the engine's `options` and talk with it; the exit code.

    tools: a JSON file, a list of OpenAI's tool definitions. Raises RequestError before anything is loaded if it, or the
    effort, is invalid.
    """
    listed = [] if tools is None else _read_json(Path(tools), "tools")
    declared_tools(listed)
    system_text(effort)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what is not UTF-8, or not in the terminal's encoding, is no reason to end
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    answers, notes = (Printer(stream, has_colour(stream)) for stream in (sys.stdout, sys.stderr))
    with LLM(path, **options) as llm, _line_editing(interactive):
        if path is None:
            notes.note("This is the small built-in model: sums, sorting, words, days, units, tools, and little else.")
        if interactive:
            notes.note(f"{llm.path.name}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        read = _read_terminal if interactive else _read_pipe
        return Chat(llm, read, answers, notes, tools=listed, effort=effort, system=system, sampling=sampling).run()


def _account(stream: Stream, num_tokens: int, began: float, first: float) -> str:
    """One line on an answer that ended: tokens, speed, and why if it was cut off."""
    rate = (num_tokens - 1) / (time.perf_counter() - first) if num_tokens > 1 else 0.0
    counts, ended = f"{num_tokens} tokens", "abort"  # until the engine has taken note, a stopped answer has no outputs
    if stream.outputs is not None:
        output = stream.outputs[0]
        usage, ended = output.usage, output.finish_reason
        counts += f" ({usage.reasoning_tokens} reasoning) after {usage.prompt_tokens} ({usage.cached_tokens} cached)"
    speed = f", first after {first - began:.3f} s, then {rate:.1f} tokens per second" if first else ""
    reason = {"abort": "stopped, and kept as far as it went: ", "length": "cut off at the limit: "}.get(ended, "")
    return f"[{reason}{counts}{speed}]"


@contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `act`, in a thread of its own since it takes locks, in place of raising KeyboardInterrupt."""
    previous = signal.signal(signal.SIGINT, lambda *_: Thread(target=act).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _line_editing(interactive: bool) -> Iterator[None]:
    """Editing and a history kept from one session to the next, where there is readline; a history that fails is none."""
    try:
        import readline
    except ImportError:
        interactive = False
    if not interactive:
        yield
        return
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError, RuntimeError):
        readline.read_history_file(_history())
    try:
        yield
    finally:
        with suppress(OSError, RuntimeError):
            _history().parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(_history())


def _history() -> Path:
    """Where the lines typed are kept. RuntimeError if there is no home folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "simplellm" / "history"


def _read_terminal(prompt: str) -> str:
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)  # the cursor is still behind the prompt
        raise


def _read_pipe(prompt: str) -> str:
    """A line of standard input, without a prompt."""
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.rstrip("\n")


def has_colour(stream: TextIO) -> bool:
    """Whether escape codes would be understood and are wanted (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _path(name: str) -> Path:
    if not name:
        raise RequestError("FILE", "is missing: name one after the command")
    return Path(os.path.expanduser(name))


def _read_json(path: Path, field: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(field, f"cannot read {path} as JSON: {error}") from None
