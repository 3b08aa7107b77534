"""What became of a trace's requests, and what that comes to: throughput, first tokens, tokens between, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simplellm.bench.trace import Arrival
from simplellm.errors import EngineError

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Answer:
    """One request's, in seconds since the trace began."""

    arrival: Arrival
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of each delivery: a token, or several that came as one chunk
    tokens: int = 0
    error: str | None = None

    def end(self, tokens: int) -> None:
        """All has come that comes; an answer that is not as long as was asked for is a failure."""
        self.tokens = tokens
        if self.error is None and (tokens != self.arrival.new or not self.times):
            self.error = f"{tokens} tokens came, {self.arrival.new} were asked for"


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of the requests that did not fail. Raises EngineError if all did.

    overall: tokens per second from the start to the last token; steady: while the middle half of the tokens came, so
    neither the first prompts nor the last few answers count. first_s: from a request's arrival in the trace, whenever
    it was sent, to its first token. between_s: between two deliveries of a request, over all requests; a server that
    lags behind sends several tokens as one delivery. late_s: the most that a request was sent after its arrival; where
    it is not small, the client is what was measured.
    """
    good = [answer for answer in answers if answer.error is None]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    if not good:
        raise EngineError(f"all {len(answers)} requests failed: {errors.most_common(1)[0][0]}")
    tokens, seconds = sum(answer.tokens for answer in good), max(answer.times[-1] for answer in good)
    return {
        "requests": len(answers),
        "failures": len(answers) - len(good),
        "errors": dict(errors.most_common(5)),
        "seconds": round(seconds, 4),
        "prompt_tokens": sum(answer.arrival.prompt for answer in good),
        "output_tokens": tokens,
        "deliveries": sum(len(answer.times) for answer in good),
        "overall": round(tokens / seconds, 2),
        "steady": round(middle_rate(good), 2),
        "first_s": percentiles([answer.times[0] - answer.arrival.at for answer in good]),
        "between_s": percentiles(np.concatenate([np.diff(answer.times) for answer in good])),
        "late_s": round(max(answer.sent - answer.arrival.at for answer in good), 5),
    }


def middle_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second from the moment by which a quarter has come to that by which three quarters have."""
    times = np.concatenate([answer.times for answer in answers])
    shares = np.concatenate([np.full(len(answer.times), answer.tokens / len(answer.times)) for answer in answers])
    order = np.argsort(times, kind="stable")
    times, come = times[order], np.cumsum(shares[order])
    low, high = np.searchsorted(come, [come[-1] / 4, come[-1] * 3 / 4])
    span = float(times[high] - times[low])
    return float(come[high] - come[low]) / span if span > 0 else 0.0


def percentiles(values: Any) -> dict[str, float] | None:
    """Interpolated between the two nearest; None of nothing."""
    if len(values) == 0:
        return None
    return {f"p{p}": round(float(value), 6) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


def show(name: str, row: dict[str, Any]) -> str:
    """A line for people."""
    text = f"{name:>10}: {row['overall']:9.1f} tok/s overall, {row['steady']:9.1f} steady"
    for key, told in (("first_s", "first token"), ("between_s", "between tokens")):
        if row[key] is not None:
            text += f"; {told} {' / '.join(f'{1e3 * value:.1f}' for value in row[key].values())} ms"
    return text + (f"; {row['failures']} of {row['requests']} FAILED: {row['errors']}" if row["failures"] else "")
