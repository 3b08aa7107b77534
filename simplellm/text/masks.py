"""JSON Schemas, regular expressions and grammars, compiled to masks over the vocabulary. Built on llguidance.

A mask is bytes, one bit for each id (bit i % 8 of byte i // 8): set if the token may come next. Constrained text never
holds a control token; where it may end, its terminator's bit is set.
"""

# Measured with o200k on one slow core, llguidance 1.9.1: the vocabulary 1.4 to 2.6 s, once; to compile a schema of two strings
# 1 to 2 ms, of 1,000 properties 35 to 75 ms; a mask 60 to 110 us (medians of six small schemas), 145 us with 1,000 properties,
# at most 0.9 ms. xgrammar 0.2.9 would bring transformers along, and torch into this room.

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from simplellm.errors import EngineError, RequestError
from simplellm.text.schema import nesting
from simplellm.text.tokenizer import Tokenizer

MAX_LENGTH = 200_000  # characters of a schema, regular expression or grammar
MAX_NESTING = 100  # levels of a schema
LARGE = 16_384  # characters from which on a mask may take long: then it is computed beside the engine's thread,
PATIENCE = 0.001  # which waits for it only so many seconds

# One space after "," and ":" or none, no other white space: both ways in which gpt-oss writes JSON on one line, and no
# room for the endless blank lines into which models fall when a grammar lets them. oneOf counts as anyOf: generators
# write it for unions whose members exclude each other anyway.
_JSON_OPTIONS: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_JSON_OPTIONS |= {"coerce_one_of": True, "lenient": False}

_PROBE = b'{"'  # how most constrained texts begin; huge schemas fail there


@dataclass(frozen=True, slots=True)
class Source:
    """What a text must match."""

    kind: Literal["json", "regex", "grammar"]
    text: str  # a JSON Schema, a regular expression, a grammar in llguidance's variant of Lark

    @staticmethod
    def of_schema(schema: Any, field: str) -> Source:
        """RequestError naming `field` for what is no JSON Schema object, or too large."""
        if not isinstance(schema, dict):
            raise RequestError(field, f"the schema is a {type(schema).__name__}, not a JSON object")
        if nesting(schema) > MAX_NESTING:
            raise RequestError(field, f"the schema is nested more than {MAX_NESTING} levels deep: flatten it")
        try:
            return Source("json", json.dumps(schema, allow_nan=False)).checked(field)
        except (TypeError, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(field, f"the schema is not JSON: {error}") from None

    def checked(self, field: str) -> Source:
        """RequestError if it is too large."""
        if len(self.text) > MAX_LENGTH:
            raise RequestError(field, f"has {len(self.text)} characters, at most {MAX_LENGTH}: make it smaller")
        return self


ANY_OBJECT = Source("json", '{"type": "object"}')


class Compiled(NamedTuple):
    """A source, ready for use."""

    matcher: LLMatcher  # to be copied
    is_large: bool


class Vocabulary:
    """Masks over one vocabulary. Takes a second to make; threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.tokenizer, self.num_bytes = tokenizer, (vocab_size + 7) // 8
        text = (token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token))
        self.text_bits = int.from_bytes(self.only(text), "little")  # the mask, as a number, of all tokens with text
        self._trie = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer)), slices=LLTokenizer.json_slices())

    def only(self, ids: Iterable[int]) -> bytes:
        """The mask of these tokens."""
        mask = bytearray(self.num_bytes)
        for token in ids:
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)

    def free_text(self, end: int) -> bytes:
        """The mask of any text that ends with `end`."""
        return (self.text_bits | 1 << end).to_bytes(self.num_bytes, "little")

    def compile(self, source: Source) -> Compiled:
        """ValueError: what is wrong with the source, or that it is too much work."""
        match source.kind:
            case "json":
                grammar = LLMatcher.grammar_from_json_schema(source.text, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
            case "regex":
                grammar = LLMatcher.grammar_from_regex(source.text)
            case "grammar":
                grammar = LLMatcher.grammar_from_lark(source.text)
        matcher = LLMatcher(self._trie, grammar, log_level=0)
        probe = matcher.deep_copy()
        if not probe.is_error():
            probe.compute_bitmask()
            if probe.try_consume_tokens(self._trie.tokenize_bytes(_PROBE)):
                probe.compute_bitmask()
        if probe.is_error():
            raise ValueError(_problem(probe))
        return Compiled(matcher, len(source.text) >= LARGE)


class ConstrainedText:
    """One text that must match: `advance` by what was drawn, then `mask`."""

    def __init__(self, vocabulary: Vocabulary, compiled: Compiled, end: int, executor: Executor):
        self._vocabulary, self._compiled, self._end, self._executor = vocabulary, compiled, end, executor
        self._matcher: LLMatcher | None = None
        self._new: list[int] = []  # drawn, not yet taken in
        self._coming: Future[bytes] | None = None

    def advance(self, token: int) -> None:
        """A token of the text; its terminator is none."""
        self._new.append(token)

    def mask(self) -> bytes | None:
        """What may come next; None: not known yet. EngineError: the text does not match, or matching is too much work."""
        if not self._compiled.is_large:
            return self._compute()
        patience = 0.0
        if self._coming is None:
            self._coming, patience = self._executor.submit(self._compute), PATIENCE
        try:
            mask = self._coming.result(patience)
        except TimeoutError:
            return None
        self._coming = None
        return mask

    def _compute(self) -> bytes:
        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        matcher, new, self._new = self._matcher, self._new, []
        bits = 0
        if matcher.consume_tokens(new):
            bits = int.from_bytes(matcher.compute_bitmask(), "little") & self._vocabulary.text_bits
            if matcher.is_accepting():
                bits |= 1 << self._end
        if not bits:
            raise EngineError(f"the grammar of this answer failed: {_problem(matcher) or 'no token can follow'}")
        return bits.to_bytes(self._vocabulary.num_bytes, "little")


class _Tokens:
    """The tokenizer as llguidance wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        names = {token: name.encode() for name, token in tokenizer.special.items()}
        self.tokens = [tokenizer.token_bytes(token) or names.get(token, b"") for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(names)
        self.eos_token_id = tokenizer.special["<|return|>"]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _problem(matcher: LLMatcher) -> str:
    """The beginning of its error: the rest is its whole state."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())[:300]
