"""Prometheus metrics under vLLM's names, which dashboards and routers look for, and what vLLM has no name for under ours."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from simplellm.server.remote import Feed

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 2, 10)

GAUGES = {
    "running": ("vllm:num_requests_running", "requests with a row on the device"),
    "waiting": ("vllm:num_requests_waiting", "requests that wait for one"),
}
COUNTED = {
    "preemptions": ("vllm:num_preemptions", "requests whose pages were taken and that were computed again"),
    "cache_queries": ("vllm:prefix_cache_queries", "prompt tokens looked for in the prefix cache"),
    "cache_hits": ("vllm:prefix_cache_hits", "prompt tokens found there"),
}
TIMES = {
    "first": ("vllm:time_to_first_token_seconds", "from a request's submission to its first token", SECONDS),
    "whole": ("vllm:e2e_request_latency_seconds", "from a request's submission to its end", SECONDS),
    "queue": ("vllm:request_queue_time_seconds", "until a request had a row", SECONDS),
    "prompt": ("vllm:request_prefill_time_seconds", "from having a row to the first token", SECONDS),
    "decode": ("vllm:request_decode_time_seconds", "from the first token to the last", SECONDS),
}


class Tally(Collector):
    """A histogram without locks, for one thread that observes with every token: a tenth of the time of prometheus_client's."""

    def __init__(self, name: str, told: str, buckets: tuple[float, ...], model: str):
        self._name, self._told, self._bounds, self._model = name, told, buckets, model
        self._counts, self._sum = [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float, num: int = 1) -> None:
        """`num` times."""
        self._counts[bisect_left(self._bounds, value)] += num
        self._sum += num * value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """prometheus_client's call: of each bucket, how many values were at most its bound."""
        family = HistogramMetricFamily(self._name, self._told, labels=("model_name",))
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        family.add_metric((self._model,), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class Metrics:
    """The numbers of one server. Counters of the engine come as totals with its heartbeat."""

    def __init__(self, model: str):
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._model = model
        self._gauges = {key: self._gauge(*told) for key, told in GAUGES.items()}
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "KV pages that requests hold, as a part of all (1 is full)")
        self._counted = {key: self._counter(*told) for key, told in COUNTED.items()}
        self._totals = dict.fromkeys(COUNTED, 0)
        self._times = {key: self._histogram(*told) for key, told in TIMES.items()}
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "prompt tokens of finished requests")
        self._between = Tally("vllm:inter_token_latency_seconds", "between two tokens of an answer", BETWEEN, model)
        self._registry.register(self._between)
        self._generation_tokens = self._counter("vllm:generation_tokens", "tokens generated")
        self._new_tokens = 0  # that it has not counted yet
        self.aborted = self._counter("simplellm:requests_aborted", "requests whose client left before the end")
        self.failed = self._counter("simplellm:requests_failed", "requests that ended with an error of the engine")
        labels, registry = ("model_name",), self._registry
        self._success = Counter("vllm:request_success", "answers", (*labels, "finished_reason"), registry=registry)
        self._repairs = Counter(
            "simplellm:parser_repairs", "departures from the chat format, by kind", (*labels, "kind"), registry=registry
        )
        self._refused = Counter("simplellm:refusals", "requests refused, by status", ("status",), registry=registry)

    def text(self) -> bytes:
        """The exposition."""
        new, self._new_tokens = self._new_tokens, 0
        self._generation_tokens.inc(new)
        return generate_latest(self._registry)

    def beat(self, stats: Mapping[str, int]) -> None:
        """What the engine says."""
        for key, gauge in self._gauges.items():
            gauge.set(stats[key])
        self._usage.set(stats["pages_held"] / stats["pages"])
        for key, counter in self._counted.items():
            counter.inc(stats[key] - self._totals[key])
            self._totals[key] = stats[key]

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def watch(self, feed: Feed) -> None:
        """Count what a feed gets and how it ends."""
        firsts: dict[int, float] = {}
        lasts: dict[int, float] = {}
        feed.on_tokens = partial(self._tokens, feed, firsts, lasts)
        feed.on_end = partial(self._end, feed, firsts, lasts)

    def _tokens(self, feed: Feed, firsts: dict[int, float], lasts: dict[int, float], rid: int, num_tokens: int) -> None:
        now = time.monotonic()
        self._new_tokens += num_tokens
        if (last := lasts.get(rid)) is None:
            firsts[rid] = now
            self._times["first"].observe(now - feed.submitted)
        else:
            self._between.observe((now - last) / num_tokens, num_tokens)
        lasts[rid] = now

    def _end(self, feed: Feed, firsts: Mapping[int, float], lasts: Mapping[int, float]) -> None:
        if feed.failure is not None:
            self.failed.inc(len(feed.answers))
        elif feed.outputs is None:
            self.aborted.inc(len(feed.answers))
        else:
            now = time.monotonic()
            self.prompt_tokens.inc(sum(len(prompt) for prompt in feed.prompts))
            for answer in feed.answers:
                self._success.labels(self._model, answer.finish_reason).inc()
                self._times["whole"].observe(now - feed.submitted)
                for kind, number in answer.reader.repairs.items():
                    self._repairs.labels(self._model, kind).inc(number)
                first, admitted = firsts.get(answer.request.rid), answer.request.admitted_at
                if admitted is not None:
                    self._times["queue"].observe(admitted - feed.submitted)
                if first is not None and admitted is not None:
                    self._times["prompt"].observe(first - admitted)
                    self._times["decode"].observe(lasts[answer.request.rid] - first)

    def _gauge(self, name: str, told: str) -> Gauge:
        return Gauge(name, told, ("model_name",), registry=self._registry).labels(self._model)

    def _counter(self, name: str, told: str) -> Counter:
        return Counter(name, told, ("model_name",), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, told, ("model_name",), registry=self._registry, buckets=buckets).labels(self._model)
