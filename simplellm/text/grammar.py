"""What an answer in harmony may be, token by token: headers from a list, reasoning free, content and arguments constrained.

The list holds the spellings that gpt-oss uses, in the tokens that it uses, so that a mask never makes it stumble. `Rules`
say which messages may come (plain data, for any process), `Grammars` compile them, an `AnswerGrammar` follows one answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from simplellm.errors import EngineError, RequestError
from simplellm.text.masks import ANY_OBJECT, Compiled, ConstrainedText, Source, Vocabulary
from simplellm.text.tokenizer import Tokenizer

MAX_ANALYSIS = 4  # reasoning messages before an answer that is constrained: a model kept from it could go on for ever
COMPILE_SECONDS = 10.0
NUM_THREADS = 4
NUM_KEPT = 64  # compiled rules, and four times as many schemas

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_JSON_TYPES = ((), (" ", _CONSTRAIN, "json"), (_CONSTRAIN, "json"), (" json",))


@dataclass(frozen=True, slots=True)
class Call:
    """A function that may be called. A source that cannot be compiled is refused if `strict`, else any object will do."""

    name: str
    arguments: Source
    field: str  # of the request, to name where it is refused
    strict: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """What the answers to one prompt may hold. Content is what final messages hold; None: any text."""

    calls: tuple[Call, ...] = ()
    final: bool = True  # the turn may end without a call
    content: Source | None = None
    field: str = "response_format"  # of the request, to name where `content` is refused
    reserve: int = 0  # tokens before the limit at which the answer must begin; 0: none are kept

    @property
    def free(self) -> bool:
        """No call is demanded, and final messages may hold anything."""
        return self.final and self.content is None


@dataclass(frozen=True, slots=True)
class Body:
    """The text behind a header, and the control token that ends it."""

    kind: Literal["analysis", "preamble", "final", "call"]
    end: int
    compiled: Compiled | None  # None: any text


Headers = dict[int, "Headers | Body"]  # by token; the body where the header ends


@dataclass(frozen=True, slots=True)
class Turn:
    """Compiled rules."""

    rules: Rules
    vocabulary: Vocabulary
    executor: Executor  # for masks that take long
    first: Headers  # of every message that may come
    answers: Headers  # of those that end the turn
    between: tuple[int, ...]  # from the end of a message to the next header
    reasoning: bytes  # the mask of any text that ends with <|end|>
    speech: bytes  # the same, with <|return|>


class Grammars:
    """Compiles rules in threads of its own, each at most once. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._executor = ThreadPoolExecutor(NUM_THREADS, "simplellm-grammar")
        self._turns: OrderedDict[Rules, Future[Turn]] = OrderedDict()
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiled = lru_cache(4 * NUM_KEPT)(lambda source: self._words().compile(source))

    def warm_up(self) -> None:
        """Make the vocabulary's tables, which takes seconds, before a request needs them."""
        self._words()

    def start(self, rules: Rules) -> Future[Turn]:
        """Begin to compile, unless it is done. Its exception is a RequestError that names the field."""
        with self._lock:
            turn = self._turns.pop(rules, None) or self._executor.submit(self._turn, rules)
            self._turns[rules] = turn
            if len(self._turns) > NUM_KEPT:
                self._turns.popitem(last=False)
        return turn

    def check(self, rules: Rules) -> None:
        """Compile, waiting for it. RequestError if it cannot be done, or not in time."""
        try:
            self.start(rules).result(COMPILE_SECONDS)
        except TimeoutError:
            field = rules.field if rules.content is not None else "tools"
            raise RequestError(field, f"not compiled within {COMPILE_SECONDS:g} s: make the schema simpler") from None
        except RequestError as error:  # a new one: many callers may get the same
            raise RequestError(error.field, error.problem) from None

    def new(self, rules: Rules) -> AnswerGrammar:
        """For one answer, at once: its masks wait for the compiler."""
        return AnswerGrammar(self.start(rules))

    def _words(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
            return self._vocabulary

    def _turn(self, rules: Rules) -> Turn:
        words, special = self._words(), self._tokenizer.special
        answers: Headers = {}
        for call in rules.calls:
            body = Body("call", special[_CALL], self._compile(call.arguments, call.field, call.strict))
            self._add(answers, _call_headers(call.name), body)
        if rules.final:
            content = None if rules.content is None else self._compile(rules.content, rules.field, strict=True)
            headers = [(_CHANNEL, "final", *kind, _MESSAGE) for kind in (_JSON_TYPES if content else ((),))]
            self._add(answers, headers, Body("final", special[_RETURN], content))
        first = _copy(answers)
        self._add(first, [(_CHANNEL, "analysis", _MESSAGE)], Body("analysis", special[_END], None))
        if rules.free:  # a preamble is content too, and would be a way around a call
            self._add(first, [(_CHANNEL, "commentary", _MESSAGE)], Body("preamble", special[_END], None))
        between = (special[_START], *self._tokenizer.encode("assistant"))
        reasoning, speech = words.free_text(special[_END]), words.free_text(special[_RETURN])
        return Turn(rules, words, self._executor, first, answers, between, reasoning, speech)

    def _compile(self, source: Source, field: str, strict: bool) -> Compiled:
        try:
            return self._compiled(source)
        except ValueError as error:
            if strict:
                raise RequestError(field, f"cannot be compiled: {error}") from None
            return self._compiled(ANY_OBJECT)

    def _add(self, headers: Headers, spelled: Iterable[Sequence[str]], body: Body) -> None:
        for parts in spelled:
            ids = [token for part in parts for token in self._ids(part)]
            at = headers
            for token in ids[:-1]:
                step = at.setdefault(token, {})
                assert isinstance(step, dict), "<|message|> ends every header, and only there"
                at = step
            at[ids[-1]] = body

    def _ids(self, part: str) -> list[int]:
        special = self._tokenizer.special
        return [special[part]] if part in special else self._tokenizer.encode(part)


class AnswerGrammar:
    """Follows one answer, sampled after a prompt that ends with `<|start|>assistant`."""

    def __init__(self, turn: Future[Turn]):
        self.num_tokens = 0  # taken in
        self._turn = turn
        self._path: Iterator[int] = iter(())
        self._next: int | None = None  # the one token that may come, on the way to the next header
        self._headers: Headers | None = None  # what of a header may follow
        self._body: Body | None = None  # neither of these: at the beginning of a header
        self._text: ConstrainedText | None = None
        self._num_analysis = 0

    def advance(self, tokens: Sequence[int]) -> None:
        """What was drawn since the last call. EngineError if it is not what the masks allow."""
        for token in tokens:
            self._step(self._turn.result(), token)
            self.num_tokens += 1

    def mask(self, room: int) -> bytes | None:
        """What may be drawn next, of at most `room` tokens that still fit; None: not known yet."""
        if not self._turn.done():
            return None
        try:
            turn = self._turn.result()
        except RequestError as error:  # where another process has checked the rules
            raise EngineError(str(error)) from None
        short = room <= turn.rules.reserve
        if self._next is not None:
            return turn.vocabulary.only([self._next])
        if self._text is not None:
            return self._text.mask()
        if self._body is not None:
            if short and self._body.kind in ("analysis", "preamble"):
                return turn.vocabulary.only([self._body.end])
            return turn.speech if self._body.kind == "final" else turn.reasoning
        if self._headers is None:
            tired = self._num_analysis >= MAX_ANALYSIS and not turn.rules.free
            self._headers = turn.answers if short or tired else turn.first
        return turn.vocabulary.only(self._headers)

    def _step(self, turn: Turn, token: int) -> None:
        if self._next is not None:
            self._expect(token == self._next, token)
            self._next = next(self._path, None)
        elif self._body is not None:
            self._write(turn, self._body, token)
        else:
            headers = turn.first if self._headers is None else self._headers
            self._expect(token in headers, token)
            self._enter(turn, headers[token])

    def _enter(self, turn: Turn, follows: Headers | Body) -> None:
        if isinstance(follows, dict):
            self._headers = follows
            return
        self._headers, self._body = None, follows
        self._num_analysis += follows.kind == "analysis"
        if follows.compiled is not None:
            self._text = ConstrainedText(turn.vocabulary, follows.compiled, follows.end, turn.executor)

    def _write(self, turn: Turn, body: Body, token: int) -> None:
        if token == body.end:
            self._body = self._text = None
            self._path = iter(turn.between)
            self._next = next(self._path)
        elif self._text is not None:
            self._text.advance(token)
        else:
            self._expect(bool(turn.vocabulary.tokenizer.token_bytes(token)), token)

    def _expect(self, allowed: bool, token: int) -> None:
        if not allowed:
            raise EngineError(f"token {token} at {self.num_tokens} of the answer is not what its grammar allows")


def _call_headers(name: str) -> list[tuple[str, ...]]:
    """The recipient stands before the channel or behind it (OpenAI's guide has both)."""
    to = f" to=functions.{name}"
    leads = [(to, _CHANNEL, "commentary"), (_CHANNEL, f"commentary{to}")]
    return [(*lead, *kind, _MESSAGE) for lead in leads for kind in _JSON_TYPES]


def _copy(headers: Headers) -> Headers:
    return {token: _copy(step) if isinstance(step, dict) else step for token, step in headers.items()}
