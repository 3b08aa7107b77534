"""A device without arithmetic, and the answers it must give.

Its pages hold the token ids themselves. The next token is a hash of the whole history, read through the full-attention page
table, and of the last W ids, read through the window table, so that a wrong, recycled or too early read page fails at once
or changes the answer. `expected` computes the answer without pages, rows or schedule.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from simplellm.config import PAGE, EngineConfig
from simplellm.engine.scheduler import Request, Scheduler
from simplellm.request import ON_DEVICE, Event, Logprob, Plan, RowStart, Sampling, Span

VOCAB = 97
EOS = frozenset({7})


def ids(num: int, seed: int = 0) -> list[int]:
    """Random tokens, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num)]


def next_token(full: tuple[int, ...], window: tuple[int, ...], seed: int, counts: Counter[int] | None) -> int:
    penalty = () if counts is None else tuple(sorted(counts.items()))
    return hash((full, window, seed, penalty)) % VOCAB


def draw(token: int, banned: Set[int]) -> int:
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def expected(request: Request, limit: int, window: int, eos: frozenset[int] = EOS) -> tuple[list[int], str]:
    """Generated tokens and finish reason of a request run alone, by the definition. limit: tokens, prompt included."""
    sampling, tokens = request.sampling, list(request.prompt)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos)
    num_prompt = len(tokens)
    if sampling.max_tokens is not None:
        limit = min(limit, num_prompt + sampling.max_tokens)
    while len(tokens) < limit:
        early = len(tokens) < num_prompt + sampling.min_tokens
        counts = Counter(tokens) if sampling.penalised else None
        token = draw(next_token(tuple(tokens), tuple(tokens[-window:]), request.seed, counts), stops if early else set())
        tokens.append(token)
        if token in stops:
            return tokens[num_prompt:], "stop"
    return tokens[num_prompt:], "length"


@dataclass
class FakeResults:
    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    scores: dict[int, tuple[Logprob, ...]] = field(default_factory=dict)


class Page:
    """128 slots, each with a token and what it was written for; -1: rubbish."""

    def __init__(self) -> None:
        self.tokens, self.tags, self.writers = [-1] * PAGE, [-1] * PAGE, [(-1, -1)] * PAGE
        self.last_step = -1

    def write(self, slot: int, tag: int, token: int, step: int, rid: int) -> None:
        if self.tags[slot] == -1:
            self.tags[slot], self.tokens[slot], self.writers[slot] = tag, token, (step, rid)
            self.last_step = step
        assert (self.tags[slot], self.tokens[slot]) == (tag, token), "overwritten with something else"

    def read(self, begin: int, end: int, tag: int, step: int, rid: int) -> list[int]:
        """tag: of the slot at `begin`. Tags are 2 x position, + 1 in a window page."""
        assert self.tags[begin:end] == list(range(tag, tag + 2 * (end - begin), 2)), "never written, recycled or misplaced"
        if self.last_step == step:  # pages may be read by others from the next step on
            fresh = [writer for at, writer in self.writers[begin:end] if at == step]
            assert fresh.count(rid) == len(fresh), "read in the step in which another request writes it"
        return self.tokens[begin:end]


