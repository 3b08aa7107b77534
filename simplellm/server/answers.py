"""Answers in OpenAI's form: chat and text completions, whole and in chunks. Plain dicts: nothing is validated per chunk.

A whole answer and the sum of its chunks come from the same deltas (`simplellm.generation`), so they cannot differ. The chunks
that are one text and nothing else, which nearly all are, are cut from the first of their kind: only that text is made anew.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from simplellm.generation import Choice, Chunk, Output
from simplellm.request import Logprob
from simplellm.server.door import encode
from simplellm.server.protocol import Call
from simplellm.text.parser import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart
from simplellm.text.tokenizer import Tokenizer

Object = dict[str, Any]


class Answers:
    """Makes the objects of one request. `content[i]`: per token of request i, whether it is content (chat logprobs)."""

    def __init__(self, call: Call, model: str, fingerprint: str, tokenizer: Tokenizer, prompts: Sequence[tuple[int, ...]]):
        chat = call.kind == "chat"
        self.id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._mark = secrets.token_hex(16)  # a text that nothing else in a chunk holds
        self._call, self._tokenizer, self._prompts = call, tokenizer, prompts
        self._n = call.settings.get("n", 1)
        self._whole = "chat.completion" if chat else "text_completion"
        self._part = "chat.completion.chunk" if chat else "text_completion"
        self._head = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self.content: dict[int, list[bool]] = {}
        self._begun: set[int] = set()
        self._shown: dict[int, int] = {}  # tokens, by choice
        self._offset: dict[int, int] = {}  # characters of text, by choice
        self._cut: dict[tuple[int, type[Delta], int], list[bytes]] = {}  # events with their text cut out, by choice and kind

    def whole(self, outputs: Sequence[Output]) -> Object:
        """The answer, not streamed."""
        make = self._chat_choice if self._call.kind == "chat" else self._text_choice
        choices = [make(output, choice) for output in outputs for choice in output.choices]
        return {"id": self.id, "object": self._whole, **self._head, "choices": choices, "usage": usage(outputs)}

    def events(self, chunk: Chunk, scores: Sequence[Logprob | None] | None = None) -> bytes:
        """The same as `parts`, as a stream has them."""
        number, deltas = chunk.index * self._n + chunk.choice, chunk.deltas
        if len(deltas) > 1:
            deltas = list(_merged(deltas))
        plain = number in self._begun and chunk.logprobs is None and chunk.finish_reason is None and len(deltas) == 1
        if not plain or isinstance(deltas[0], ToolCallStart):
            return b"".join(map(event, self.parts(chunk, scores)))
        kind = number, type(deltas[0]), deltas[0].index if isinstance(deltas[0], ToolCallArguments) else 0
        if kind not in self._cut:
            marked = dataclasses.replace(chunk, deltas=[dataclasses.replace(deltas[0], text=self._mark)])
            self._cut[kind] = b"".join(map(event, self.parts(marked))).split(encode(self._mark))
        return encode(deltas[0].text).join(self._cut[kind])

    def parts(self, chunk: Chunk, scores: Sequence[Logprob | None] | None = None) -> Iterator[Object]:
        """The chunks that tell a piece of an answer. scores: the prompt's, for the first piece of a text completion."""
        number = chunk.index * self._n + chunk.choice
        make = self._chat_parts if self._call.kind == "chat" else self._text_parts
        for choice in make(number, chunk, scores):
            part = {"id": self.id, "object": self._part, **self._head, "choices": [{"index": number, **choice}]}
            yield part | {"usage": None} if self._call.include_usage else part

    def usage_part(self, outputs: Sequence[Output]) -> Object:
        """The last chunk, if usage was asked for."""
        return {"id": self.id, "object": self._part, **self._head, "choices": [], "usage": usage(outputs)}

    # Chat

    def _chat_choice(self, output: Output, choice: Choice) -> Object:
        message: Object = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message |= reasoning(choice.reasoning)
        if choice.tool_calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.tool_calls
            ]
        number = output.index * self._n + choice.index
        logprobs = None if choice.logprobs is None else self._chat_logprobs(number, choice.logprobs)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _chat_parts(self, number: int, chunk: Chunk, _: object) -> Iterator[Object]:
        """Each delta has one field, since clients look for one; log-probabilities go with content."""
        if number not in self._begun:
            self._begun.add(number)
            yield _delta({"role": "assistant", "content": ""})
        logprobs = None if chunk.logprobs is None else self._chat_logprobs(number, chunk.logprobs)
        if logprobs is not None and not logprobs["content"]:
            logprobs = None
        for delta in _merged(chunk.deltas):
            content = isinstance(delta, ContentDelta)
            yield _delta(_chat_delta(delta), logprobs if content else None)
            logprobs = None if content else logprobs
        if logprobs is not None:  # of tokens without a whole character
            yield _delta({"content": ""}, logprobs)
        if chunk.finish_reason is not None:
            yield {"delta": {}, "logprobs": None, "finish_reason": chunk.finish_reason}

    def _chat_logprobs(self, number: int, logprobs: Sequence[Logprob]) -> Object:
        """Those of the tokens that are content: no control token, header, reasoning or call. In order of the answer."""
        start = self._shown.get(number, 0)
        self._shown[number] = start + len(logprobs)
        is_content = self.content[number][start : start + len(logprobs)]
        entries = [
            self._token(entry.token, entry.logprob) | {"top_logprobs": [self._token(*top) for top in entry.top]}
            for entry in itertools.compress(logprobs, is_content)
        ]
        return {"content": entries, "refusal": None}

    def _token(self, token: int, logprob: float) -> Object:
        return {"token": self._spell(token), "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token))}

    def _spell(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)

    # Text completions

    def _text_choice(self, output: Output, choice: Choice) -> Object:
        number = output.index * self._n + choice.index
        text = self._echo(number) + choice.text
        logprobs = self._text_logprobs(number, output.prompt_logprobs, choice.logprobs)
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": _text_reason(choice.finish_reason)}

    def _text_parts(self, number: int, chunk: Chunk, scores: Sequence[Logprob | None] | None) -> Iterator[Object]:
        text, begun = chunk.text, number in self._begun
        self._begun.add(number)
        logprobs = self._text_logprobs(number, None if begun else scores, chunk.logprobs)
        text = text if begun else self._echo(number) + text
        yield {"text": text, "logprobs": logprobs, "finish_reason": _text_reason(chunk.finish_reason)}

    def _echo(self, number: int) -> str:
        return self._tokenizer.decode(self._prompts[number // self._n], skip_special=False) if self._call.echo else ""

    def _text_logprobs(
        self, number: int, scores: Sequence[Logprob | None] | None, logprobs: Sequence[Logprob] | None
    ) -> Object | None:
        """The old API's four lists. Nothing precedes a prompt's first token, so it has no log-probability."""
        if scores is None and logprobs is None:
            return None
        first = self._prompts[number // self._n][0]
        entries = [*(scores or ()), *(logprobs or ())]
        tokens = [self._spell(first if entry is None else entry.token) for entry in entries]
        start = self._offset.get(number, 0)
        offsets = list(itertools.accumulate(map(len, tokens), initial=start))
        self._offset[number] = offsets.pop()
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: Logprob) -> dict[str, float]:
        """The drawn token among them. Of two that are spelled alike, the likelier counts."""
        every = {*entry.top, (entry.token, entry.logprob)}
        return {self._spell(token): logprob for token, logprob in sorted(every, key=lambda pair: pair[1])}


def event(value: Object) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


def reasoning(text: str) -> Object:
    """Under both names: some clients read the one, some the other."""
    return {"reasoning": text, "reasoning_content": text}


def usage(outputs: Iterable[Output]) -> Object:
    """Tokens of all prompts and answers."""
    each = [output.usage for output in outputs]
    return {
        "prompt_tokens": sum(one.prompt_tokens for one in each),
        "completion_tokens": sum(one.completion_tokens for one in each),
        "total_tokens": sum(one.total_tokens for one in each),
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in each)},
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in each)},
    }


def _delta(delta: Object, logprobs: Object | None = None) -> Object:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": None}


def _chat_delta(delta: Delta) -> Object:
    match delta:
        case ReasoningDelta(text):
            return reasoning(text)
        case ContentDelta(text):
            return {"content": text}
        case ToolCallStart(index, key, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": key, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _merged(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Neighbours of one kind as one: what came while the client was not reading."""
    for (kind, index), group in itertools.groupby(deltas, lambda delta: (type(delta), getattr(delta, "index", None))):
        run = list(group)
        if kind is ToolCallStart or len(run) == 1:
            yield from run
        else:
            text = "".join(delta.text for delta in run if not isinstance(delta, ToolCallStart))
            yield ToolCallArguments(index or 0, text) if kind is ToolCallArguments else _text_delta(kind, text)


def _text_delta(kind: type[Delta], text: str) -> Delta:
    return ReasoningDelta(text) if kind is ReasoningDelta else ContentDelta(text)


def _text_reason(reason: str | None) -> str | None:
    """Plain text has no calls, though a prompt may make the model end at <|call|>."""
    return "stop" if reason == "tool_calls" else reason
