"""What callers pass to an LLM, read and checked: prompts, sampling settings, and what a chat says besides its messages.

Every refusal is a RequestError that names the argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simplellm.config import suggest
from simplellm.errors import RequestError
from simplellm.request import Sampling
from simplellm.text import response_format
from simplellm.text.grammar import Call, Rules
from simplellm.text.harmony import Tool, declared_tools, render
from simplellm.text.masks import ANY_OBJECT, Source
from simplellm.text.response_format import ResponseFormat
from simplellm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

MIN_ANSWER = 16  # tokens: six close the reasoning and begin the answer

_SAMPLING = tuple(f.name for f in dataclasses.fields(Sampling))
_NO_ARGUMENTS = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What a chat request says besides its messages."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Any
    parallel_tool_calls: bool
    reasoning_effort: str | None
    current_date: str | None
    response_format: Any = None
    answer_tokens: int | None = None

    def check(self) -> set[str]:
        """Names that the model may call. Raises RequestError for whatever is wrong but cannot be compiled."""
        if not isinstance(self.parallel_tool_calls, bool):
            raise RequestError("parallel_tool_calls", f"{self.parallel_tool_calls!r} is neither true nor false")
        kept = self.answer_tokens
        if kept is not None and (not isinstance(kept, int) or isinstance(kept, bool) or kept < MIN_ANSWER):
            raise RequestError("answer_tokens", f"{kept!r} is not a whole number of at least {MIN_ANSWER}")
        names = {tool.name for tool in declared_tools(self.tools)}
        demanded = self._demanded()
        if demanded and not names:
            raise RequestError("tool_choice", "demands a call, but there are no tools: declare some, or leave it out")
        if demanded and demanded is not True and demanded not in names:
            raise RequestError("tool_choice", f"{demanded!r} is not declared: tools has {', '.join(sorted(names))}")
        self.format()
        return names if self.tool_choice != "none" else set()

    def format(self) -> ResponseFormat | None:
        """What the final message must be; None: any text."""
        return response_format.read(self.response_format)

    def render(self, conversation: Any, tokenizer: Tokenizer) -> list[int]:
        """Prompt ids. With tool_choice "none" the model is not told of the tools."""
        return render(
            conversation,
            tokenizer,
            tools=None if self.tool_choice == "none" else self.tools,
            response_format=self.format(),
            reasoning_effort=self.reasoning_effort,
            current_date=self.current_date,
        )

    def rules(self) -> Rules | None:
        """What the answers may hold; None where they are free."""
        tools = [] if self.tool_choice == "none" else declared_tools(self.tools)
        demanded, form = self._demanded(), self.format()
        if not (demanded or form or self.answer_tokens or any(tool.strict for tool in tools)):
            return None
        calls = [_call(tool, number) for number, tool in enumerate(tools) if demanded in (None, True, tool.name)]
        content = None if form is None or demanded else form.source
        return Rules(tuple(calls), not demanded, content, response_format.FIELD, self.answer_tokens or 0)

    def _demanded(self) -> str | bool | None:
        """The function that must be called; True: any; None: none need be."""
        match self.tool_choice:
            case None | "auto" | "none":
                return None
            case "required":
                return True
            case {"type": "function", "function": {"name": str(name)}}:
                return name
        wanted = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise RequestError("tool_choice", f"{self.tool_choice!r} is not {wanted}")


def _call(tool: Tool, number: int) -> Call:
    """A function's arguments, by its schema; any object if that is out of bounds and need not be followed."""
    field = f"tools[{number}].function.parameters"
    given = _NO_ARGUMENTS if tool.parameters is None else {**tool.parameters, "type": "object"}
    try:
        source = Source.of_schema(given, field)
    except RequestError:
        if tool.strict:
            raise
        source = ANY_OBJECT
    return Call(tool.name, source, field, tool.strict)


def check_constrained(sampling: Sampling) -> None:
    """Raise RequestError for settings that would have an answer go on where its grammar ends it."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(sampling, name):
            raise RequestError(name, "does not go with response_format, a demanded call, strict tools or answer_tokens")


def conversation_list(messages: Any) -> tuple[list[Any], bool]:
    """One conversation or a list of them -> a list, and whether there were many."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError("messages", f"{type(messages).__name__} is no list of messages")
    if not messages:
        raise RequestError("messages", "an empty list")
    if all(isinstance(item, Sequence) and not isinstance(item, (str, bytes)) for item in messages):
        return list(messages), True
    return [messages], False


def prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt (a string, or a list of ids) or a list of them -> a list of prompts, at least one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError("prompts", f"{type(prompts).__name__} is neither text, token ids nor a list of such")
    if not prompts:
        raise RequestError("prompts", "an empty list")
    if _whole_numbers(prompts) or all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def prompt_ids(prompt: Any, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a prompt, text or ids, checked."""
    if isinstance(prompt, str):
        ids = tuple(tokenizer.encode(prompt))
    elif isinstance(prompt, Sequence) and (
        _whole_numbers(prompt) or all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
    ):
        ids = tuple(prompt)
    else:
        raise RequestError("prompt", f"{type(prompt).__name__} is neither text nor a list of token ids")
    if not ids:
        raise RequestError("prompt", "is empty: at least 1 token is needed")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError("prompt", f"token id {wrong} is outside the vocabulary of {vocab_size}")
    return ids


def _whole_numbers(values: Sequence[Any]) -> bool:
    """Whether all are plain ints: what nearly every list of ids is, told without a step of Python for each."""
    return set(map(type, values)) == {int}


def sampling_list(sampling: Mapping[str, Any], num_prompts: int) -> list[Sampling]:
    """One Sampling per prompt from keywords whose values are one for all or a list of one per prompt."""
    for name in sampling:
        if name not in _SAMPLING:
            raise RequestError(name, f"no such setting; {suggest(name, _SAMPLING)}")
    columns = {name: _column(name, value, num_prompts) for name, value in sampling.items()}
    return [Sampling(**{name: column[i] for name, column in columns.items()}) for i in range(num_prompts)]


def _column(name: str, value: Any, num_prompts: int) -> list[Any]:
    """`value` for each prompt. A list of strings (stop) or of ids (stop_token_ids) is itself one value."""
    single = {"stop": str, "stop_token_ids": int}.get(name)
    listed = isinstance(value, list) and not (single and all(isinstance(item, single) for item in value))
    if not listed:
        return [_one(name, value)] * num_prompts
    if len(value) != num_prompts:
        raise RequestError(name, f"a list of {len(value)} values for {num_prompts} prompts")
    return [_one(name, item) for item in value]


def _one(name: str, value: Any) -> Any:
    if name in ("stop", "stop_token_ids"):
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else value
    if name == "logit_bias":  # a copy: nobody may change it once it is checked
        return {} if value is None else dict(value) if isinstance(value, Mapping) else value
    return value
