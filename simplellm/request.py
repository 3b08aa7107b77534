"""The nouns every room speaks: Sampling, Request, Span, Plan, Event. Plain Python, no torch.

A step runs a Plan, a list of Spans. A decode is a span of one token, a prompt chunk a span of many; one plan mixes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from simplellm.errors import RequestError

ON_DEVICE = -1  # in Span.tokens: the row's newest sampled token, which the host has not read yet

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 250


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are drawn and when it ends. temperature 0 is greedy. Limits: `check`."""

    temperature: float = 1.0  # OpenAI's recommendation for gpt-oss, as is top_p 1
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: a new one for each request
    max_tokens: int | None = None  # None: as many as the context has room for
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False  # of each generated token, from the model's own distribution (before any setting)
    top_logprobs: int = 0  # alternatives beside it
    prompt_logprobs: int | None = None  # alternatives beside each prompt token; 0: the token's own alone
    n: int = 1

    @property
    def penalised(self) -> bool:
        """Whether the row needs a slot with token counts."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field out of range and its limit."""
        _between("temperature", self.temperature, 0, 2)
        _between("top_p", self.top_p, 0, 1, open_low=True)
        _between("top_k", self.top_k, 0, math.inf, whole=True)
        _between("min_p", self.min_p, 0, 1)
        _between("presence_penalty", self.presence_penalty, -2, 2)
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        _between("repetition_penalty", self.repetition_penalty, 0, 10, open_low=True)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias", f"{self.logit_bias!r} is not a mapping from token ids to biases")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError("logit_bias", f"{len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS}")
        for token, bias in self.logit_bias.items():
            _between("logit_bias", token, 0, vocab_size - 1, whole=True, what="token id ")
            _between("logit_bias", bias, -100, 100)
        if self.seed is not None:
            _between("seed", self.seed, -(2**63), 2**64 - 1, whole=True)
        if self.max_tokens is not None:
            _between("max_tokens", self.max_tokens, 0, math.inf, whole=True)
        _between("min_tokens", self.min_tokens, 0, math.inf if self.max_tokens is None else self.max_tokens, whole=True)
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), tuple):
                raise RequestError(
                    name, f"{getattr(self, name)!r} is no string or list: give strings (stop) or ids (stop_token_ids)"
                )
        if len(self.stop) > MAX_STOPS:
            raise RequestError("stop", f"{len(self.stop)} strings, at most {MAX_STOPS}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError("stop", f"{text!r} is not a string of at least one character")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError("stop_token_ids", f"{len(self.stop_token_ids)} ids, at most {MAX_STOP_IDS}")
        for token in self.stop_token_ids:
            _between("stop_token_ids", token, 0, vocab_size - 1, whole=True)
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"{getattr(self, name)!r} is neither true nor false")
        _between("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS, whole=True)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", "needs logprobs=True")
        if self.prompt_logprobs is not None:
            _between("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS, whole=True)
        _between("n", self.n, 1, MAX_N, whole=True)


def _between(
    name: str, value: float, low: float, high: float, whole: bool = False, open_low: bool = False, what: str = ""
) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise RequestError(name, f"{what}{value!r} is not {'a whole number' if whole else 'a number'}")
    if not (low < value if open_low else low <= value) or not value <= high:
        above = f"above {low}" if open_low else f"at least {low}"
        raise RequestError(name, f"{what}{value} is out of range: {above}" + ("" if high == math.inf else f", at most {high}"))


class Constraint(Protocol):
    """What one answer may be, token by token; its methods are called in the engine's thread."""

    num_tokens: int  # of the answer, taken in

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in what was drawn. EngineError if it may not stand there; then this request fails, and no other."""

    def mask(self, room: int) -> bytes | None:
        """What may be drawn next, where at most `room` tokens still fit; None: not known yet, ask again.

        Bit i % 8 of byte i // 8 is set if token i may be drawn. EngineError as in `advance`.
        """


class Span(NamedTuple):  # a step makes one for each running request: a frozen dataclass takes four times as long
    """Run `tokens` at positions start, start+1, ... of the request in `row`. Plain ints, so ranks need nothing else."""

    rid: int
    row: int
    start: int
    tokens: tuple[int, ...]  # a decode's may be ON_DEVICE
    sample: bool  # draw the next token after the last one
    targets: tuple[int, ...] = ()  # the tokens that follow each of `tokens`, where prompt log-probabilities are asked for

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request takes a row: its settings, and what its penalties have to count."""

    row: int
    sampling: Sampling
    seed: int
    num_prompt: int
    tokens: tuple[int, ...]  # prompt and what was generated before a preemption; empty unless penalised
    penalty_slot: int | None
    stop_ids: frozenset[int]  # not to be drawn before min_tokens


class PageUpdate(NamedTuple):
    """Entry `index` of the row's page table of that kind is now `page`."""

    row: int
    window: bool
    index: int  # type: ignore[assignment]  # position // PAGE; hides tuple.index
    page: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what changed on the device since the last one, then what to run."""

    step: int
    spans: tuple[Span, ...]
    row_starts: tuple[RowStart, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token under the model, and of the most likely alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """What one step did for one request."""

    rid: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()  # of prompt tokens 1.., as their slices are done
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_token: int | None = None  # the token that ended it; the last of `tokens`
    error: str | None = None
