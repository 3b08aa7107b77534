"""Sampled ids -> reasoning, content and tool calls, as they arrive. Never raises, whatever the model writes.

The result does not depend on how the ids are cut into pushes. What departs from the format is repaired by the rules in
docs/chat.md and counted in `repairs`; all text ends in some field, or in a header that is so counted.
"""

from __future__ import annotations

import functools
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from simplellm.text import header as headers
from simplellm.text.tokenizer import Tokenizer

HEADER_LIMIT = 256  # characters; a longer "header" is an answer whose header is missing

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN, _END_OF_TEXT = "<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"
_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN, _END_OF_TEXT)
STOPS = (_RETURN, _CALL, _END_OF_TEXT)  # what sampling stops at; never at <|end|>, which separates messages


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments: passed on as the model writes them, JSON or not."""

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def fold(deltas: Iterable[Delta]) -> Message:
    """The message that the deltas add up to."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart():
                calls.append((delta, []))
            case ToolCallArguments(index, text):
                calls[index][1].append(text)
    tool_calls = [ToolCall(start.id, start.name, "".join(pieces)) for start, pieces in calls]
    return Message("".join(reasoning), "".join(content), tool_calls)


def stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids at which an answer ends, whatever the configuration says: old downloads' generation_config.json lacks <|call|>."""
    return frozenset(tokenizer.special[name] for name in STOPS if name in tokenizer.special)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class Parser:
    """Parses one answer, sampled after a prompt that ends with `<|start|>assistant`.

    `tools` are the declared names: a call of any other is no call. None: names are not checked. After a `<|call|>`
    the answer has `stopped`; further calls that are pushed nevertheless count, unless `parallel_tool_calls` is false.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Collection[str] | None = None,
        *,
        parallel_tool_calls: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ):
        self.repairs: Counter[str] = Counter()
        self.stopped = False  # the answer is complete: sample no more
        self.reasoning_tokens = 0  # tokens whose text is reasoning
        self.content_tokens = 0  # tokens whose text is content
        self._tokenizer, self._tools = tokenizer, None if tools is None else frozenset(tools)
        self._parallel, self._new_id = parallel_tool_calls, new_id
        self._markers = {tokenizer.special[name]: name for name in _MARKERS if name in tokenizer.special}
        self._decoder = tokenizer.decoder()
        # Exactly one of: reading a header (segments), in a message (a sink), between messages (neither)
        self._segments: list[tuple[str, list[str]]] | None = [("", [])]
        self._sink: Callable[[str], Delta] | None = None  # makes deltas of the message's text
        self._author_given = True  # by the prompt, for the first header
        self._header_length = 0
        self._out: list[Delta] = []
        self._pieces: list[str] = []  # text for the sink, not yet a delta
        self._told: set[object] = set()  # sinks that have had text of a message before
        self._wrote = False  # the message has text
        self._final = False  # the message is on the final channel
        self._answered = False  # a final message with text is closed
        self._num_calls = 0
        self._over = False  # nothing pushed from here on belongs to the answer

    @property
    def finish_kind(self) -> Literal["stop", "tool_calls"] | None:
        """Why the answer is complete; None while it is not, so also if it was cut off."""
        if not self.stopped:
            return None
        return "tool_calls" if self._num_calls else "stop"

    def push(self, ids: Iterable[int]) -> list[Delta]:
        """What these ids add to the answer."""
        for token in ids:
            if not self._over:
                self._step(token)
        return self._take()

    def finish(self) -> list[Delta]:
        """The rest, once no id follows: an unfinished character, or text whose header never ended."""
        if not self._over:
            if self._segments is not None and (self._header_length or len(self._segments) > 1):
                self._end_header_early("cut_off_header")
            self._close()
        self._over = True
        return self._take()

    def _step(self, token: int) -> None:
        if (marker := self._markers.get(token)) is not None:
            self._control(marker)
        elif not self._tokenizer.token_bytes(token):
            self._count("unknown_token")
        elif self._sink is not None:
            self.reasoning_tokens += self._sink is ReasoningDelta
            self.content_tokens += self._sink is ContentDelta
            self._write(self._decoder.push([token]))
        elif self._segments is not None or self._begin("missing_start"):
            self._header_text(self._decoder.push([token]))

    def _control(self, marker: str) -> None:
        match marker:
            case "<|start|>":
                self._restart()
            case "<|message|>" | "<|constrain|>" if self._sink is not None:
                self._count("stray_marker")
            case "<|channel|>" | "<|constrain|>" | "<|message|>":
                repair = "missing_start" if self._sink is None else "missing_end"
                self._close()
                if self._segments is None and not self._begin(repair):
                    return
                assert self._segments is not None
                self._segments[-1][1].append(self._decoder.flush())
                if marker == _MESSAGE:
                    self._end_header()
                else:
                    self._segments.append((marker, []))
            case _:
                self._terminate(marker)

    def _restart(self) -> None:
        if self._segments is not None:
            self._end_header_early("doubled_start")
        elif self._sink is not None:
            self._count("missing_end")
        self._close()
        self._begin()

    def _terminate(self, marker: str) -> None:
        if self._segments is not None:
            self._end_header_early("missing_message", called=marker == _CALL)
        elif self._sink is None and marker == _END:
            self._count("stray_marker")
        if self._in_call and marker != _CALL:
            self._count("call_not_called")
        self._close()
        if marker != _END:
            self.stopped = True
            self._over = self._over or marker != _CALL or not self._parallel

    def _begin(self, repair: str | None = None) -> bool:
        """Start reading a header. Not after a final message: then the answer is over."""
        if self._answered:
            self._give_up("message_after_final")
            return False
        if repair is not None:
            self._count(repair)
        self._segments, self._header_length, self._author_given = [("", [])], 0, False
        return True

    def _give_up(self, repair: str) -> None:
        """What begins here is not part of the answer, and nothing after it."""
        self._count(repair)
        self.stopped = self._over = True

    def _header_text(self, text: str) -> None:
        assert self._segments is not None
        self._segments[-1][1].append(text)
        self._header_length += len(text)
        if self._header_length > HEADER_LIMIT:
            self._end_header_early("missing_message", too_long=True)

    def _count(self, repair: str, when: bool = True) -> None:
        if when:
            self.repairs[repair] += 1

    def _read_header(self) -> headers.Header:
        assert self._segments is not None
        header = headers.read([(marker, "".join(texts)) for marker, texts in self._segments], self._author_given)
        self._segments = None
        self.repairs.update(header.repairs)
        return header

    def _end_header(self) -> None:
        """At `<|message|>`: route the text that follows."""
        header = self._read_header()
        if header.author != "assistant":
            self._give_up("other_author")  # the model plays the user or a tool
            return
        if header.rest.strip():
            self._count("header_text")
        self._open(header)

    def _end_header_early(self, repair: str, called: bool = False, too_long: bool = False) -> None:
        """No `<|message|>` came: the words that fit no header were a message. `called`: its recipient is called."""
        assert self._segments is not None
        self._count(repair)
        if not too_long:  # else the message goes on, perhaps in the middle of a character
            self._segments[-1][1].append(self._decoder.flush())
        everything = "".join(text for _, texts in self._segments for text in texts)
        header = self._read_header()
        spoken = header.spoken or (everything if too_long else "")
        if repair == "cut_off_header" and not self._author_given and "assistant".startswith(spoken.strip()):
            spoken = ""
        if spoken or (called and header.recipients):
            self._open(headers.Header() if header.bare else header)
            self._write(spoken)

    def _open(self, header: headers.Header) -> None:
        """Route the message's text to a field."""
        self._final, self._wrote = header.channel == "final", False
        for recipient in header.recipients:
            if (name := headers.resolve(recipient, self._tools)) is not None:
                self._count("bare_recipient", when=recipient != headers.PREFIX + name)
                self._open_call(name, header)
                return
        self._sink = ContentDelta if header.for_user else ReasoningDelta
        self._count("undeclared_recipient", when=bool(header.others))
        self._count("missing_channel", when=header.channel is None)

    def _open_call(self, name: str, header: headers.Header) -> None:
        if self._num_calls and not self._parallel:
            self.stopped = self._over = True
            return
        self._count("call_off_channel", when=header.channel != "commentary")
        self._out.append(ToolCallStart(self._num_calls, self._new_id(), name))
        self._sink = functools.partial(ToolCallArguments, self._num_calls)
        self._num_calls += 1

    @property
    def _in_call(self) -> bool:
        return self._sink not in (None, ReasoningDelta, ContentDelta)

    def _write(self, text: str) -> None:
        if not text or self._sink is None:
            return
        if not self._wrote and self._sink in self._told:
            self._pieces.append("\n")  # between two messages of one field
        self._wrote = True
        self._told.add(self._sink)
        self._pieces.append(text)

    def _close(self) -> None:
        """End the message, if one is open."""
        if self._sink is None:
            return
        self._write(self._decoder.flush())
        self._flush()
        self._answered = self._answered or (self._final and self._wrote and not self._in_call)
        self._sink = None

    def _flush(self) -> None:
        if self._pieces and self._sink is not None:
            self._out.append(self._sink("".join(self._pieces)))
            self._pieces.clear()

    def _take(self) -> list[Delta]:
        self._flush()
        deltas, self._out = self._out, []
        return deltas