class FakeRunner:
    """Applies plans in order. A page that the pool hands out holds rubbish from then on."""

    def __init__(self, scheduler: Scheduler, sliding_window: int):
        pool, self.sliding_window = scheduler.pool, sliding_window
        self.pages = [Page() for _ in range(pool.num_usable + 1)]
        self.tables: dict[tuple[int, bool], dict[int, int]] = {}
        self.starts: dict[int, RowStart] = {}
        self.newest: dict[int, tuple[int, int, int]] = {}  # row -> rid, position, token
        self.counts: dict[int, Counter[int]] = {}  # by penalty slot
        self.slot_rows: dict[int, int] = {}
        self.step = -1
        take = pool.take

        def take_and_poison() -> int:
            page = take()
            assert page != 0, "the dummy page was handed out"
            self.pages[page] = Page()
            return page

        pool.take = take_and_poison  # type: ignore[method-assign]

    def body(self, plan: Plan) -> dict[int, int]:
        """Write every span's tokens, then hash every drawing span's history: raw draws by rid."""
        assert plan.step > self.step
        self.step = plan.step
        assert len({span.row for span in plan.spans}) == len(plan.spans), "two spans in one row"
        for start in plan.row_starts:
            self._start(start)
        for update in plan.page_updates:
            assert update.page != 0
            self.tables[update.row, update.window][update.index] = update.page
        for span in plan.spans:
            self._write(span)
        return {span.rid: raw for span in plan.spans if (raw := self._read(span)) is not None}

    def head(self, plan: Plan, raw: dict[int, int], skip: Set[int]) -> FakeResults:
        results = FakeResults()
        for span in plan.spans:
            start = self.starts[span.row]
            if span.targets:
                results.scores[span.rid] = tuple(Logprob(t, -float(span.start + i)) for i, t in enumerate(span.targets))
            if not span.sample or span.rid in skip:
                continue
            early = span.end < start.num_prompt + start.sampling.min_tokens
            token = results.tokens[span.rid] = draw(raw[span.rid], start.stop_ids if early else set())
            self.newest[span.row] = (span.rid, span.end, token)
            if start.sampling.logprobs:
                results.logprobs[span.rid] = Logprob(token, -float(span.end))
            if start.penalty_slot is not None:
                self.counts[start.penalty_slot][token] += 1
        return results

    def _start(self, start: RowStart) -> None:
        self.starts[start.row] = start
        self.tables[start.row, False], self.tables[start.row, True] = {}, {}
        self.newest.pop(start.row, None)
        assert (start.penalty_slot is not None) == start.sampling.penalised
        if start.penalty_slot is not None:
            self.counts[start.penalty_slot] = Counter(start.tokens)
            self.slot_rows[start.penalty_slot] = start.row

    def _write(self, span: Span) -> None:
        for position, token in enumerate(span.tokens, span.start):
            if token == ON_DEVICE:
                assert len(span.tokens) == 1
                rid, at, token = self.newest[span.row]
                assert (rid, at) == (span.rid, position), "the row's newest token is another one"
            for window in (False, True):
                page = self.tables[span.row, window][position // PAGE]
                self.pages[page].write(position % PAGE, 2 * position + window, token, self.step, span.rid)

    def _history(self, span: Span, window: bool, first: int) -> tuple[int, ...]:
        tokens: list[int] = []
        table = self.tables[span.row, window]
        while first < span.end:
            index, begin = divmod(first, PAGE)
            end = min(PAGE, span.end - index * PAGE)
            tokens += self.pages[table[index]].read(begin, end, 2 * first + window, self.step, span.rid)
            first = (index + 1) * PAGE
        return tuple(tokens)

    def _read(self, span: Span) -> int | None:
        first = max(span.start - self.sliding_window + 1, 0)
        seen = self._history(span, True, first)  # all that any query of the span sees
        if not span.sample:
            return None
        full, start = self._history(span, False, 0), self.starts[span.row]
        counts = None
        if start.penalty_slot is not None:
            assert self.slot_rows[start.penalty_slot] == span.row, "another request has its penalty slot"
            counts = self.counts[start.penalty_slot]
            assert counts == Counter(full), "the penalty counts are not those of its tokens"
        return next_token(full, seen[-self.sliding_window :], start.seed, counts)


class Engine:
    """A loop over the fake device that checks the books after each half step, and collects answers."""

    def __init__(self, *, lag: int, num_pages: int = 64, max_context: int = 4096, window: int = PAGE, **options: object):
        config = EngineConfig.from_options(lag=lag, **options)
        self.lag, self.window = lag, window
        self.scheduler = Scheduler(config, num_pages=num_pages, max_context=max_context, sliding_window=window, eos_ids=EOS)
        self.runner = FakeRunner(self.scheduler, window)
        self.requests: dict[int, Request] = {}
        self.masked: set[int] = set()  # rids whose tokens a grammar chooses
        self.answers: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.scores: dict[int, list[Logprob]] = {}
        self.logprobs: dict[int, list[Logprob]] = {}
        self.plans: list[Plan] = []
        self._flying: list[tuple[Plan, FakeResults]] = []

    def add(self, prompt: Iterable[int], max_tokens: int | None = 8, masked: bool = False, **fields: object) -> Request:
        names = Sampling.__dataclass_fields__
        sampling = Sampling(max_tokens=max_tokens, **{k: v for k, v in fields.items() if k in names and k != "seed"})
        others = {k: v for k, v in fields.items() if k not in names or k == "seed"}
        request = Request(len(self.requests), tuple(prompt), sampling, **others)
        self.scheduler.add(request)
        self.requests[request.rid] = request
        if masked:
            self.masked.add(request.rid)
        self.answers[request.rid], self.scores[request.rid], self.logprobs[request.rid] = [], [], []
        return request

    def step(self, defer: Callable[[Span], bool] = lambda span: False, between: Callable[[], None] = lambda: None) -> None:
        """One turn of the loop. defer: whether a drawing span's mask is not ready; between: what comes in meanwhile."""
        plan = self.scheduler.plan()
        self.scheduler.audit()
        if plan is None:
            assert self._flying or not self.scheduler.busy, "nothing runs, and nothing ever will"
            self._commit()
            return
        assert plan.num_tokens <= self.scheduler.config.idle_budget
        self.plans.append(plan)
        raw = self.runner.body(plan)
        between()
        masked = [s for s in plan.spans if s.sample and s.rid in self.masked]
        if masked:
            self._commit()  # a mask depends on the tokens before it
        skip = {span.rid for span in masked if defer(span)}
        for rid in skip:
            self.scheduler.defer(rid)
        self._flying.append((plan, self.runner.head(plan, raw, skip)))
        while len(self._flying) > self.lag:
            self._commit(1)
        between()

    def run(self, defer: Callable[[Span], bool] = lambda span: False) -> None:
        for _ in range(20000):
            if not self.scheduler.busy and not self._flying:
                return
            self.step(defer)
        raise AssertionError("it does not come to an end")

    def abort(self, rid: int, reason: str = "abort") -> None:
        event = self.scheduler.abort(rid, reason)
        self.scheduler.audit()
        if event is not None:
            self._take(event)

    def check(self, rids: Iterable[int] | None = None) -> None:
        """Every answer is the one by the definition; an aborted one is a part of it."""
        for rid in self.requests if rids is None else rids:
            request = self.requests[rid]
            tokens, reason = expected(request, self.scheduler.max_length, self.window)
            if self.reasons[rid] == "abort":
                assert self.answers[rid] == tokens[: len(self.answers[rid])]
            else:
                assert (self.answers[rid], self.reasons[rid]) == (tokens, reason), f"request {rid}"
            if request.sampling.logprobs:
                assert [entry.token for entry in self.logprobs[rid]] == self.answers[rid]

    def _commit(self, num: int | None = None) -> None:
        for _ in range(len(self._flying) if num is None else num):
            for event in self.scheduler.commit(*self._flying.pop(0)):
                self._take(event)
        self.scheduler.audit()

    def _take(self, event: Event) -> None:
        rid = event.rid
        assert rid not in self.reasons, "an event after the last one"
        self.answers[rid] += event.tokens
        self.scores[rid] += event.prompt_logprobs
        self.logprobs[rid] += event.logprobs
        if event.finish_reason is not None:
            self.reasons[rid] = event.finish_reason
            assert event.stop_token == (self.answers[rid][-1] if event.finish_reason == "stop" else None)
