"""Policy: which tokens run next. `plan` advances a request's `planned`, `commit` its `computed`; plans are committed in order.

The device runs plans in the order they are made, so a page, row or penalty slot freed by a commit, an abort or a preemption
can be handed out by the next plan at once: whatever is still in flight writes to it earlier. At most one plan may be in
flight when the next is made (lag 1).
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

from simplellm.config import PAGE, EngineConfig
from simplellm.engine.sequence import Request as Request
from simplellm.engine.tables import Tables
from simplellm.errors import RequestError
from simplellm.request import ON_DEVICE, Event, Logprob, PageUpdate, Plan, RowStart, Span

SCORED_PER_STEP = 256  # prompt tokens of one step that get log-probabilities: each is a row of logits
MAX_PASSED = 64  # waiting requests that one plan looks at in vain

_ONE_ON_DEVICE = (ON_DEVICE,)
_new = tuple.__new__  # half the time of a NamedTuple's own constructor


class Results(Protocol):
    """What the loop knows after a step, by rid."""

    @property
    def tokens(self) -> Mapping[int, int]: ...
    @property
    def logprobs(self) -> Mapping[int, Logprob]: ...
    @property
    def scores(self) -> Mapping[int, tuple[Logprob, ...]]: ...


class Draft:
    """A plan in the making."""

    __slots__ = ("requests", "spans", "row_starts", "page_updates", "budget", "score_budget", "preempted")

    def __init__(self, budget: int):
        self.requests: list[Request] = []  # of each span
        self.spans: list[Span] = []
        self.row_starts: list[RowStart] = []
        self.page_updates: list[PageUpdate] = []
        self.budget, self.score_budget = budget, SCORED_PER_STEP
        self.preempted = False


class Scheduler:
    """Many requests, one pool of pages.

    Order: lower `priority` first, then arrival. A step serves decodes first, then prompt chunks, then admits: a request
    takes a row and the full pages of all its known tokens if they are available with one page to spare for each running
    request. One that does not fit holds up those behind it, so that none starves; one that waits for a penalty slot, or for
    a prefix that is just being written, lets them pass. For want of a page the last running request in order is preempted:
    its pages go, its tokens stay, and it waits at its place. Admission never preempts, so a higher priority waits for room.
    """

    def __init__(self, config: EngineConfig, *, num_pages: int, max_context: int, sliding_window: int, eos_ids: frozenset[int]):
        self.config, self.max_context, self.eos_ids = config, max_context, eos_ids
        self.tables = Tables(num_pages, sliding_window)
        self.pool, self.cache = self.tables.pool, self.tables.cache
        self.requests: dict[int, Request] = {}  # by rid, until they end
        self.waiting: list[Request] = []  # these three in order
        self.parked: list[Request] = []  # waiting for a penalty slot
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._rows = list(range(config.max_running - 1, -1, -1))
        self._slots = list(range(config.penalty_slots - 1, -1, -1))
        self._groups: Counter[object] = Counter()  # members that have not ended, by salt; without a prefix cache only
        self._step = 0  # of the next plan
        self._num_arrived = 0
        self._flying: deque[tuple[int, list[Request]]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    @property
    def max_length(self) -> int:
        """Tokens, prompt included, that a request alone can come to. The last one is never computed."""
        usable = self.pool.num_usable
        return min(self.max_context, max(usable - 2, 1) * PAGE + 1)  # two window pages; one suffices for one full page

    def check(self, num_prompt: int) -> None:
        """Raise RequestError for a prompt that can never run. Callable from any thread."""
        if num_prompt < 1:
            raise RequestError("prompt", "is empty: at least 1 token is needed")
        if num_prompt >= self.max_context:
            raise RequestError("prompt", f"{num_prompt} tokens leave no room in a context of {self.max_context}: shorten it")
        if num_prompt >= self.max_length:
            num = (num_prompt + PAGE - 1) // PAGE
            raise RequestError(
                "prompt",
                f"{num_prompt} tokens need {num + 2} KV pages ({num} full, 2 window), the pool has {self.pool.num_usable}: "
                "shorten it, or give the engine more memory_gb",
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError before anything changes."""
        self.check(len(request.prompt))
        assert request.rid not in self.requests, "a rid is used once"
        sampling, num_prompt = request.sampling, len(request.prompt)
        most = self.max_length if sampling.max_tokens is None else num_prompt + sampling.max_tokens
        request.limit = min(self.max_length, most)
        request.stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos_ids)
        request.tokens = list(request.prompt)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        if self.config.prefix_cache:
            request.salt = request.cache_salt
        elif request.group is not None:
            request.salt = ("group", request.group)
            self._groups[request.salt] += 1
        self.requests[request.rid] = request
        insort(self.waiting, request, key=_order)

    def abort(self, rid: int, reason: str = "abort") -> Event | None:
        """End a request in any state; tokens of it in flight are dropped. None if it is unknown or has ended."""
        request = self.requests.get(rid)
        if request is None:
            return None
        self._finish(request)
        return Event(rid, finish_reason=reason)

    def defer(self, rid: int) -> None:
        """The newest planned span of this request draws no token: plan its last token again.

        Call it before the next plan; results must lack the rid. The position is written twice, with the same values.
        """
        request = self.requests.get(rid)
        if request is not None and request.row >= 0:
            request.planned -= 1
            request.deferred = True

    def plan(self) -> Plan | None:
        """The next step. None: nothing can run before a commit or an arrival."""
        draft = Draft(self.config.token_budget)
        chunks = self._plan_decodes(draft)
        beginning = len(chunks) + min(len(self.waiting), len(self._rows))
        if not draft.spans or (draft.budget > 0 and beginning > len(draft.spans)):  # more wait to begin than for a next token
            draft.budget = self.config.idle_budget - len(draft.spans)
        for i, request in enumerate(chunks):
            if request.row >= 0 and draft.budget > 0:
                self._plan_chunk(draft, request, chunks[i + 1 :])
        if self._rows and not draft.preempted:  # a token of the preempted one may be in flight until the next plan
            self._admit(draft)
        if not draft.spans:
            assert not draft.row_starts and not draft.page_updates
            return None
        plan = Plan(self._step, tuple(draft.spans), tuple(draft.row_starts), tuple(draft.page_updates))
        self._flying.append((self._step, draft.requests))
        self._step += 1
        return plan

    def commit(self, plan: Plan, results: Results) -> list[Event]:
        """Take in the oldest plan's results: one Event for each request that got something, or ended."""
        step, requests = self._flying.popleft()
        assert step == plan.step, "plans are committed in order"
        events = []
        tokens, logprobs, new = results.tokens, results.logprobs, _new
        for at, request in enumerate(requests):
            rid, end = request.rid, request.computed + 1
            token = tokens.get(rid)
            if end < request.due and token is not None and token not in request.stops:
                request.computed = end
                request.tokens.append(token)
                given = (logprobs[rid],) if logprobs and rid in logprobs else ()
                events.append(new(Event, (rid, (token,), given, (), None, None, None)))
            elif not request.finished:
                event = self._settle(request, plan.spans[at], token, results)
                if event is not None:
                    events.append(event)
        return events

    def row_start(self, request: Request) -> RowStart:
        """What the device must know of a running request, as of now."""
        tokens = tuple(request.tokens) if request.sampling.penalised else ()
        slot, stops = request.penalty_slot, request.stops
        return RowStart(request.row, request.sampling, request.seed, len(request.prompt), tokens, slot, stops)

    def forget_written(self, step: int) -> None:
        """Nobody may find in the prefix cache what plans from `step` on have written: one of them failed."""
        for node in list(self.cache.nodes()):
            if node.full and node.step >= step:
                self.cache.reclaim(node.full)

    def audit(self) -> None:
        """Raise AssertionError unless the books balance: pages, rows, slots, queues. For tests."""
        self.tables.audit(self.running)
        queued = {request.rid: request for queue in (self.waiting, self.parked, self.running) for request in queue}
        assert queued == self.requests, "a request is in no queue"
        assert len(queued) == len(self.waiting) + len(self.parked) + len(self.running), "or in two"
        for queue in (self.waiting, self.parked, self.running):
            assert all(_order(a) < _order(b) for a, b in pairwise(queue)), "a queue is out of order"
        rows = self._rows + [request.row for request in self.running]
        assert sorted(rows) == list(range(self.config.max_running)), "a row is lost or shared"
        slots = self._slots + [request.penalty_slot for request in self.running if request.sampling.penalised]
        assert slots.count(None) == 0 and len(set(slots)) == len(slots) == self.config.penalty_slots, "so is a slot"

    def _plan_decodes(self, draft: Draft) -> list[Request]:
        """One span for each decoding request; returns the others. The oldest first, if the budget is below their number."""
        spans, requests, new, budget = draft.spans, draft.requests, _new, draft.budget
        scarce = len(self.running) > budget
        others = []
        for request in self.running:  # preempting takes from its end, at or after the current one
            position = request.planned
            if scarce and len(spans) == budget:
                break
            if position < request.smooth or (request.decoding and self._turn_page(draft, request)):
                known = request.tokens
                tokens = _ONE_ON_DEVICE if position >= len(known) else (known[position],)
                spans.append(new(Span, (request.rid, request.row, position, tokens, True, ())))
                requests.append(request)
                request.planned = position + 1
            elif not request.decoding:
                others.append(request)
        draft.budget -= len(spans)
        return others

    def _turn_page(self, draft: Draft, request: Request) -> bool:
        """Give a decoding request its next pages; False if it sits out this step."""
        position = request.planned
        if position >= request.limit - 1:  # all its tokens are drawn
            return False
        while self.pool.num_available < 2:
            last = self.running[-1]
            if last is request and request.computed < position:
                return False  # its own span in flight may hold what is missing
            self._preempt(draft, last)
            if last is request:
                return False
        self.tables.register(request, position, self._step - 1)
        self.tables.take_full(request, position + 1, draft.page_updates)
        self.tables.take_window(request, position + 1, draft.page_updates)
        request.smooth = min(len(request.full) * PAGE, request.limit - 1)
        return True

    def _plan_chunk(self, draft: Draft, request: Request, later: list[Request]) -> None:
        """As many known tokens as budget and window pages allow; for the first page, `later` chunks may be preempted."""
        start, known = request.planned, len(request.tokens)
        scored_end = len(request.prompt) - 1 if request.sampling.prompt_logprobs is not None else 0
        end = min(known, start + draft.budget)
        if request.scored < scored_end and start < scored_end:
            end = min(end, start + draft.score_budget)
        if end > start:
            end = self._fit_window(draft, request, end, later)
        if end == start:
            return
        targets: tuple[int, ...] = ()
        if request.scored < min(end, scored_end):
            targets = tuple(request.tokens[start + 1 : min(end, scored_end) + 1])
            draft.score_budget -= len(targets)
        self.tables.take_window(request, end, draft.page_updates)
        sample = end == known < request.limit
        draft.spans.append(Span(request.rid, request.row, start, tuple(request.tokens[start:end]), sample, targets))
        draft.requests.append(request)
        draft.budget -= end - start
        request.planned = end
        self.tables.register(request, end, self._step)
        if end == known:
            request.decoding = True
            request.smooth = min(len(request.full) * PAGE, request.limit - 1)

    def _fit_window(self, draft: Draft, request: Request, end: int, later: list[Request]) -> int:
        """Where a chunk must end so that its window pages leave one page to every other running request."""
        start, num = request.planned, request.window_start + len(request.window)
        least = 1 if num * PAGE <= start else 0
        while self.pool.num_available < least:
            victims = [other for other in later if other.row >= 0]
            if not victims:
                return start
            self._preempt(draft, victims[-1])
        spare = self.pool.num_available - (len(self.running) - 1)
        return min(end, (num + max(least, spare)) * PAGE)

    def _admit(self, draft: Draft) -> None:
        """Start waiting requests, in order."""
        for _ in range(min(len(self.parked), len(self._slots))):
            insort(self.waiting, self.parked.pop(0), key=_order)
        at = 0  # those before it are passed over
        while at < min(len(self.waiting), MAX_PASSED) and self._rows and draft.budget > 0:
            request = self.waiting[at]
            if request.sampling.penalised and not self._slots:
                insort(self.parked, self.waiting.pop(at), key=_order)
                continue
            num_hit, soon = 0, False
            if request.salt is not None and (request.sampling.prompt_logprobs is None or self._is_scored(request)):
                num_hit, soon = self.cache.match(request.salt, request.tokens, request.nodes, self._step)
            if soon:
                at += 1
            elif self.pool.num_available < self.tables.need(request, num_hit) + len(self.running):
                return
            else:
                del self.waiting[at]
                self._start(draft, request, num_hit)
                self._plan_chunk(draft, request, [])

    def _is_scored(self, request: Request) -> bool:
        return request.scored == len(request.prompt) - 1

    def _start(self, draft: Draft, request: Request, num_hit: int) -> None:
        """Give the request a row, the pages it hit, the other full pages of its known tokens, and its penalty slot."""
        request.row = self._rows.pop()
        insort(self.running, request, key=_order)
        if request.sampling.penalised:
            request.penalty_slot = self._slots.pop()
        draft.row_starts.append(self.row_start(request))
        self.tables.start(request, num_hit, draft.page_updates)
        request.planned = request.computed = num_hit * PAGE
        if request.admitted_at is None:
            request.admitted_at, request.cached_tokens = time.monotonic(), num_hit * PAGE
            self.cache.num_queried += len(request.prompt)
            self.cache.num_hit += num_hit * PAGE

    def _settle(self, request: Request, span: Span, token: int | None, results: Results) -> Event | None:
        """Take in one span's result where the short way of `commit` does not do. A preempted request keeps its token."""
        scores = results.scores.get(span.rid, ())[request.scored - span.start :] if span.targets else ()
        request.scored += len(scores)
        deferred = span.sample and token is None
        if deferred:
            assert request.deferred, f"no token for request {span.rid}"
            request.deferred = False
        elif request.row >= 0:
            request.computed = span.end
            self.tables.drop_unseen(request)
        if token is not None:
            request.tokens.append(token)
        reason = self._end_reason(request, token)
        if reason is not None:
            self._finish(request)
        elif token is not None and request.row >= 0:
            seen = (request.window_start + 1) * PAGE + self.tables.sliding_window - 1
            request.due = min(seen, request.limit - 1)
        if token is None and not scores and reason is None:
            return None
        given = (results.logprobs[span.rid],) if span.rid in results.logprobs else ()
        new = () if token is None else (token,)
        return Event(span.rid, new, given, scores, reason, token if reason == "stop" else None)

    def _end_reason(self, request: Request, token: int | None) -> str | None:
        num = len(request.tokens)
        if token is None:  # with max_tokens=0 it ends with its prompt
            return "length" if num == request.limit == request.computed else None
        if token in request.stops:  # not before min_tokens: the sampler does not draw it there
            return "stop"
        return "length" if num == request.limit else None

    def _preempt(self, draft: Draft, request: Request) -> None:
        """Take a running request's pages and let it wait at its place, its known tokens kept."""
        self._leave(request)
        request.planned = request.computed = request.smooth = 0
        request.decoding = False
        insort(self.waiting, request, key=_order)
        self.num_preemptions += 1
        draft.preempted = True

    def _finish(self, request: Request) -> None:
        if request.row >= 0:
            self._leave(request)
        else:
            _remove(self.parked if request in self.parked else self.waiting, request)
        request.finished = True
        del self.requests[request.rid]
        if request.salt in self._groups:
            self._groups[request.salt] -= 1
            if not self._groups[request.salt]:
                del self._groups[request.salt]
                self.cache.forget_salt(request.salt)

    def _leave(self, request: Request) -> None:
        """A running request gives back its row, its pages and its penalty slot."""
        _remove(self.running, request)
        self.tables.release(request, self._step - 1)
        self._rows.append(request.row)
        request.row, request.due = -1, 0
        if request.penalty_slot is not None:
            self._slots.append(request.penalty_slot)
            request.penalty_slot = None


def _order(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


def _remove(requests: list[Request], request: Request) -> None:
    at = bisect_left(requests, _order(request), key=_order)
    assert requests[at] is request
    del requests[at]
